"""A scene for preemption: a ledger, an API server with PodDisruptionBudgets, and a clock."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from services.binder.clients import NodeAgentClient, PodClient
from services.binder.ledger_sync.sweep import SchedulerOffers
from services.binder.plans.preemptions import PlannedPreemptions
from services.binder.plans.starts import PlannedStarts
from services.binder.report.event_writer import ConditionWriter
from services.binder.report.explanations import KubernetesEvent
from services.planner.clients import PlannerClient
from services.planner.rules import PreemptionRules
from services.planner.start_planner import PLAN_S
from services.planner.wiring import PlannerPorts, build_planner
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.kubeconfig import load_credentials
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.events.event import Event
from shared.model.events.node_events import ViolationFound
from shared.model.events.plan_events import PlansChanged, StartReported, ViolationConfirmed
from shared.model.events.pod_events import BudgetChanged, PlacementChosen, PodQueued
from shared.model.events.request_reply import DryRunReply, DryRunRequest
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import NoCapacity, Reservation, ReservedLease, WaitingPod
from shared.model.leases.preemption import (
    PREEMPT_AT,
    EvictionRecord,
    PreemptionStage,
    PreemptionState,
    StoredStart,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import NO_TERM, Gang, GpuRequest, PodRequest, Term
from shared.runtime.leadership import Leadership
from tests.support.binder.world import Counts
from tests.support.clock import FakeClock
from tests.support.placer.ledger import ledger, share
from tests.support.servers.valkey import ValkeyServer
from tests.support.simcluster.apiserver import ApiUnderTest, api_server

RULES = PreemptionRules(
    preemption_notice_s=30, preemption_min_runtime_s=60, preemption_cooldown_s=600
)
OWNER = "uid-of-owner"
HOUR = Term(max_run_s=3600)


def budget(namespace: str, lease_class: str = "reclaimable", **fields: Any) -> BudgetChanged:
    """How a namespace's budget stands."""
    states = {"guaranteed": "ok", "reclaimable": "exhausted", "expired": "overdrawn"}
    defaults: dict[str, Any] = {"previous_state": "ok", "state": states[lease_class]}
    return BudgetChanged(
        namespace=Namespace(namespace), lease_class=lease_class, **(defaults | fields)
    )


def waiting_pod(
    pod: str,
    *,
    namespace: str = "b",
    name: str = "",
    mib: int = 8_000,
    gpus: int = 1,
    **fields: Any,
) -> PodQueued:
    """A pod that waits for so much of so many devices."""
    request = PodRequest(
        containers=(GpuRequest(container="main", gpus=gpus, memory_units=mib),) * (gpus > 0),
        resources={"cpu": 100, "pods": 1},
        priority=fields.pop("priority", 0),
        gang=fields.pop("gang", None),
        term=fields.pop("term", NO_TERM),
    )
    return PodQueued(
        pod=PodUid(pod),
        namespace=Namespace(namespace),
        name=name or pod,
        resource_version="1",
        request=request,
        **fields,
    )


@dataclass
class RecordedReports(Counts):
    """Events in a list, and what metrics have counted."""

    events: list[KubernetesEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        Counts.__init__(self)

    def record(self, event: KubernetesEvent, *, once: bool = False) -> None:
        self.events.append(event)

    def of(self, name: str) -> list[str]:
        """Messages of a pod's Events about preemption."""
        return [event.message for event in self.events if event.name == name]


class SliceAgents(NodeAgentClient):
    """Agents that write ResourceSlices anew."""

    def __init__(self) -> None:
        self.renewed: list[NodeName] = []

    async def renew_slices(self, node: NodeName) -> str:
        self.renewed.append(node)
        return ""


class Replicas:
    """A planner, and the parts of a binder that carry its plans out."""

    def __init__(
        self,
        at: "Scene",
        rules: PreemptionRules,
        *,
        pods: PodClient | None,
        reader: PlannerClient | None,
    ) -> None:
        client = pods or PodClient(at.kube)
        self.agents = SliceAgents()
        self.starts = PlannedStarts(
            ledger=at.ledger,
            store=at.preemptions,
            events=at.reports,
            conditions=ConditionWriter(PodClient(at.kube), at.clock),
            clock=at.clock,
        )
        self.preemptions = PlannedPreemptions(
            ledger=at.ledger,
            store=at.preemptions,
            pods=client,
            events=at.reports,
            clock=at.clock,
            offers=SchedulerOffers(at.ledger.waiting_pods, PodClient(at.kube), at.clock),
            agents=self.agents,
            starts=self.starts,
            leadership=Leadership(at.preemptions, "binder"),
        )
        self.planner = build_planner(
            PlannerPorts(
                ledger=at.other_ledger,
                pods=reader or PlannerClient(at.kube),
                publish=self._receive,
                clock=at.clock,
            ),
            rules=rules,
        )

    async def _receive(self, events: Sequence[Event]) -> None:
        """Hand the planner's events over to the binder."""
        await self.starts.show_starts([e for e in events if isinstance(e, StartReported)])
        if changes := [event for event in events if isinstance(event, PlansChanged)]:
            await self.preemptions.note_changes(changes)

    @property
    def steps_s(self) -> tuple[float, float]:
        """The intervals of the planner and of the binder."""
        return self.planner.preemptions.step_s, self.preemptions.step_s

    async def preempt(self) -> list[PlacementChosen]:
        """Plan what is due, and take the next step of every plan."""
        await self.planner.preemptions.plan()
        return await self.preemptions.carry_out()

    async def evict_violators(self, violations: Sequence[ViolationFound]) -> None:
        """Report violations to the planner, as a binder does that has confirmed them."""
        confirmed = [ViolationConfirmed.of(violation) for violation in violations]
        await self.planner.preemptions.evict_violators(confirmed)

    async def dry_run(self, request: DryRunRequest) -> DryRunReply:
        return await self.planner.plan_preemption(request)


@dataclass
class Scene:
    """One node `a` with GPUs of 16,000 MiB, namespaces `a` and `b`."""

    api: ApiUnderTest
    kube: KubernetesClient
    ledger: RedisLeases
    other_ledger: RedisLeases
    """The same by the connection of planners."""
    preemptions: Preemptions
    clock: FakeClock
    rules: PreemptionRules = RULES
    reports: RecordedReports = field(default_factory=RecordedReports)

    def binder(self, **changes: Any) -> Replicas:
        """A planner and a binder of their own."""
        clients = {"pods": changes.pop("pods", None), "reader": changes.pop("reader", None)}
        rules = replace(self.rules, planned_starts=changes.pop("most", 3), **changes)
        return Replicas(self, rules, **clients)

    async def running(
        self,
        name: str,
        *,
        namespace: str = "a",
        gpu: int = 0,
        mib: int = 8_000,
        age_s: float = 3600,
        owner: str = OWNER,
        labels: Mapping[str, str] | None = None,
        grace_s: int = 30,
        cpu: int = 100,
        term: Term = NO_TERM,
        gang: Gang | None = None,
    ) -> Lease:
        """A ready pod of node `a` with its lease."""
        references = [
            {
                "apiVersion": "example.com/v1",  # not served: the pod is no garbage
                "kind": "Workload",
                "name": "r",
                "uid": owner,
                "controller": True,
            }
        ]
        made = await self.pod(
            name,
            namespace,
            labels=dict(labels or {}),
            spec={"terminationGracePeriodSeconds": grace_s},
            owners=references if owner else [],
        )
        uid = PodUid(made["metadata"]["uid"])
        place = Placement(node=NodeName("a"), shares=(share("a", gpu, mib=mib),))
        lease = await self.reserve(
            uid, name, place, namespace=namespace, age_s=age_s, cpu=cpu, term=term, gang=gang
        )
        assert isinstance(lease, ReservedLease), lease
        await self.ledger.bind([lease.lease])
        [active] = await self.ledger.activate([(uid, place.node)])
        assert active is not None
        await self.kube.bind_pod(namespace, name, uid, "a", {})
        ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        await self.kube.patch_merge(path, {"status": ready})
        return active

    async def reserve(
        self,
        uid: str,
        name: str,
        place: Placement,
        *,
        namespace: str = "a",
        age_s: float = 0.0,
        cpu: int = 100,
        term: Term = NO_TERM,
        gang: Gang | None = None,
    ) -> Any:
        reservation = Reservation(
            pod=PodUid(uid),
            namespace=Namespace(namespace),
            name=name,
            candidates=(place,),
            resources={"cpu": cpu, "pods": 1},
            term=term,
            gang=gang.name if gang else "",
            gang_min=gang.min_member if gang else 0,
        )
        [outcome] = await self.ledger.reserve(
            [reservation], now=self.clock.now() - age_s, ttl_s=1e6
        )
        return outcome

    async def pod(
        self, name: str, namespace: str, *, spec: Mapping[str, Any], owners: Any = (), **meta: Any
    ) -> dict[str, Any]:
        body = {
            "metadata": {"name": name, "ownerReferences": list(owners), **meta},
            "spec": {
                "schedulerName": "leasehold",
                "containers": [{"name": "main", "image": "i"}],
                **spec,
            },
        }
        return dict(await self.kube.create(f"/api/v1/namespaces/{namespace}/pods", body, dict))

    async def waiting(
        self,
        name: str,
        *,
        namespace: str = "b",
        mib: int = 8_000,
        gpus: int = 1,
        since: float = 0.0,
        **fields: Any,
    ) -> PodUid:
        """A pod that fits nowhere."""
        made = await self.pod(name, namespace, spec={})
        uid = PodUid(made["metadata"]["uid"])
        queued = waiting_pod(uid, namespace=namespace, name=name, mib=mib, gpus=gpus, **fields)
        capacity = await self.ledger.capacity()
        verdict = WaitingPod(
            queued=queued,
            refusal=Refusal(reason="full"),
            capacity=capacity,
            waiting_since=since,
        )
        await self.ledger.waiting_pods.enqueue([verdict])
        return uid

    async def save_budget(
        self, namespace: str, lease_class: str = "reclaimable", **fields: Any
    ) -> None:
        """Save the state of a namespace's budget."""
        at = self.clock.now()
        await self.preemptions.save_budget(budget(namespace, lease_class, reported_at=at, **fields))

    async def protect(self, name: str, labels: Mapping[str, str], *, least: int) -> None:
        """A PodDisruptionBudget in namespace `a`."""
        await self.kube.create(
            "/apis/policy/v1/namespaces/a/poddisruptionbudgets",
            {
                "metadata": {"name": name},
                "spec": {"minAvailable": least, "selector": {"matchLabels": dict(labels)}},
            },
        )

    async def get_pod(self, name: str, namespace: str = "a") -> dict[str, Any] | None:
        with suppress(NotFoundError):
            document: dict[str, Any] = json.loads(
                await self.kube.read(f"/api/v1/namespaces/{namespace}/pods/{name}")
            )
            return document
        return None

    async def is_deleting(self, name: str) -> bool:
        """Whether the pod is being deleted."""
        pod = await self.get_pod(name)
        return pod is None or "deletionTimestamp" in pod["metadata"]

    async def announced_for(self, name: str) -> str | None:
        """The announced time of the pod's eviction."""
        pod = await self.get_pod(name)
        notes: dict[str, str] = (pod or {}).get("metadata", {}).get("annotations", {})
        return notes.get(PREEMPT_AT)

    async def stages(self) -> list[PreemptionStage]:
        """The stages of open preemptions."""
        return [plan.preemption.stage for plan in (await self.state()).open]

    async def evictions(self) -> tuple[EvictionRecord, ...]:
        """The journal of evictions."""
        return (await self.state()).evictions

    async def state(self) -> PreemptionState:
        """What is stored now."""
        return await self.preemptions.state(now=self.clock.now())

    def writes(self, name: str, namespace: str = "a") -> dict[str, int]:
        """What was written of a pod."""
        return dict(self.api.store.writes.counts("pods", f"{namespace}/{name}"))

    async def terminate(self, lease: Lease) -> None:
        """The last container of a pod has ended, and its node's agent reported it."""
        await self.ledger.release([lease.pod], reason="the pod has terminated")
        path = f"/api/v1/namespaces/{lease.namespace}/pods/{lease.name}"
        with suppress(NotFoundError):
            await self.kube.delete(path, grace_s=0)

    async def thief(
        self, gpu: int = 0, *, mib: int = 1_000, cpu: int = 100, term: Term = NO_TERM
    ) -> str:
        """Another pod wants something of a device: why it gets nothing; empty: it does."""
        place = Placement(node=NodeName("a"), shares=(share("a", gpu, mib=mib),))
        outcome = await self.reserve("thief", "thief", place, namespace="c", cpu=cpu, term=term)
        return outcome.reason if isinstance(outcome, NoCapacity) else ""

    async def in_need(self, *, mib: int = 8_000, **running: Any) -> tuple[Lease, PodUid, Replicas]:
        """A pod of namespace `a`, whose budget is used up, and one of `b` that needs its device."""
        old = await self.running("old", mib=16_000, **running)
        await self.save_budget("a")
        return old, await self.waiting("new", mib=mib), self.binder()

    async def evict(self, binder: Replicas) -> None:
        """Let a binder announce evictions, and evict once the notice is over."""
        await binder.preempt()
        self.clock.advance(30)
        await binder.preempt()

    async def steps(self, binder: Replicas, count: int = 1) -> list[PlacementChosen]:
        placements: list[PlacementChosen] = []
        for _ in range(count):
            placements += await binder.preempt()
        return placements


@asynccontextmanager
async def scene(
    url: str, *, gpus: int = 1, nodes: Mapping[str, int] | None = None
) -> AsyncIterator[Scene]:
    async with (
        api_server() as api,
        KubernetesClient(load_credentials(api.kubeconfig)) as kube,
        ledger(url, {"a": gpus}) as leases,
        RedisLeases.connect(url, prefix=leases._connection.prefix) as other_ledger,
        Preemptions.connect(url, prefix=leases._connection.prefix) as preemptions,
    ):
        for namespace in ("a", "b", "c"):
            await kube.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        yield Scene(api, kube, leases, other_ledger, preemptions, FakeClock())


@pytest.fixture
async def at(server: ValkeyServer, request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """A node with one GPU, or as many as a test names."""
    await server.ready()
    await server.command("FLUSHALL")
    async with scene(server.url, gpus=getattr(request, "param", 1)) as made:
        yield made


async def running(at: Scene, gpu: int, term: Term = HOUR, mib: int = 16_000) -> Lease:
    return await at.running(f"old-{gpu}", gpu=gpu, mib=mib, age_s=0, term=term)


async def starts(at: Scene) -> tuple[StoredStart, ...]:
    return (await at.state()).starts


async def promised(
    at: Scene, *, other: Term = NO_TERM, mib: int = 16_000
) -> tuple[Lease, Replicas, StoredStart]:
    """A lease for whose end pod `new` waits, which gets its device, and the binder that said so."""
    old = await running(at, 0, mib=mib)
    await running(at, 1, other)
    await at.waiting("new", mib=16_000)
    binder = at.binder()
    await step(at, binder)
    [start] = await starts(at)
    return old, binder, start


async def step(at: Scene, binder: Replicas) -> list[PlacementChosen]:
    at.clock.advance(PLAN_S + 1)
    return await binder.preempt()


def events(at: Scene, reason: str) -> list[str]:
    return [event.message for event in at.reports.events if event.reason == reason]


@pytest.fixture
async def idle_node(server: ValkeyServer, request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """A node with two idle GPUs of 16,000 MiB, or as many as a test names, and the real time."""
    await server.ready()
    await server.command("FLUSHALL")
    async with scene(server.url, gpus=getattr(request, "param", 2)) as made:
        made.clock.time = time.time()  # the leases' times are the server's
        yield made

"""A binder on hand-written fakes of its ports; each fake records its calls."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import prometheus_client
from msgspec import structs

from services.binder.bind.volume_client import VolumeClient
from services.binder.clients import NodeAgentClient, NoReply, PodClient
from services.binder.ledger_sync.lease_holders import LeaseHolders
from services.binder.ledger_sync.ledger_updates import LedgerUpdater
from services.binder.metrics import ANOMALIES, EVICTIONS, RESIZES
from services.binder.service import Binder
from services.binder.wiring import BinderPorts, build_binder
from services.claims.clients import ClaimAnswer, ClaimClient, RequestUse
from shared.kubernetes.client import KubernetesClient
from shared.ledger.leases import RedisLeases
from shared.model.devices.node import AntiAffinityTerm
from shared.model.errors import ConflictError, LeaseholdError, RequestError, UnavailableError
from shared.model.events.claim_events import AllocatedClaim, AllocatedDevice
from shared.model.events.event import Event
from shared.model.events.pod_events import PlacementChosen
from shared.model.events.request_reply import BindReply, LimitsReply, LimitsRequest
from shared.model.leases.lease import Lease, LeaseState, Share, ShareSize
from shared.model.leases.ledger import LedgerStatus
from shared.model.names import BUDGET_GATE, DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.claim import device_name
from shared.pods.pod_snapshot import PodSnapshot
from shared.runtime.runner import run_loop
from shared.runtime.service import roles_of
from tests.support.clock import FakeClock
from tests.support.placer.ledger import ledger


def allocated(
    name: str, *devices: AllocatedDevice, node: str = "a", generation: str = "g1", version: int = 1
) -> AllocatedClaim:
    return AllocatedClaim(
        claim=PodUid(f"uid-{name}"),
        namespace=Namespace("default"),
        name=name,
        node=NodeName(node),
        generation=generation,
        devices=devices,
        resource_version=str(version),
    )


def on(uuid: DeviceUuid, memory_mib: int | None = 4_000, **more: object) -> AllocatedDevice:
    defaults: dict[str, object] = {"request": "gpu", "share_id": f"share-{memory_mib}"}
    return AllocatedDevice(
        device=device_name(uuid),
        memory_mib=memory_mib,
        **(defaults | more),  # type: ignore[arg-type]
    )


class FakeClaims(ClaimClient):
    """Claims by name, whose versions rise with every write."""

    def __init__(self) -> None:
        self.stored: dict[str, AllocatedClaim] = {}
        self.answers: dict[str, list[ClaimAnswer]] = {}
        self.errors: list[LeaseholdError] = []
        self.uses: dict[str, list[RequestUse]] = {}
        """By name of the pod."""
        self.unreadable: list[LeaseholdError] = []
        self.reads = Counter[str]()
        """Of each claim and pod."""
        self.silent = set[str]()
        """Names of claims that the API server does not return."""

    def put(self, claim: AllocatedClaim) -> AllocatedClaim:
        self.stored[claim.name] = claim
        return claim

    async def get_allocation(self, namespace: str, name: str) -> AllocatedClaim | None:
        self.reads[name] += 1
        if name in self.silent:
            raise UnavailableError("the API server does not respond")
        return self.stored.get(name)

    async def list_uses(self, namespace: str, pod: str, uid: PodUid) -> list[RequestUse]:
        self.reads[pod] += 1
        if self.unreadable:
            raise self.unreadable.pop(0)
        return self.uses.get(pod, [])

    async def answer(self, claim: AllocatedClaim, answer: ClaimAnswer) -> None:
        if self.errors:
            raise self.errors.pop(0)
        now = self.stored.get(claim.name)
        if now is None:
            raise RequestError("not found")
        if now.resource_version != claim.resource_version:
            raise ConflictError("the object has been modified")
        self.answers.setdefault(claim.name, []).append(answer)
        self.stored[claim.name] = replace(
            now,
            answer=answer.condition,
            lease=json.dumps(answer.lease) if answer.lease else "",
            resource_version=str(int(now.resource_version) + 1),
        )


def holders(pods: PodClient) -> LeaseHolders:
    """Return the holders of leases in a cluster without claims."""
    return LeaseHolders(pods, FakeClaims())


NOW = 1_787_000_000.0


def lease(name: str = "p1", node: str = "n1", **changes: Any) -> Lease:
    made = Lease(
        pod=PodUid(f"uid-{name}"),
        namespace=Namespace("default"),
        name=name,
        node=NodeName(node),
        shares=(
            Share(
                container="c",
                device=DeviceUuid(f"GPU-{node}-0"),
                index=0,
                device_mib=16_000,
                memory_mib=1000,
                cores_percent=10,
                slot=0,
                fence=1,
            ),
        ),
        version=1,
        created_at=NOW - 1,
    )
    expires = changes.get("state", LeaseState.RESERVED) is LeaseState.RESERVED
    return structs.replace(made, **{"expires_at": NOW + 30 if expires else 0.0} | changes)


def chosen(*leases: Lease) -> list[PlacementChosen]:
    return [PlacementChosen(lease=lease) for lease in leases]


async def _nothing() -> None:
    """Do nothing."""


class FakePods(PodClient):
    """An API server whose responses a test chooses, pod by pod."""

    def __init__(self) -> None:
        self.seen: dict[str, PodSnapshot | None] = {}
        self.conflicts = 0
        self.writes = 0
        self.before_read: Callable[[], Awaitable[None]] = _nothing
        self.before_annotate: Callable[[], Awaitable[None]] = _nothing
        self.bindings: list[tuple[str, str, Mapping[str, str]]] = []
        self.errors: dict[str, list[LeaseholdError]] = {}
        self.unreadable: dict[str, LeaseholdError] = {}
        self.hanging: dict[str, asyncio.Event] = {}
        self.away = False
        self.before_binding: Callable[[], None] = lambda: None
        self.patches: list[tuple[str, Any]] = []
        self.events: dict[str, dict[str, Any]] = {}
        self.event_writes = 0
        self.nodes: set[NodeName] = set()
        self.opened: list[str] = []
        """Pods whose gates were removed."""
        self.after_gate: Callable[[], Awaitable[None]] = _nothing

    async def list_unbound(self, namespace: str, most: int) -> dict[PodUid, PodSnapshot]:
        return {}

    async def list_selected(
        self, term: AntiAffinityTerm, node: NodeName | None
    ) -> list[PodSnapshot]:
        return []

    async def node_labels(self, name: NodeName) -> Mapping[str, str] | None:
        return {} if name in self.nodes else None

    async def bind_pod(  # noqa: PLR0917 - the API client's own order
        self,
        namespace: str,
        name: str,
        uid: str,
        node: str,
        annotations: Mapping[str, str],
        labels: Mapping[str, str] | None = None,
        traceparent: str | None = None,
    ) -> None:
        self.before_binding()
        self.bindings.append((name, node, annotations))
        if name in self.hanging:
            await self.hanging[name].wait()
        if self.away:
            raise UnavailableError("no answer")
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        if self.seen.get(name) is not None:
            raise ConflictError("pod is already assigned")
        self.seen[name] = PodSnapshot(PodUid(uid), NodeName(node))

    async def get(self, namespace: str, name: str) -> PodSnapshot | None:
        await self.before_read()
        if self.away:
            raise UnavailableError("no answer")
        if name in self.unreadable:
            raise self.unreadable[name]
        return self.seen.get(name)

    async def annotate(
        self,
        namespace: str,
        name: str,
        uid: str,
        annotations: Mapping[str, str | None],
        *,
        resource_version: str = "",
    ) -> None:
        if not resource_version:
            return
        await self.before_annotate()
        now = self.seen[name]
        assert now is not None
        if self.conflicts or now.resource_version != resource_version:
            self.conflicts = max(0, self.conflicts - 1)
            raise ConflictError("it has changed")
        self.writes += 1
        self.seen[name] = replace(
            now,
            resource_version=f"{now.resource_version}+",
            annotations={
                **now.annotations,
                **{key: text or "" for key, text in annotations.items()},
            },
        )

    async def remove_gate(self, namespace: str, name: str, uid: str, gate: str) -> bool:
        assert (gate, uid) == (BUDGET_GATE, f"uid-{name}")
        if self.away:
            raise UnavailableError("no answer")
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        if self.seen.get(name, True) is None:
            return False
        self.opened.append(name)
        await self.after_gate()
        return True

    async def patch_status(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        self.patches.append((name, patch))

    async def create_event(self, namespace: str, body: Mapping[str, Any]) -> None:
        name = body["metadata"]["name"]
        if self.away:
            raise UnavailableError("no answer")
        if name in self.events:
            raise ConflictError("exists")
        self.event_writes += 1
        self.events[name] = dict(body)

    async def patch_event(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        if name not in self.events:
            raise RequestError("not found")
        self.event_writes += 1
        self.events[name] |= patch

    async def get_event_count(self, namespace: str, name: str) -> int:
        return int(self.events.get(name, {}).get("count", 0))


class FakeBus:
    """Records published events."""

    def __init__(self) -> None:
        self.published: list[Event] = []

    async def publish(self, events: Sequence[Event]) -> None:
        self.published += events


class FakeAgents(NodeAgentClient):
    """Agents that reply as the test chooses: True, False, or not at all."""

    def __init__(self) -> None:
        self.limits: list[LimitsRequest] = []
        self.in_use_mib = 0
        self.keeps_limits = False
        """The driver ignores smaller limits, whatever is in use."""
        self.away: set[NodeName] = set()
        self.kept: ShareSize | None = None
        """The most that its device can give a container."""
        self.answers: dict[PodUid, bool] = {}
        self.requested_pods: list[PodUid] = []
        self.requests = 0
        self.bind_requests: list[Lease] = []
        """Leases of all requests to bind their pods."""
        self.slices: list[NodeName] = []
        """Nodes whose slices were requested."""
        self.replies: dict[NodeName, BindReply | NoReply] = {}
        """Replies to bind requests by node."""
        self.other_reply: BindReply | NoReply = BindReply()
        """Those of other nodes: all pods may be bound."""
        self.cut_off = False
        """Whether no bind request reaches an agent."""
        self.reported: set[NodeName] = set()
        """Nodes of which the ledger has reports of their agents."""
        self.before_reply: Callable[[], Awaitable[None]] = _nothing

    async def set_limits(self, request: LimitsRequest) -> LimitsReply:
        self.limits.append(request)
        if request.node in self.away:
            raise UnavailableError("no reply")
        least = min(share.memory_mib for share in request.lease.shares)
        if request.resize_id and not request.finished and self.keeps_limits:
            return LimitsReply(applied=False, reason="the driver keeps it", may_follow=True)
        if request.resize_id and not request.finished and least < self.in_use_mib:
            reason = f"{self.in_use_mib} MiB are in use"
            return LimitsReply(applied=False, reason=reason, in_use_mib=self.in_use_mib)
        if self.kept is not None and least > self.kept.memory_mib:
            reason = "it would be given out twice"
            return LimitsReply(applied=False, reason=reason, container="c", kept=self.kept)
        return LimitsReply(applied=True)

    async def request_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindReply | NoReply:
        self.requests += 1
        self.bind_requests += leases
        await self.before_reply()
        if self.cut_off:
            raise UnavailableError("NATS is away")
        return self.replies.get(node, self.other_reply)

    async def reported_by_agent(self, node: NodeName) -> bool:
        return node in self.reported

    async def write_slices(self, node: NodeName) -> str:
        self.slices.append(node)
        return ""

    async def list_terminated(self, node: NodeName, pods: Sequence[PodUid]) -> set[PodUid]:
        self.requests += 1
        self.requested_pods += pods
        if not self.answers.keys() >= set(pods):
            raise UnavailableError("no reply")
        return {pod for pod in pods if self.answers[pod]}


class Counts:
    """What the binder's metrics have counted since this was made, by their labels."""

    def __init__(self) -> None:
        self._before = {counter: _values(counter) for counter in (ANOMALIES, EVICTIONS, RESIZES)}

    @property
    def anomalies(self) -> Counter[Any]:
        """Anomalies by kind."""
        return _values(ANOMALIES) - self._before[ANOMALIES]

    @property
    def evictions(self) -> Counter[Any]:
        """Evictions by the pod's namespace and the cause."""
        return _values(EVICTIONS) - self._before[EVICTIONS]

    @property
    def resizes(self) -> Counter[Any]:
        """Requests by outcome."""
        return _values(RESIZES) - self._before[RESIZES]


def _values(metric: prometheus_client.Counter) -> Counter[Any]:
    [family] = metric.collect()
    samples = [sample for sample in family.samples if sample.name.endswith("_total")]
    keys = [tuple(sample.labels.values()) for sample in samples]
    return Counter(
        {
            key if len(key) > 1 else key[0]: int(sample.value)
            for key, sample in zip(keys, samples, strict=True)
        }
    )


class ObservedLedger(RedisLeases):
    """Reads its status anew for every caller, and records whose leases were loaded."""

    loaded: list[PodUid]

    async def status(self, *, now: float, max_age_s: float = 0.0) -> LedgerStatus | None:
        return await super().status(now=now, max_age_s=0.0)

    async def load(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        self.loaded += pods
        return await super().load(pods)


class World:
    """A binder on a real ledger, with an API server and agents that a test controls."""

    def __init__(
        self,
        ledger: RedisLeases,
        *,
        pods: PodClient | None = None,
        claims: FakeClaims | None = None,
        agents: FakeAgents | None = None,
        bus: FakeBus | None = None,
        batch_wait_s: float = 2.0,
        clock: FakeClock | None = None,
        volumes: KubernetesClient | None = None,
    ) -> None:
        self.clock = clock or FakeClock(NOW)
        self.ledger = ledger
        self.pods = cast(FakePods, pods) if pods else FakePods()
        self.claims = claims or FakeClaims()
        self.bus = bus or FakeBus()
        self.agents = agents or FakeAgents()
        self.metrics = Counts()
        self.binder: Binder = build_binder(
            BinderPorts(
                ledger=ledger,
                pods=self.pods,
                claims=self.claims,
                volumes=VolumeClient(volumes) if volumes else cast(VolumeClient, None),
                agents=self.agents,
                publish=self.bus.publish,
                clock=self.clock,
                host_clock=self.clock,
            ),
            batch_wait_s=batch_wait_s,
        )

    @property
    def updater(self) -> LedgerUpdater:
        """The part that writes facts into the ledger."""
        return self.binder.updater

    async def bind_all(self, *leases: Lease) -> list[Any]:
        """Bind pods that were placed so, while Bindings are sent."""
        async with running(self.binder.sender.send_bindings):
            return [*await self.binder.pods.bind_pods(chosen(*leases))]

    async def states(self) -> dict[str, LeaseState]:
        """The state of each pod's lease."""
        return {lease.name: lease.state for lease in (await self.leases()).values()}

    async def leases(self) -> dict[PodUid, Lease]:
        """All live leases."""
        return {lease.pod: lease async for page in self.ledger.load_all() for lease in page}

    async def restore(self, *leases: Lease) -> None:
        """Write leases, each with the next slots of its devices."""
        held: Counter[DeviceUuid] = Counter()
        for lease in (await self.leases()).values():
            held.update(share.device for share in lease.shares)
        for lease in leases:
            shares = []
            for share in lease.shares:
                shares.append(structs.replace(share, slot=held[share.device]))
                held[share.device] += 1
            restored = structs.replace(lease, shares=tuple(shares))
            assert await self.ledger.restore([restored], now=NOW) == []

    async def cordoned(self) -> dict[NodeName, str]:
        """The cordoned nodes, with why."""
        return dict(await self.ledger.set_cordoned({}))

    async def lose(self) -> None:
        """Lose everything in the ledger, which must be rebuilt."""
        connection = self.ledger._connection
        keys = await connection._redis.keys(f"{connection.prefix}*")
        await connection._redis.delete(*keys)

    async def rebuild(self, *leases: Lease) -> None:
        """Begin a new ledger with these leases."""
        token = await self.ledger.begin_rebuild(now=NOW, force=True)
        assert token is not None
        assert await self.ledger.restore(leases, now=NOW, token=token) == []
        assert await self.ledger.finish_rebuild(token)

    def replica(self) -> "World":
        """Another binder on the same ledger, with an API server and agents of its own."""
        return World(self.ledger)


NewWorld = Callable[..., Awaitable[World]]
"""Makes a world of its own with these leases."""


@contextlib.asynccontextmanager
async def world(url: str, *leases: Lease, **options: Any) -> AsyncIterator[World]:
    """Open an empty ledger with nodes `n1` and `n2`, and write leases into it."""
    async with ledger(url, {"n1": 1, "n2": 1}, kind=ObservedLedger) as opened:
        opened = cast(ObservedLedger, opened)
        opened.loaded = []
        made = World(opened, **options)
        await made.restore(*leases)
        opened.loaded.clear()
        yield made


@contextlib.asynccontextmanager
async def running(*loops: Callable[[], Any]) -> AsyncIterator[None]:
    """Run loops while the block lasts; those of a service as its runtime does."""
    tasks = [asyncio.create_task(_run(loop)) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _run(loop: Callable[[], Any]) -> None:
    owner: Any = getattr(loop, "__self__", None)
    roles = {role.method: role for role in roles_of(owner) if not role.part}
    role = roles.get(getattr(loop, "__name__", ""))
    publish = getattr(owner, "publish", None)
    await (loop() if role is None else run_loop(role, publish))  # type: ignore[arg-type]

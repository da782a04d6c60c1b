"""Pods that kube-scheduler places are bound once, with a lease, or have none."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from services.binder.clients import PodClient
from services.binder.report.explanations import KubernetesEvent
from services.binder.service import Binder
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.ledger.leases import RedisLeases
from shared.model.budgets.quota import Quota, QuotaLimits
from shared.model.devices.node import HOSTNAME, AntiAffinityTerm, LabelRequirement
from shared.model.events.pod_events import (
    PlacementChosen,
    PlacementRefused,
    PodBound,
    PodFilteredOut,
    PodHandedOver,
    PodQueued,
)
from shared.model.events.request_reply import BindReply, PodBindingReply, PodBindingRequest
from shared.model.leases.lease import LeaseState
from shared.model.leases.ledger import ReservedLease, reservation_for
from shared.model.names import OFFER, Namespace, NodeName, PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import GpuRequest, PodRequest
from tests.support.binder.world import FakeAgents, FakeBus, World, running
from tests.support.clock import FakeClock
from tests.support.placer.ledger import NOW, assert_sound, facts, ledger, queued, reservation, share
from tests.support.placer.running import placers
from tests.support.simcluster.apiserver import api_server
from tests.support.waiting import until

PODS = "/api/v1/namespaces/default/pods"
EVENTS = "/api/v1/namespaces/default/events"
WHOLE_MIB = 16_000


@dataclass
class SchedulerBindingsStage:
    """Nodes `a` and `b` with one GPU each, two binders, and the simulated API server."""

    kube: KubernetesClient
    leases: RedisLeases
    clock: FakeClock = field(default_factory=lambda: FakeClock(NOW))
    agents: FakeAgents = field(default_factory=FakeAgents)
    bus: FakeBus = field(default_factory=FakeBus)
    binders: list[Binder] = field(default_factory=list)

    def binder(self) -> Binder:
        api = PodClient(self.kube)
        world = World(self.leases, pods=api, agents=self.agents, bus=self.bus, clock=self.clock)
        return world.binder

    async def pod(self, name: str) -> PodQueued:
        spec = {"schedulerName": "leasehold-full", "containers": [{"name": "main", "image": "i"}]}
        body = {"metadata": {"name": name}, "spec": spec}
        made = await self.kube.create(PODS, body, dict)
        containers = (GpuRequest(container="main", gpus=1, memory_units=WHOLE_MIB),)
        return PodQueued(
            pod=PodUid(made["metadata"]["uid"]),
            namespace=Namespace("default"),
            name=name,
            resource_version=made["metadata"]["resourceVersion"],
            request=PodRequest(containers=containers, resources={"pods": 1}),
            by_kube_scheduler=True,
        )

    async def bind(
        self,
        pod: PodQueued,
        node: str = "a",
        binder: int = 0,
        *,
        mib: int = WHOLE_MIB,
        repels: tuple[AntiAffinityTerm, ...] = (),
    ) -> PodBindingReply:
        """Request the GPU of a node."""
        placement = Placement(node=NodeName(node), shares=(share(node, mib=mib),))
        request = PodBindingRequest(queued=pod, placement=placement, repels=repels)
        return await self.binders[binder].chosen.bind_chosen(request)

    async def create_noisy(self) -> PodQueued:
        """Create a pod of a placer's."""
        spec = {"schedulerName": "leasehold", "containers": [{"name": "main", "image": "i"}]}
        labels = {"app": "noisy"}
        body = {"metadata": {"name": "noisy", "labels": labels}, "spec": spec}
        made = await self.kube.create(PODS, body, dict)
        pod = queued(made["metadata"]["uid"], units=1_000)
        return replace(pod, name="noisy", labels=labels)

    async def noisy_pod(self, node: str, *, bound: bool) -> None:
        """Create such a pod with a lease on a node, and perhaps bind it there."""
        uid = (await self.create_noisy()).pod
        wanted = reservation(uid, share(node, mib=1_000))
        await self.leases.reserve([wanted], now=self.clock.now(), ttl_s=30)
        if bound:
            await self.kube.bind_pod("default", "noisy", uid, node, {})

    async def create_nodes(self, zones: dict[str, str]) -> None:
        """Create the nodes, each with the label of its zone."""
        for name, zone in zones.items():
            labels = {"zone": zone, HOSTNAME: name}
            await self.kube.create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
            await self.leases.save_nodes([replace(facts(name), labels=labels)])

    async def node_of(self, pod: PodQueued) -> str:
        found = json.loads(await self.kube.read(f"{PODS}/{pod.name}"))
        return str(found["spec"].get("nodeName", ""))

    async def annotations(self, pod: PodQueued) -> dict[str, str]:
        found = json.loads(await self.kube.read(f"{PODS}/{pod.name}"))
        return dict(found["metadata"].get("annotations", {}))

    async def nodes_leased(self) -> list[tuple[str, LeaseState]]:
        return [(lease.node, lease.state) for lease in await assert_sound(self.leases)]

    async def passing(self, reply: Coroutine[Any, Any, PodBindingReply]) -> PodBindingReply:
        """Let time pass until there is a reply."""
        replying = asyncio.create_task(reply)

        def replied() -> bool:
            self.clock.advance(0.1)
            return replying.done()

        await until(replied)
        return await replying


@pytest.fixture
async def at(url: str) -> AsyncIterator[SchedulerBindingsStage]:
    async with (
        api_server() as api,
        KubernetesClient(load_credentials(api.kubeconfig)) as kube,
        ledger(url, {"a": 1, "b": 1}) as leases,
        contextlib.AsyncExitStack() as stack,
    ):
        stage = SchedulerBindingsStage(kube, leases)
        stage.binders = [stage.binder(), stage.binder()]
        for binder in stage.binders:
            await stack.enter_async_context(running(binder.sender.send_bindings))
        yield stage


def repelling(key: str, app: str = "noisy", **fields: Any) -> AntiAffinityTerm:
    selector = (LabelRequirement("app", "In", (app,)), LabelRequirement("spared", "DoesNotExist"))
    given = {"namespaces": (Namespace("default"),)} | fields
    return AntiAffinityTerm(topology_key=key, selector=selector, **given)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("key", [HOSTNAME, "zone"])
async def test_a_pod_is_not_bound_beside_one_that_it_repels_and_kube_scheduler_has_not_seen(
    at: SchedulerBindingsStage, key: str, bound: bool
) -> None:
    await at.create_nodes({"a": "x", "b": "y"})
    await at.noisy_pod("a", bound=bound)
    pod = await at.pod("quiet")

    refused = await at.bind(pod, "a", mib=1_000, repels=(repelling(key),))
    elsewhere = await at.bind(pod, "b", mib=1_000, repels=(repelling(key),))

    assert refused.reason == (
        "pod noisy, which the pod's required anti-affinity selects, starts on node a"
    )
    assert not refused.bound
    assert elsewhere.bound
    assert await at.node_of(pod) == "b"


async def test_a_placer_places_no_pod_beside_one_that_repels_it_and_is_just_being_bound(
    at: SchedulerBindingsStage,
) -> None:
    """The binder has looked for pods that the one repels, and found none."""
    await at.create_nodes({"a": "x", "b": "x"})
    quiet = await at.pod("quiet")
    noisy = await at.create_noisy()
    placed: list[PlacementChosen | PlacementRefused] = []

    async with placers(at.leases, 1) as [placer]:

        async def place_meanwhile() -> None:
            placed.extend(await placer.place_pods([noisy]))

        at.agents.before_reply = place_meanwhile
        reply = await at.bind(quiet, "a", mib=1_000, repels=(repelling("zone"),))

    assert reply.bound
    [refused] = placed
    assert isinstance(refused, PlacementRefused)
    assert refused.refusal.counts == (("ExistingAntiAffinity", 2),)


@pytest.mark.parametrize("attempt", range(10))
async def test_a_pod_and_one_that_it_repels_are_never_placed_on_one_node_at_once(
    at: SchedulerBindingsStage, attempt: int
) -> None:
    await at.create_nodes({"a": "x", "b": "y"})
    quiet = await at.pod("quiet")
    noisy = await at.create_noisy()
    repels = (repelling(HOSTNAME),)

    async with placers(at.leases, 1) as [placer]:

        async def place() -> list[PlacementChosen | PlacementRefused]:
            await asyncio.sleep(0.002 * attempt)
            return await placer.place_pods([noisy])

        reply, [outcome] = await asyncio.gather(
            at.bind(quiet, "a", mib=1_000, repels=repels), place()
        )

    assert isinstance(outcome, PlacementChosen)
    assert not reply.bound or outcome.lease.node == "b"


@pytest.mark.parametrize(
    "term",
    [
        repelling(HOSTNAME, "other"),
        repelling(HOSTNAME, namespaces=(Namespace("kube-system"),)),
        repelling("rack"),
    ],
)
async def test_a_pod_is_bound_beside_pods_that_it_does_not_repel(
    at: SchedulerBindingsStage, term: AntiAffinityTerm
) -> None:
    await at.create_nodes({"a": "x", "b": "y"})
    await at.noisy_pod("b" if term.topology_key == "rack" else "a", bound=True)

    reply = await at.bind(await at.pod("quiet"), "a", mib=1_000, repels=(term,))

    assert reply.bound


async def test_the_name_of_a_pod_of_another_namespace_is_not_told(
    at: SchedulerBindingsStage,
) -> None:
    await at.noisy_pod("a", bound=True)
    pod = replace(await at.pod("quiet"), namespace=Namespace("other"))

    reply = await at.bind(pod, mib=1_000, repels=(repelling(HOSTNAME, all_namespaces=True),))

    assert reply.reason.startswith("a pod of another namespace, which")


async def test_a_second_request_gets_the_same_reply_and_changes_nothing(
    at: SchedulerBindingsStage,
) -> None:
    pod = await at.pod("p")

    first = await at.bind(pod)
    leased = await assert_sound(at.leases)
    again = [await at.bind(pod), await at.bind(pod, binder=1)]

    assert [(reply.bound, reply.node) for reply in (first, *again)] == [(True, "a")] * 3
    assert [(lease.node, lease.state) for lease in leased] == [("a", LeaseState.BOUND)]
    assert await assert_sound(at.leases) == leased
    assert await at.node_of(pod) == "a"
    assert any(isinstance(event, PodBound) for event in at.bus.published)


async def test_events_of_these_pods_are_left_to_kube_scheduler(at: SchedulerBindingsStage) -> None:
    pod = await at.pod("p")
    events = at.binders[0].events
    waiting = KubernetesEvent(
        pod=pod.pod, namespace=pod.namespace, name="p", reason="Later", message="text"
    )

    await at.bind(pod)
    events.record(waiting)

    async with running(events.write_events):
        written = await until(lambda: at.kube.read(EVENTS), lambda text: b"Later" in text)
    assert [each["reason"] for each in json.loads(written)["items"]] == ["Later"]


@pytest.mark.parametrize("attempt", range(5))
async def test_requests_for_two_nodes_at_once_end_with_one_lease_and_its_binding(
    at: SchedulerBindingsStage, attempt: int
) -> None:
    pod = await at.pod(f"p{attempt}")

    replies = await asyncio.gather(at.bind(pod, "a"), at.bind(pod, "b", binder=1))

    [winner] = [reply for reply in replies if reply.bound]
    [loser] = [reply for reply in replies if not reply.bound]
    assert loser.node == winner.node
    assert loser.reason == f"the pod is being bound to node {winner.node}"
    assert await at.node_of(pod) == winner.node
    assert await at.nodes_leased() == [(winner.node, LeaseState.BOUND)]


@pytest.mark.parametrize("attempt", range(5))
async def test_a_share_goes_to_a_pod_of_a_placer_or_of_kube_scheduler(
    at: SchedulerBindingsStage, attempt: int
) -> None:
    pods = [await at.pod(f"{name}{attempt}") for name in ("ours", "theirs")]
    placement = Placement(node=NodeName("a"), shares=(share("a", mib=WHOLE_MIB),))
    reservation = reservation_for(pods[0], (placement,))

    (outcome,), reply = await asyncio.gather(
        at.leases.reserve([reservation], now=NOW, ttl_s=10.0), at.bind(pods[1])
    )

    assert isinstance(outcome, ReservedLease) is not reply.bound
    assert len(await at.nodes_leased()) == 1


async def test_a_pod_is_annotated_once_its_quota_is_raised(at: SchedulerBindingsStage) -> None:
    pod = await at.pod("p")
    binder = at.binders[0]
    team = pod.namespace
    await at.leases.quotas.save([Quota(namespace=team, limits=QuotaLimits(cards=0))], read_at=NOW)
    refusal = Refusal(reason="over quota", permanent=True, quota=team)
    capacity = await at.leases.capacity()
    event = PodFilteredOut(queued=pod, refusal=refusal, capacity=capacity)
    await binder.offers.save_filtered_out([event])
    assert OFFER not in await at.annotations(pod)

    async with running(binder.offer_capacity):
        await at.leases.quotas.save([], read_at=NOW + 1)

        await until(lambda: at.annotations(pod), lambda notes: OFFER in notes)


async def test_pods_of_kube_scheduler_wait_with_its_reason_and_without_offers(
    at: SchedulerBindingsStage,
) -> None:
    pod = await at.pod("p")
    offers = at.binders[0].offers

    for reason in ("", "no claim"):
        await offers.save_handed_over([PodHandedOver(queued=pod, reason=reason)])
        [waiting] = await at.leases.waiting_pods.load()
        assert waiting.queued == pod
        assert waiting.scheduler_reason == reason
        assert not waiting.receives_offers
        assert waiting.refusal.permanent, "it is no reason to preempt anything"

    offered = await at.leases.waiting_pods.choose_offers(now=NOW + 60)
    assert offered.pods == ()
    assert OFFER not in await at.annotations(pod)
    await offers.save_handed_over([PodHandedOver(queued=pod, reason=reason, bound=True)])
    assert await at.leases.waiting_pods.load() == []
    assert not await at.leases.waiting_pods.list_gone([pod.pod])


async def test_what_the_extender_refused_stays_beside_the_reason_of_kube_scheduler(
    at: SchedulerBindingsStage,
) -> None:
    pod = await at.pod("p")
    offers = at.binders[0].offers
    refusal = Refusal(reason="no room", counts=(("InsufficientGpuMemory", 1),))
    capacity = await at.leases.capacity()
    filtered = PodFilteredOut(queued=pod, refusal=refusal, capacity=capacity)
    noted = PodHandedOver(queued=pod, reason="0/1 nodes are available: 1 no room")

    orders: tuple[tuple[PodHandedOver | PodFilteredOut, ...], ...] = (
        (noted, filtered),
        (filtered, noted),
        (noted, filtered, noted),
    )
    for order in orders:
        await at.leases.waiting_pods.remove_bound([pod.pod])
        for event in order:
            if isinstance(event, PodFilteredOut):
                await offers.save_filtered_out([event])
            else:
                await offers.save_handed_over([event])

        [waiting] = await at.leases.waiting_pods.load()
        assert (waiting.refusal, waiting.scheduler_reason) == (refusal, noted.reason)
        assert waiting.receives_offers, "of what is freed"


async def test_a_pod_that_is_bound_or_gone_does_not_wait_for_kube_scheduler(
    at: SchedulerBindingsStage,
) -> None:
    bound = await at.pod("bound")
    gone = await at.pod("gone")
    assert (await at.bind(bound)).bound
    await at.leases.waiting_pods.remove([gone.pod])

    await at.binders[0].offers.save_handed_over(
        [PodHandedOver(queued=pod, reason="late") for pod in (bound, gone)]
    )

    assert await at.leases.waiting_pods.load() == []


async def test_a_share_that_is_gone_is_refused_without_a_lease(at: SchedulerBindingsStage) -> None:
    await at.bind(await at.pod("first"))
    pod = await at.pod("second")

    reply = await at.bind(pod)

    assert not reply.bound
    assert reply.no_capacity
    assert "a" in reply.reason
    assert await at.leases.load([pod.pod]) == [None]


async def test_a_binding_that_the_api_server_refuses_leaves_no_lease(
    at: SchedulerBindingsStage,
) -> None:
    pod = await at.pod("p")
    await at.kube.bind_pod(pod.namespace, pod.name, pod.pod, "b", {})

    reply = await at.bind(pod)

    assert not reply.bound
    assert reply.reason
    assert await at.nodes_leased() == []


async def test_a_node_whose_agent_admits_no_pod_gets_none_and_keeps_no_reservation(
    at: SchedulerBindingsStage,
) -> None:
    pod = await at.pod("p")
    closed = BindReply(deferred_pods=(pod.pod,), reason="the kubelet is away", node_closed=True)
    at.agents.replies[NodeName("a")] = closed

    reply = await at.passing(at.bind(pod))
    at.agents.replies.clear()
    elsewhere = await at.bind(pod, "b")

    assert not reply.bound
    assert "the kubelet is away" in reply.reason
    assert elsewhere.bound
    assert await at.node_of(pod) == "b"
    assert await at.nodes_leased() == [("b", LeaseState.BOUND)]


async def test_an_exceeded_quota_is_named_and_nothing_is_leased(at: SchedulerBindingsStage) -> None:
    limits = QuotaLimits(milli_gpu=500)
    await at.leases.quotas.save([Quota(namespace=Namespace("default"), limits=limits)], read_at=NOW)

    reply = await at.bind(await at.pod("p"))

    assert not reply.bound
    assert not reply.no_capacity
    assert [(each.measure, each.limit) for each in reply.quotas] == [("milliGPU", 500)]
    assert await at.nodes_leased() == []


async def test_without_shares_a_request_binds_only_a_pod_that_has_a_lease(
    at: SchedulerBindingsStage,
) -> None:
    """The extender's mirror has no free share: the pod may have been leased by an earlier call."""
    leased = await at.pod("leased")
    other = await at.pod("other")
    await at.bind(leased)

    def request(pod: PodQueued) -> PodBindingRequest:
        return PodBindingRequest(queued=pod, placement=Placement(node=NodeName("a"), shares=()))

    again = await at.binders[1].chosen.bind_chosen(request(leased))
    refused = await at.binders[1].chosen.bind_chosen(request(other))

    assert again.bound
    assert (refused.bound, refused.no_capacity) == (False, True)
    assert refused.reason == "a: no share is free"

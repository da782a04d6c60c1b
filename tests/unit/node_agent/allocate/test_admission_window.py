"""Admission of binds: few pods in flight, one of each GPU, without the pod list of equal pods."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from msgspec import structs

from services.node_agent.allocate.admission_window import (
    DRAINING,
    LATE_S,
    PERMIT_S,
    RECENT_S,
    SETTLE_S,
    AdmissionWindow,
)
from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.allocate.expected_requests import is_expected
from services.node_agent.gpus.inventory import Gpu, SharingConfig, devices_of
from services.node_agent.kubelet.pods import STILL_PLUGIN, UnservedResource
from services.node_agent.records.checkpoint_entry import Fence, slot_key
from shared.model.devices.device import Device, DeviceMode, MigLayout, MigProfile
from shared.model.devices.enforcers import SharingMode
from shared.model.devices.replicas import Replicas
from shared.model.events.request_reply import BindReply
from shared.model.leases.lease import Lease, LeaseState, Share
from shared.model.names import PodUid
from tests.support.clock import FakeClock
from tests.support.node_agent.agent import NUMBER, lease_of, share
from tests.support.node_agent.mig import PROFILES, mig_share
from tests.support.node_agent.node import entry_of, node_of, snapshot_of

UNREADABLE = "the list cannot be read"


SLOTS = count()
GPUS = 4
LAYOUTS = tuple(
    MigLayout(name=name, profiles=(MigProfile(name=profile, memory_mib=memory_mib, count=number),))
    for name, (profile, memory_mib, number) in PROFILES.items()
)


def reserved(uid: str, *shares: Share, **changes: Any) -> Lease:
    """Return a reservation, by default of a share of the first GPU that no other one has."""
    shares = shares or (small(0),)
    return lease_of(uid, *shares, state=LeaseState.RESERVED, version=1, **changes)


def small(gpu: int, **changes: Any) -> Share:
    """Return a small share of a GPU, of a slot that no other one has."""
    return share(gpu, memory_mib=1, cores_percent=0, slot=next(SLOTS) % 10, **changes)


def snapshot() -> NodeSnapshot:
    gpus = [Gpu(uuid=share(n).device, index=n, model="T4", memory_mib=15360) for n in range(GPUS)]
    return snapshot_of(*devices_of(gpus, SharingConfig(), ()))


class World:
    """An admission window with a checkpoint and a clock that a test sets."""

    def __init__(self, unreadable: str = "") -> None:
        self.clock = FakeClock()
        self.node = node_of(clock=self.clock, snapshot=snapshot())
        self.window = AdmissionWindow(self.node)
        self.unreadable = unreadable
        self.node.leases.synced = True

    def admit(self, *leases: Lease, unready: str | None = None, **more: Any) -> BindReply:
        return self.window.admit_binds(leases, unready, unreadable_reason=self.unreadable, **more)

    def deferred(self, *leases: Lease) -> tuple[PodUid, ...]:
        return self.admit(*leases).deferred_pods

    def bind(self, lease: Lease) -> Lease:
        bound = structs.replace(lease, state=LeaseState.BOUND, version=2)
        self.node.leases.observe([bound])
        return bound

    def allocate(self, lease: Lease) -> None:
        entry = entry_of(self.bind(lease), resource=NUMBER, activated_at=self.clock.now())
        self.node.checkpoint.by_key[entry.key] = entry

    def refuse(self, lease: Lease) -> None:
        self.bind(lease)
        self.node.refused.add(lease.pod)

    def release(self, lease: Lease) -> None:
        released = structs.replace(self.bind(lease), state=LeaseState.RELEASED, version=3)
        self.node.leases.observe([released])

    def wait(self, _: Lease) -> None:
        self.clock.advance(PERMIT_S)

    def serve_one(self) -> None:
        """Let the kubelet request a device that no other pod has."""
        self.allocate(reserved("served", share(7)))


@pytest.fixture(params=["", UNREADABLE], ids=["with the pod list", "without it"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


@pytest.fixture
def unreadable() -> World:
    return World(UNREADABLE)


@pytest.mark.parametrize("end", [World.allocate, World.refuse, World.release, World.wait])
def test_the_next_bind_is_admitted_once_an_earlier_pod_has_devices_or_failed(
    world: World, end: Callable[[World, Lease], None]
) -> None:
    first, second = (reserved(uid) for uid in ("one", "two"))
    assert world.deferred(first, second) == (second.pod,)
    assert world.deferred(first) == (), "it may be asked for again"

    end(world, first)

    assert world.deferred(second) == ()


@pytest.mark.parametrize("told", [True, False], ids=["its reservation ended", "not known yet"])
def test_a_pod_that_is_placed_again_is_in_flight_with_its_new_lease(
    world: World, told: bool
) -> None:
    before = reserved("one", share(0))
    now = reserved("one", share(1), created_at=before.created_at + 1)
    world.deferred(before)
    if told:
        world.release(before)

    assert world.deferred(now) == ()
    assert list(world.window.coming().values()) == [now]
    assert world.deferred(now) == ()
    world.release(now)
    world.deferred(now)
    assert not world.window.coming(), "it has ended"


def test_two_binds_are_in_flight_bound_or_not() -> None:
    world = World()
    pods = [reserved(uid, small(gpu)) for gpu, uid in enumerate(("one", "two", "three", "four"))]
    world.serve_one()

    assert world.deferred(*pods) == ("three", "four")
    world.bind(pods[1])
    assert world.deferred(*pods[2:]) == ("three", "four")
    world.allocate(pods[0])
    assert world.deferred(*pods[2:]) == ("four",)
    assert world.deferred(*pods) == ("four",), "an allocated pod is admitted at any time"


def test_one_bind_is_in_flight_while_the_kubelet_has_requested_no_devices_lately(
    world: World,
) -> None:
    """Whether it receives the pods that are bound to its node is not known."""
    pods = [
        reserved("one"),
        reserved("two", small(1), small(2)),
        reserved("three", *(small(3, container=name) for name in ("a", "b"))),
    ]
    world.serve_one()
    world.clock.advance(RECENT_S + 0.1)

    assert world.deferred(*pods) == ("two", "three")
    world.allocate(pods[0])
    assert world.deferred(*pods[1:]) == (), "the kubelet serves pods: two are in flight"


def test_a_bound_pod_that_the_kubelet_does_not_receive_closes_the_node(world: World) -> None:
    world.serve_one()
    pods = [reserved("one"), reserved("two", small(1), small(2))]
    others = [reserved(f"other-{n}", small(3)) for n in range(3)]
    assert world.deferred(*pods) == ()
    for lease in pods:
        world.bind(lease)
    world.clock.advance(LATE_S - 0.1)
    assert not world.admit().node_closed

    world.clock.advance(0.1)
    reply = world.admit(*pods, *others)
    assert (reply.node_closed, reply.retry_soon) == (True, False)
    assert reply.deferred_pods == tuple(lease.pod for lease in others), "its Binding may be late"
    assert reply.reason.startswith("pod default/pod is bound to the node, and the kubelet has not")
    assert not world.admit(is_serving=True).node_closed, "it has received one"

    for lease in pods:
        world.allocate(lease)
    assert world.deferred(others[0]) == ()


def test_a_bound_pod_that_never_arrives_closes_the_node_for_as_long_as_it_may_arrive(
    world: World,
) -> None:
    lost = reserved("lost")
    other = reserved("other", share(0, slot=4), share(1, slot=4))
    world.deferred(lost)
    world.bind(lost)
    world.clock.advance(world.node.timing.relist_s - 0.1)
    assert world.admit(other).node_closed

    world.clock.advance(0.1)

    reply = world.admit(other)
    assert (reply.node_closed, reply.deferred_pods) == (False, ())


def test_a_bound_pod_may_arrive_until_a_while_after_an_outage_of_the_api_server(
    world: World,
) -> None:
    late = reserved("late")
    other = reserved("other", share(0, slot=4), share(1, slot=4))
    world.deferred(late)
    world.bind(late)
    world.clock.advance(world.node.timing.relist_s)
    world.node.api_away_at = world.clock.ticks()
    world.clock.advance(world.node.timing.relist_s - 0.1)
    assert world.admit(other).node_closed

    world.clock.advance(0.1)

    assert not world.admit(other).node_closed


def test_no_more_binds_than_two_are_in_flight_whatever_they_request() -> None:
    unreadable = World(UNREADABLE)
    unreadable.serve_one()
    pods = [reserved(f"pod-{gpu}", *(small(gpu) for _ in range(gpu + 1))) for gpu in range(GPUS)]

    assert unreadable.deferred(*pods) == ("pod-2", "pod-3")


def test_a_pod_that_allocate_would_refuse_waits_with_the_reason_until_the_records_agree() -> None:
    world = World()
    whole = share(memory_mib=15_360, cores_percent=100, slot=0)
    other = reserved("other", share(1))
    ended = reserved("ended", whole)
    world.allocate(ended)
    world.release(ended)
    wanted = reserved("wanted", structs.replace(whole, slot=1))
    world.serve_one()

    assert world.admit(wanted, other).deferred_pods == (wanted.pod,), "the pod may just have ended"
    assert world.node.compare_due.is_set()
    world.clock.advance(SETTLE_S)
    reply = world.admit(wanted)

    assert reply.deferred_pods == ()
    assert list(reply.refusals) == [wanted.pod]
    assert "would be over-committed" in reply.refusals[wanted.pod]
    assert "pod default/pod has 15360 MiB" in reply.refusals[wanted.pod]

    world.node.checkpoint.by_key.clear()
    world.serve_one()
    reply = world.admit(wanted)
    assert (reply.deferred_pods, reply.refusals) == ((), {})


def test_a_pod_whose_slot_was_given_out_by_a_newer_lease_is_not_admitted() -> None:
    world = World()
    lease = reserved("wanted", share(slot=2, fence=3))
    fence = Fence(fence=4, pod=PodUid("newer"))
    world.node.checkpoint.fences = {slot_key(lease.shares[0], lease.pod): fence}

    world.admit(lease)
    world.clock.advance(SETTLE_S)

    assert "is outdated: pod newer" in world.admit(lease).refusals[lease.pod]


@pytest.mark.parametrize("faults", ["layout_faults", "grant_faults"])
def test_a_pod_is_refused_while_its_device_is_closed(faults: str) -> None:
    world = World()
    lease = reserved("wanted")
    other = reserved("other", share(1))
    closed: dict[str, str] = getattr(world.node, faults)
    closed[lease.shares[0].device] = "it cannot be given"
    world.serve_one()

    assert world.admit(lease, other).deferred_pods == (lease.pod,)
    world.clock.advance(SETTLE_S)
    assert "it cannot be given" in world.admit(lease, other).refusals[lease.pod]

    closed.clear()
    reply = world.admit(lease, other)
    assert (reply.deferred_pods, reply.refusals) == ((), {})


def test_one_pod_tries_a_kubelet_that_has_registered_anew_before_others_follow() -> None:
    world = World()
    first, *others = (reserved(uid, small(gpu)) for gpu, uid in enumerate(("one", "two", "three")))
    world.serve_one()
    world.node.unproven = True
    assert world.deferred(first, *others) == tuple(each.pod for each in others)

    world.node.unproven = False

    assert world.deferred(first, *others) == (others[1].pod,)


def test_a_pod_is_refused_while_its_device_is_not_healthy() -> None:
    """The kubelet would fail it, and each pod after it that was reserved before."""
    world = World()
    lease = reserved("wanted")
    other = reserved("other", share(1))
    uuid = lease.shares[0].device
    world.serve_one()
    sick = replace(world.node.require_snapshot().devices[uuid], healthy=False, fault="it hangs")
    sound, world.node.snapshot = world.node.snapshot, snapshot_with(sick)

    assert world.admit(lease, other).deferred_pods == (lease.pod,)
    world.clock.advance(SETTLE_S)
    assert f"device {uuid} gets no new share: it hangs" in world.admit(lease).refusals[lease.pod]

    world.node.snapshot = sound
    reply = world.admit(lease, other)
    assert (reply.deferred_pods, reply.refusals) == ((), {})


def test_an_admitted_pod_that_is_not_bound_yet_is_refused_if_its_device_fails_meanwhile(
    world: World,
) -> None:
    lease = reserved("wanted")
    bound = reserved("bound", share(1), share(1, slot=1))
    uuid = lease.shares[0].device
    world.serve_one()
    world.admit(lease, bound)
    sick = replace(world.node.require_snapshot().devices[uuid], healthy=False, fault="it hangs")
    world.node.snapshot = snapshot_with(sick)
    bound = world.bind(bound)

    assert world.admit(lease, bound).deferred_pods == (lease.pod,)
    world.clock.advance(SETTLE_S)
    assert list(world.admit(lease, bound).refusals) == [lease.pod]


def snapshot_with(device: Device) -> NodeSnapshot:
    devices = {**snapshot().devices, device.uuid: device}
    return snapshot_of(*devices.values())


def test_a_pod_whose_layout_its_device_does_not_have_any_more_is_not_admitted() -> None:
    world = World()
    lease = reserved("one", mig_share("group1"))
    devices = snapshot().devices.values()
    world.node.snapshot = snapshot_of(
        *(replace(each, mode=DeviceMode.MIG, layouts=LAYOUTS[1:]) for each in devices)
    )

    world.admit(lease)
    world.clock.advance(SETTLE_S)

    assert "were the layouts changed" in world.admit(lease).refusals[lease.pod]


@pytest.mark.parametrize("mode", ["hami-core", "time-slicing"])
def test_a_pod_that_was_reserved_before_gpus_became_such_replicas_is_not_admitted(
    mode: SharingMode,
) -> None:
    """Then it is placed again; one that was admitted before keeps them from changing."""
    world = World()
    lease = reserved("one", share(memory_mib=15_360 // 2, mode=mode))
    replicas = Replicas(number=4, strategy="time-slicing", resource="nvidia.com/gpu")
    world.node.snapshot = snapshot_of(
        *(
            replace(device, mode=DeviceMode.REPLICAS, replicas=replicas, slots=replicas.number)
            for device in snapshot().devices.values()
        )
    )

    world.admit(lease)
    world.clock.advance(SETTLE_S)

    assert "is offered as replicas by time-slicing" in world.admit(lease).refusals[lease.pod]


def test_one_pod_of_each_gpu_is_in_flight(world: World) -> None:
    """If the GPU fails now, no other pod fails with it."""
    one, two, other = (
        reserved("one"),
        reserved("two", small(0), small(0)),
        reserved("other", *(small(1) for _ in range(3))),
    )
    world.serve_one()

    assert world.deferred(one, two, other) == (two.pod,)
    assert world.admit(two).retry_soon
    world.bind(one)
    assert world.deferred(two) == (two.pod,), "the kubelet has not requested its devices"
    world.allocate(one)
    assert world.deferred(two) == ()


def test_a_pod_with_several_gpus_is_not_overtaken_by_pods_that_come_after_it() -> None:
    world = World()
    first = reserved("first")
    both = reserved("both", small(0), small(1))
    after = reserved("after", small(1))
    world.serve_one()

    assert world.deferred(first, both, after) == (both.pod, after.pod)
    world.allocate(first)
    assert world.deferred(both, after) == (after.pod,)


def test_a_pod_for_which_the_kubelet_waits_in_a_call_is_in_flight_however_old_it_is() -> None:
    world = World()
    waiting = reserved("waiting")
    other = reserved("other")
    world.deferred(waiting)
    world.bind(waiting)
    world.clock.advance(world.node.timing.relist_s)

    assert world.admit(other, is_serving=True).deferred_pods == (other.pod,)


def test_a_committed_pod_whose_binding_was_not_sent_is_refused_while_its_device_is_closed() -> None:
    """A binder was stopped between the two, and another one requests it again."""
    world = World()
    lease = reserved("wanted")
    device = lease.shares[0].device
    world.deferred(lease)
    world.bind(lease)
    world.node.grant_faults[device] = "it cannot be given"

    assert world.deferred(lease) == (lease.pod,)
    world.clock.advance(SETTLE_S)
    assert "it cannot be given" in world.admit(lease).refusals[lease.pod]
    assert world.window.in_flight().keys() == {lease.pod}, "another binder may have sent it"

    world.node.grant_faults.clear()
    assert world.deferred(lease) == ()


def test_a_committed_pod_that_is_refused_closes_no_other_gpu() -> None:
    world = World()
    lease = reserved("wanted")
    other = reserved("other", small(1))
    world.bind(lease)
    world.node.grant_faults[lease.shares[0].device] = "it cannot be given"

    for _ in range(int(2 * LATE_S)):
        world.admit(lease)
        world.clock.advance(1.0)

    assert lease.pod in world.admit(lease).refusals
    assert world.deferred(other) == ()


def test_a_committed_pod_is_refused_also_while_the_node_is_closed() -> None:
    world = World()
    late = reserved("late", small(1))
    lease = reserved("wanted")
    for pod in (late, lease):
        world.bind(pod)
    world.admit()
    world.clock.advance(LATE_S)
    world.node.grant_faults[lease.shares[0].device] = "it cannot be given"

    reply = world.admit(late, lease)
    assert (reply.node_closed, reply.deferred_pods) == (True, (lease.pod,))


def test_a_pod_that_has_its_devices_is_admitted_whatever_has_become_of_them() -> None:
    world = World()
    lease = reserved("running", small(0, container="a"), small(0, container="b"))
    active = structs.replace(lease, state=LeaseState.ACTIVE, version=3)
    world.node.leases.observe([active])
    world.node.grant_faults[lease.shares[0].device] = "it cannot be given"

    assert world.admit(lease).deferred_pods == ()


def test_a_bound_pod_without_an_allocation_defers_equal_pods(unreadable: World) -> None:
    one, two = reserved("one"), reserved("two")
    unreadable.deferred(one)
    unreadable.bind(one)
    unreadable.clock.advance(100 * PERMIT_S)

    assert unreadable.deferred(two) == (two.pod,)
    assert unreadable.deferred(one) == ()


def test_a_bind_with_an_equal_container_at_any_position_is_deferred(unreadable: World) -> None:
    parts = (share(0, container="a"), share(0, container="b", slot=1), share(1, container="b"))
    both = reserved("both", *parts)
    single = reserved("single", share(2, slot=3))
    pair = reserved("pair", share(2, slot=4), share(3, slot=4))

    assert unreadable.deferred(both, single, pair) == (single.pod, pair.pod)
    assert both.containers == ("a", "b")


def test_an_admitted_bind_is_in_flight_until_it_is_allocated_or_times_out(world: World) -> None:
    one, two = reserved("one"), reserved("two", small(1), small(2))
    world.serve_one()
    assert world.deferred(one, two) == (), "their requests and GPUs differ"

    assert world.window.in_flight().keys() == {"one", "two"}
    world.allocate(one)
    assert world.window.in_flight().keys() == {"two"}
    world.clock.advance(PERMIT_S)
    assert world.window.in_flight() == {}


def test_no_bind_is_admitted_before_the_leases_are_synced(world: World) -> None:
    """Another pod may be on its way to the same GPU since before the agent was restarted."""
    world.node.leases.synced = False

    assert world.deferred(reserved("one")) == ("one",)


def test_no_bind_is_admitted_while_the_agent_drains_or_is_not_registered(world: World) -> None:
    leases = [reserved(uid) for uid in ("one", "two", "three")]
    assert world.admit(*leases).retry_soon

    unregistered = world.admit(*leases, unready="not registered")
    world.node.snapshot = None
    unknown_node = world.admit(*leases)
    world.window.draining = True
    draining = world.admit(*leases)

    for reply in (unregistered, unknown_node, draining):
        assert reply.deferred_pods == ("one", "two", "three")
        assert not reply.retry_soon
    assert (unregistered.reason, draining.reason) == ("not registered", DRAINING)


@pytest.mark.parametrize(
    ("state", "allocated", "expected"),
    [
        (LeaseState.ACTIVE, "", False),
        (LeaseState.ACTIVE, "a", True),
        (LeaseState.ACTIVE, "ab", False),
        (LeaseState.BOUND, "", True),
    ],
)
def test_the_kubelet_may_request_what_is_left_of_a_lease_in_use(
    state: LeaseState, allocated: str, expected: bool
) -> None:
    lease = lease_of("one", share(0, container="a"), share(1, container="b"), state=state)

    assert is_expected(lease, {(lease.pod, name) for name in allocated}) is expected


@pytest.mark.parametrize(
    ("dialect", "lost", "reason"),
    [
        (
            "nvidia",
            {"nvidia.com/gpu": UnservedResource(7.0)},
            "not registered with the kubelet: nvidia.com/gpu",
        ),
        (
            "volcano-gpushare",
            {"leasehold.dev/share": UnservedResource(7.0, "volcano.sh/gpu-memory")},
            STILL_PLUGIN.format("volcano.sh/gpu-memory"),
        ),
    ],
)
def test_pods_wait_for_the_resource_that_they_request_and_for_no_other(
    dialect: str, lost: dict[str, UnservedResource], reason: str
) -> None:
    vgpu = reserved("one")
    other = reserved("two", dialect=dialect)

    reply = World().admit(vgpu, other, unserved=lost)

    assert (reply.deferred_pods, reply.unserved_pods) == ((), (other.pod,))
    assert (reply.unserved_reason, reply.unserved_s, reply.node_closed) == (reason, 7.0, False)


def test_the_node_is_closed_while_no_resource_is_registered() -> None:
    reply = World().admit(
        reserved("one"), unserved=dict.fromkeys(snapshot().served, UnservedResource(1.0))
    )

    assert reply.node_closed
    assert reply.reason.startswith("not registered with the kubelet: ")

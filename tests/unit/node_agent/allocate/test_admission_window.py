"""Admission of binds: few pods in flight, and without the pod list one of equal pods."""

import pytest
from msgspec import structs

from services.node_agent.allocate.admission_window import (
    DRAINING,
    IN_FLIGHT_S,
    PERMIT_S,
    AdmissionWindow,
)
from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.allocate.expected_requests import is_expected
from services.node_agent.gpus.inventory import Gpu, SharingConfig, devices_of
from services.node_agent.kubelet.pods import Unserved
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.views.advertisement import advertisement_of
from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerSetup, Paths
from shared.model.lease import Lease, LeaseState
from shared.model.names import NodeName, PodUid
from tests.support.build import allocation_of
from tests.support.clock import FakeClock
from tests.support.node_agent.agent import NUMBER, lease_of, share
from tests.support.node_agent.node import node_of
from tests.support.simcluster.kubelet import NODE

UNREADABLE = "the list cannot be read"


def reserved(uid: str, *shares: object, **changes: object) -> Lease:
    return structs.replace(lease_of(uid, *shares), state=LeaseState.RESERVED, version=1, **changes)  # type: ignore[arg-type]


class WindowUnderTest:
    """An admission window with a checkpoint and a clock that a test sets."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.node = node_of(clock=self.clock, snapshot=node())
        self.leases, self.refused = self.node.leases, self.node.refused
        self.admission = AdmissionWindow(self.node)

    def deferred_without_pod_list(self, *leases: Lease) -> tuple[PodUid, ...]:
        return self.admission.admit_binds(leases, None, unreadable_reason=UNREADABLE).deferred_pods

    def deferred_with_pod_list(self, *leases: Lease) -> tuple[PodUid, ...]:
        return self.admission.admit_binds(leases, None, unreadable_reason="").deferred_pods

    def bind(self, lease: Lease) -> Lease:
        bound = structs.replace(lease, state=LeaseState.BOUND, version=2)
        self.leases.observe([bound])
        return bound

    def allocate(self, lease: Lease, container: str = "main") -> None:
        allocation = allocation_of(lease, container=container, resource=NUMBER)
        entry = CheckpointEntry(allocation=allocation, setup=ContainerSetup(environment={}))
        self.node.checkpoint.by_key[entry.key] = entry


def node() -> NodeSnapshot:
    gpus = [Gpu(uuid=share(n).device, index=n, model="T4", memory_mib=15360) for n in range(2)]
    devices = devices_of(gpus, SharingConfig(), ())
    served = advertisement_of(tuple(DIALECTS.values()), devices, "auto").served
    paths = Paths(library="/l", preload="/p", containers="/c")
    found = {device.uuid: device for device in devices}
    return NodeSnapshot(name=NodeName(NODE), devices=found, served=served, paths=paths)


def test_without_the_pod_list_the_next_bind_is_admitted_once_the_previous_is_allocated() -> None:
    under_test = WindowUnderTest()
    one, two = reserved("one"), reserved("two")

    assert under_test.deferred_without_pod_list(one, two) == (two.pod,)
    bound = under_test.bind(one)
    assert under_test.deferred_without_pod_list(two) == (two.pod,)
    under_test.allocate(bound)
    assert under_test.deferred_without_pod_list(two) == ()


@pytest.mark.parametrize("ending", ["refused", "gone", "never bound"])
def test_without_the_pod_list_the_next_bind_is_admitted_once_the_previous_failed(
    ending: str,
) -> None:
    under_test = WindowUnderTest()
    one, two = reserved("one"), reserved("two")
    assert under_test.deferred_without_pod_list(one, two) == (two.pod,)

    if ending == "refused":
        under_test.bind(one)
        under_test.refused.add(one.pod)
    elif ending == "gone":
        under_test.leases.observe(
            [structs.replace(under_test.bind(one), state=LeaseState.RELEASED, version=3)]
        )
    else:
        under_test.clock.advance(PERMIT_S)

    assert under_test.deferred_without_pod_list(two) == ()


def test_an_admitted_bind_is_admitted_again() -> None:
    under_test = WindowUnderTest()
    one = reserved("one")

    assert (
        under_test.deferred_without_pod_list(one) == under_test.deferred_without_pod_list(one) == ()
    )
    under_test.bind(one)
    assert under_test.deferred_without_pod_list(one) == ()


def test_a_bound_pod_without_an_allocation_defers_equal_pods() -> None:
    under_test = WindowUnderTest()
    one, two = reserved("one"), reserved("two")
    under_test.deferred_without_pod_list(one)
    under_test.bind(one)
    under_test.clock.advance(100 * PERMIT_S)

    assert under_test.deferred_without_pod_list(two) == (two.pod,)


def test_a_bind_with_an_equal_container_at_any_position_is_deferred() -> None:
    under_test = WindowUnderTest()
    parts = (share(0, container="a"), share(0, container="b", slot=1), share(1, container="b"))
    both, single, pair = (
        reserved("both", *parts),
        reserved("single", share(1, slot=3)),
        reserved("pair", share(0, slot=4), share(1, slot=4)),
    )

    assert under_test.deferred_without_pod_list(both, single, pair) == (single.pod, pair.pod)
    assert both.containers == ("a", "b")


def test_two_binds_are_in_flight_and_an_allocation_or_refusal_admits_the_next() -> None:
    under_test = WindowUnderTest()
    pods = [reserved(uid) for uid in ("one", "two", "three", "four")]

    assert under_test.deferred_with_pod_list(*pods) == ("three", "four")
    assert under_test.deferred_with_pod_list(*pods[2:]) == ("three", "four"), (
        "the first two are in flight, bound or not"
    )
    under_test.allocate(under_test.bind(pods[0]))
    assert under_test.deferred_with_pod_list(*pods[2:]) == ("four",)
    under_test.refused.add(pods[1].pod)
    assert under_test.deferred_with_pod_list(pods[3]) == ()


@pytest.mark.parametrize("ending", ["gone", "not allocated in time"])
def test_a_released_or_late_pod_leaves_the_window(ending: str) -> None:
    under_test = WindowUnderTest()
    one, two, three = (reserved(uid) for uid in ("one", "two", "three"))
    assert under_test.deferred_with_pod_list(one, two, three) == (three.pod,)

    if ending == "gone":
        under_test.leases.observe(
            [structs.replace(under_test.bind(one), state=LeaseState.RELEASED, version=3)]
        )
    else:
        under_test.clock.advance(IN_FLIGHT_S)

    assert under_test.deferred_with_pod_list(three) == ()


def test_an_allocated_pod_is_admitted_again_at_any_time() -> None:
    under_test = WindowUnderTest()
    done, *others = (reserved(uid) for uid in ("done", "one", "two", "three"))
    assert under_test.deferred_with_pod_list(done) == ()
    under_test.allocate(under_test.bind(done))

    assert under_test.deferred_with_pod_list(*others) == ("three",)
    assert under_test.deferred_with_pod_list(done, *others) == ("three",)


@pytest.mark.parametrize("unreadable", ["", UNREADABLE])
def test_an_admitted_bind_is_in_flight_until_it_is_allocated_or_times_out(unreadable: str) -> None:
    under_test = WindowUnderTest()
    one, two = reserved("one"), reserved("two", share(0, slot=4), share(1, slot=4))
    for lease in (one, two):
        assert (
            under_test.admission.admit_binds(
                (lease,), None, unreadable_reason=unreadable
            ).deferred_pods
            == ()
        )

    assert under_test.admission.in_flight().keys() == {"one", "two"}
    under_test.allocate(under_test.bind(one))
    assert under_test.admission.in_flight().keys() == {"two"}
    under_test.clock.advance(PERMIT_S)
    assert under_test.admission.in_flight() == {}


def test_deferred_binds_are_retried_soon_unless_the_agent_drains() -> None:
    under_test = WindowUnderTest()
    leases = [reserved(uid) for uid in ("one", "two", "three")]

    assert under_test.admission.admit_binds(leases, None, unreadable_reason="").retry_soon
    assert under_test.admission.admit_binds(leases, None, unreadable_reason=UNREADABLE).retry_soon
    under_test.admission.draining = True
    assert not under_test.admission.admit_binds(leases, None, unreadable_reason="").retry_soon


def test_without_the_pod_list_no_bind_is_admitted_before_the_leases_are_synced() -> None:
    under_test = WindowUnderTest()
    under_test.leases.synced = False

    assert under_test.deferred_without_pod_list(reserved("one")) == ("one",)
    assert not under_test.admission.admit_binds(
        [reserved("one")], None, unreadable_reason=""
    ).deferred_pods


def test_no_bind_is_admitted_while_the_agent_drains_or_is_not_registered() -> None:
    under_test = WindowUnderTest()
    leases = [reserved("one"), reserved("two")]

    unregistered = under_test.admission.admit_binds(leases, "not registered", unreadable_reason="")
    under_test.node.snapshot = None
    unknown_node = under_test.admission.admit_binds(leases, None, unreadable_reason="")
    under_test.admission.draining = True
    draining_reply = under_test.admission.admit_binds(leases, None, unreadable_reason="")

    assert (
        unregistered.deferred_pods
        == unknown_node.deferred_pods
        == draining_reply.deferred_pods
        == ("one", "two")
    )
    assert (unregistered.reason, draining_reply.reason) == ("not registered", DRAINING)


def test_an_active_lease_without_an_allocation_is_not_expected() -> None:
    active = structs.replace(
        lease_of("one", share(0, container="a"), share(1, container="b")), state=LeaseState.ACTIVE
    )

    assert not is_expected(active, frozenset())
    assert is_expected(active, frozenset({(active.pod, "a")}))
    assert not is_expected(active, frozenset({(active.pod, "a"), (active.pod, "b")}))


def test_pods_wait_for_the_resource_that_they_request_and_for_no_other() -> None:
    under_test = WindowUnderTest()
    vgpu, other = reserved("one"), reserved("two", dialect="nvidia")
    lost = {"nvidia.com/gpu": Unserved(7.0)}

    reply = under_test.admission.admit_binds(
        (vgpu, other), None, unreadable_reason="", unserved=lost
    )

    assert (reply.deferred_pods, reply.unserved_pods) == ((), (other.pod,))
    assert reply.unserved_reason == "not registered with the kubelet: nvidia.com/gpu"
    assert (reply.unserved_s, reply.node_closed) == (7.0, False)


def test_the_node_is_closed_while_no_resource_is_registered() -> None:
    under_test = WindowUnderTest()
    served = node().served
    lost = dict.fromkeys(served, Unserved(1.0))

    reply = under_test.admission.admit_binds(
        (reserved("one"),), None, unreadable_reason="", unserved=lost
    )

    assert reply.node_closed
    assert reply.reason.startswith("not registered with the kubelet: ")


def test_an_amount_that_is_still_allocated_by_device_plugin_is_named() -> None:
    under_test = WindowUnderTest()
    waiting = reserved("one", dialect="volcano-gpushare")
    lost = {"leasehold.dev/share": Unserved(1.0, "volcano.sh/gpu-memory")}

    reply = under_test.admission.admit_binds((waiting,), None, unreadable_reason="", unserved=lost)

    assert reply.unserved_pods == (waiting.pod,)
    assert "still allocates volcano.sh/gpu-memory by device plugin" in reply.unserved_reason

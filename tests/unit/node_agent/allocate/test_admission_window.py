"""Few pods are let through at once; of those that ask for the same, one where none are listed."""

from pathlib import PurePosixPath

import pytest
from msgspec import structs

from services.node_agent.allocate.admission_window import (
    DRAINING,
    IN_FLIGHT_S,
    PERMIT_S,
    AdmissionWindow,
    containers_of,
    is_expected,
)
from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.gpus.inventory import Gpu, devices_of
from services.node_agent.gpus.sharing_config import SharingConfig
from services.node_agent.isolation.host_paths import HostLayout
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.views.advertisement import advertisement_of
from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerSetup
from shared.model.events.node_events import Allocation
from shared.model.lease import Lease, LeaseState
from shared.model.names import NodeName, PodUid
from tests.support.node_agent.agent import NUMBER, lease_of, share
from tests.support.simcluster.kubelet import NODE

UNREADABLE = "the list cannot be read"


def reserved(uid: str, *shares: object, **changes: object) -> Lease:
    return structs.replace(lease_of(uid, *shares), state=LeaseState.RESERVED, version=1, **changes)  # type: ignore[arg-type]


class Desk:
    """Turns with a record and a time that a test sets."""

    def __init__(self) -> None:
        self.entries: tuple[CheckpointEntry, ...] = ()
        self.refused: set[PodUid] = set()
        self.time = 0.0
        self.leases = KnownLeases(NodeName(NODE), synced=True)
        self.window = AdmissionWindow(
            self.leases,
            self,
            refused=self.refused,
            get_snapshot=lambda: self.node,
            ticks=lambda: self.time,
        )
        self.node: NodeSnapshot | None = node()

    def held(self, *leases: Lease) -> tuple[PodUid, ...]:
        return self.window.admit_binds(leases, None, unreadable_reason=UNREADABLE).deferred_pods

    def paced(self, *leases: Lease) -> tuple[PodUid, ...]:
        return self.window.admit_binds(leases, None, unreadable_reason="").deferred_pods

    def bind(self, lease: Lease) -> Lease:
        bound = structs.replace(lease, state=LeaseState.BOUND, version=2)
        self.leases.observe([bound])
        return bound

    def answer(self, lease: Lease, container: str = "main") -> None:
        told = Allocation(
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            container=container,
            resource=NUMBER,
            device_ids=("x",),
            lease=lease,
        )
        self.entries += (CheckpointEntry(allocation=told, setup=ContainerSetup(environment={})),)


def node() -> NodeSnapshot:
    gpus = [Gpu(uuid=share(n).device, index=n, model="T4", memory_mib=15360) for n in range(2)]
    devices = devices_of(gpus, SharingConfig(), ())
    served = advertisement_of(tuple(DIALECTS.values()), devices, "auto").served
    paths = HostLayout(state_dir=PurePosixPath("/s"), library=PurePosixPath("/l/libvgpu.so")).paths
    found = {device.uuid: device for device in devices}
    return NodeSnapshot(name=NodeName(NODE), devices=found, served=served, paths=paths)


def test_the_next_goes_when_the_former_is_answered() -> None:
    desk = Desk()
    one, two = reserved("one"), reserved("two")

    assert desk.held(one, two) == (two.pod,)
    bound = desk.bind(one)
    assert desk.held(two) == (two.pod,)
    desk.answer(bound)
    assert desk.held(two) == ()


@pytest.mark.parametrize("how", ["refused", "gone", "never bound"])
def test_the_next_goes_when_the_former_is_refused_or_gone(how: str) -> None:
    desk = Desk()
    one, two = reserved("one"), reserved("two")
    assert desk.held(one, two) == (two.pod,)

    if how == "refused":
        desk.bind(one)
        desk.refused.add(one.pod)
    elif how == "gone":
        desk.leases.observe([structs.replace(desk.bind(one), state=LeaseState.RELEASED, version=3)])
    else:
        desk.time += PERMIT_S

    assert desk.held(two) == ()


def test_who_was_let_through_is_let_through_again() -> None:
    desk = Desk()
    one = reserved("one")

    assert desk.held(one) == desk.held(one) == ()
    desk.bind(one)
    assert desk.held(one) == ()


def test_a_bound_pod_that_nobody_comes_for_keeps_its_turn() -> None:
    desk = Desk()
    one, two = reserved("one"), reserved("two")
    desk.held(one)
    desk.bind(one)
    desk.time += 100 * PERMIT_S

    assert desk.held(two) == (two.pod,)


def test_a_container_of_another_pod_counts_wherever_it_stands() -> None:
    desk = Desk()
    parts = (share(0, container="a"), share(0, container="b", slot=1), share(1, container="b"))
    both, single, pair = (
        reserved("both", *parts),
        reserved("single", share(1, slot=3)),
        reserved("pair", share(0, slot=4), share(1, slot=4)),
    )

    assert desk.held(both, single, pair) == (single.pod, pair.pod)
    assert containers_of(both) == ("a", "b")


def test_two_are_on_their_way_and_the_next_goes_when_the_kubelet_has_asked_for_one() -> None:
    desk = Desk()
    pods = [reserved(uid) for uid in ("one", "two", "three", "four")]

    assert desk.paced(*pods) == ("three", "four")
    assert desk.paced(*pods[2:]) == ("three", "four"), "those before are on their way, bound or not"
    desk.answer(desk.bind(pods[0]))
    assert desk.paced(*pods[2:]) == ("four",)
    desk.refused.add(pods[1].pod)
    assert desk.paced(pods[3]) == ()


@pytest.mark.parametrize("how", ["gone", "not asked for in time"])
def test_who_does_not_come_holds_up_nobody(how: str) -> None:
    desk = Desk()
    one, two, three = (reserved(uid) for uid in ("one", "two", "three"))
    assert desk.paced(one, two, three) == (three.pod,)

    if how == "gone":
        desk.leases.observe([structs.replace(desk.bind(one), state=LeaseState.RELEASED, version=3)])
    else:
        desk.time += IN_FLIGHT_S

    assert desk.paced(three) == ()


def test_who_was_let_through_or_answered_may_be_asked_for_again_at_any_time() -> None:
    desk = Desk()
    done, *others = (reserved(uid) for uid in ("done", "one", "two", "three"))
    assert desk.paced(done) == ()
    desk.answer(desk.bind(done))

    assert desk.paced(*others) == ("three",)
    assert desk.paced(done, *others) == ("three",)


@pytest.mark.parametrize("unreadable", ["", UNREADABLE])
def test_who_was_let_through_is_on_the_way_until_answered_or_too_late(unreadable: str) -> None:
    desk = Desk()
    one, two = reserved("one"), reserved("two", share(0, slot=4), share(1, slot=4))
    for lease in (one, two):
        assert (
            desk.window.admit_binds((lease,), None, unreadable_reason=unreadable).deferred_pods
            == ()
        )

    assert desk.window.in_flight().keys() == {"one", "two"}
    desk.answer(desk.bind(one))
    assert desk.window.in_flight().keys() == {"two"}
    desk.time += PERMIT_S
    assert desk.window.in_flight() == {}


def test_turns_come_soon_and_an_agent_that_leaves_does_not_come_back_soon() -> None:
    desk = Desk()
    asked = [reserved(uid) for uid in ("one", "two", "three")]

    assert desk.window.admit_binds(asked, None, unreadable_reason="").retry_soon
    assert desk.window.admit_binds(asked, None, unreadable_reason=UNREADABLE).retry_soon
    desk.window.draining = True
    assert not desk.window.admit_binds(asked, None, unreadable_reason="").retry_soon


def test_nobody_goes_before_the_nodes_leases_are_known() -> None:
    desk = Desk()
    desk.leases.synced = False

    assert desk.held(reserved("one")) == ("one",)
    assert not desk.window.admit_binds([reserved("one")], None, unreadable_reason="").deferred_pods


def test_nobody_goes_to_an_agent_that_leaves_or_is_not_registered() -> None:
    desk = Desk()
    asked = [reserved("one"), reserved("two")]

    late = desk.window.admit_binds(asked, "not registered", unreadable_reason="")
    desk.node = None
    early = desk.window.admit_binds(asked, None, unreadable_reason="")
    desk.window.draining = True
    leaving = desk.window.admit_binds(asked, None, unreadable_reason="")

    assert late.deferred_pods == early.deferred_pods == leaving.deferred_pods == ("one", "two")
    assert (late.reason, leaving.reason) == ("not registered", DRAINING)


def test_an_active_pod_of_which_the_agent_knows_nothing_is_not_waited_for() -> None:
    active = structs.replace(
        lease_of("one", share(0, container="a"), share(1, container="b")), state=LeaseState.ACTIVE
    )

    assert not is_expected(active, frozenset())
    assert is_expected(active, frozenset({(active.pod, "a")}))
    assert not is_expected(active, frozenset({(active.pod, "a"), (active.pod, "b")}))

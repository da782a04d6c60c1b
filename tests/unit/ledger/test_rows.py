"""Reservations, leases and waiting pods in the form in which the ledger's functions keep them."""

from dataclasses import replace

import msgspec
from msgspec import structs

from shared.ledger.rows.lease_rows import (
    decode_lease,
    demand_of,
    encode_lease,
    encode_reservation,
    joined,
    new_lease,
)
from shared.ledger.rows.waiting_rows import (
    as_waiting_pod,
    encode_waiting_pod,
    group_of,
    order_of,
)
from shared.model.leases.lease import ClaimAllocation, LeaseState, MigPlacement
from shared.model.leases.ledger import Reservation
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import GpuRequest, PodRequest, Term
from tests.support.placer.ledger import (
    NOW,
    queued,
    reservation,
    reservation_among,
    share,
    uuid,
    verdict,
)

A = NodeName("a")


def pieces_of(wanted: Reservation) -> list[bytes]:
    pieces = encode_reservation(wanted, {})
    assert isinstance(pieces, list)
    return pieces


def test_one_share_takes_one_slot() -> None:
    taken = demand_of(A, [share("a", 1, mib=700, cores=30)])

    assert taken == ["a", 10, uuid("a", 1), 700, 30, 1, 1, 0, 0, "", 1, 1]


def test_an_init_container_takes_the_slot_of_a_later_one() -> None:
    shares = [
        share("a", 0, mib=9, container="init", init=True),
        share("a", 0, mib=4, container="one"),
        share("a", 0, mib=4, container="two"),
        share("a", 1, mib=5, container="two", slotted=False),
    ]

    node, last, *rest = demand_of(A, shares)

    assert (node, last) == ("a", 18)
    assert rest[:8] == [uuid("a", 0), 9, 0, 2, 2, 0, 0, ""]
    assert rest[8:16] == [uuid("a", 1), 5, 0, 1, 0, 0, 0, ""]
    assert rest[16:] == [1, 1, 1, 1, 1, 2, 2, 0]


def test_a_slot_of_a_sidecar_is_not_given_to_the_containers_after_it() -> None:
    shares = [
        share("a", container="first", init=True),
        share("a", container="sidecar"),
        share("a", container="second", init=True),
        share("a", container="main"),
    ]

    taken = demand_of(A, shares)

    assert taken[6] == 2, "slots"
    assert taken[10:] == [1, 1, 1, 1, 1, 2, 1, 2]


def test_an_instance_takes_its_position_of_the_layout_that_it_requires() -> None:
    place = MigPlacement(layout="group2", position=3, profile="1g.5gb")

    taken = demand_of(A, [share("a", 0, mib=5_120, cores=60, mig=place)])

    assert taken == ["a", 10, uuid("a", 0), 5_120, 0, 1, 0, 0, 0, "group2", 1, -4]


def test_a_reservation_is_packed_as_a_description_and_the_demands_of_its_candidates() -> None:
    several = [share("b", 0, mib=9), share("b", 1, whole=True)]
    wanted = [
        reservation_among("p", [("a", [share("a", 1, mib=700)]), ("b", several)], tag="red"),
        reservation("q", share("a"), cpu=7),
    ]
    pieces = [piece for each in wanted for piece in pieces_of(each)]

    header, first, second, *other = map(msgspec.msgpack.decode, pieces)
    assert header[:5] == ["red", '["cpu",100,"pods",1]', "p", "", "default"]
    assert first[:7] == ["a", uuid("a", 1), 700, 0, True, 0, 0]
    assert second[:3] == ["b", False, demand_of(NodeName("b"), several)]
    assert other[0][:3] == ["", '["cpu",7,"pods",1]', "q"]


def test_each_piece_begins_with_a_one_byte_array_header_because_scripts_skip_one_byte() -> None:
    for piece in pieces_of(reservation("p", share("a"), node="a" * 253)):
        assert piece[0] & 0xF0 == 0x90, "a short array: its length is in its first byte"


def test_joined_values_have_their_boundaries() -> None:
    assert joined([b"ab", b"", b"c"]) == ([0, 2, 2, 3], b"abc")


def test_a_lease_is_read_as_it_was_written() -> None:
    wanted = reservation_among(
        "p",
        [("b", [share("b")]), ("a", [share("a", 0), share("a", 1, slotted=False)])],
        tag="red",
    )
    wanted = replace(wanted, weighed="0.47 on b, 0.52 on a")
    lease = new_lease(wanted, 2, iter([17, 3, 40, -1, 41]), NOW, NOW + 30)

    assert [(s.device, s.slot, s.fence) for s in lease.shares] == [
        (uuid("a", 0), 3, 40),
        (uuid("a", 1), None, 41),
    ]
    assert lease.weighed == wanted.weighed
    assert decode_lease(encode_lease(lease)) == lease
    term = Term(max_run_s=7200, grace_s=60)
    bound = structs.replace(
        lease, state=LeaseState.BOUND, expires_at=0.0, version=18, term=term, resized_at=NOW
    )
    claim = ClaimAllocation(generation="g", consumers=(PodUid("q"),))
    active = structs.replace(
        bound, state=LeaseState.ACTIVE, activated_at=NOW, resized_at=0.0, claim=claim
    )
    for each in (bound, active):
        assert decode_lease(encode_lease(each)) == each


def test_pods_wait_in_the_group_of_their_largest_container() -> None:
    small = GpuRequest(container="one", gpus=1, memory_units=100, init=True)
    large = GpuRequest(container="two", gpus=2, memory_percent=25, cores_percent=10)

    assert group_of(PodRequest()) == "0:0:0:0:0:0:0:0"
    assert group_of(PodRequest(containers=(small,))) == "1:100:0:0:0:1:0:0"
    assert group_of(PodRequest(containers=(small, large))) == "2:0:25:10:0:1:0:0"
    whole = GpuRequest(container="w", gpus=1, whole=True, memory_units=5, slotted=False)
    assert group_of(PodRequest(containers=(whole,))) == "1:0:0:0:1:0:0:0"


def test_pods_are_sorted_by_priority_and_age() -> None:
    wanted = [
        queued("system", priority=2_000_001_000),
        queued("high", priority=1),
        replace(queued("old"), created_at=NOW - 1),
        queued("new"),
        queued("low", priority=-(2**31)),
    ]

    assert sorted(wanted, key=order_of) == wanted
    assert len({len(order_of(event)) for event in wanted}) == 1


def test_a_waiting_pod_is_read_as_it_was_written() -> None:
    waiting = replace(verdict(queued("p"), 7), waiting_since=NOW)

    pod, group, order, verdict_number, record, since, gang, *_ = encode_waiting_pod(waiting)

    stored = [group, order, verdict_number, since, record, gang, group, "default"]
    assert (pod, as_waiting_pod(stored)) == ("p", waiting)
    permanent = replace(waiting, refusal=structs.replace(waiting.refusal, permanent=True))
    assert encode_waiting_pod(permanent)[1] == ""

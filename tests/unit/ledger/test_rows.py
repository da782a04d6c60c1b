"""Reservations, leases and waiting pods in the form in which the ledger's functions keep them."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgpack
import msgspec
import pytest
from msgspec import structs

from shared.ledger.records import BookingRecord, DemandRecord
from shared.ledger.rows.account_rows import decode_window
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
    group_of,
    order_of,
    waiting_row,
)
from shared.model.budgets.budget import BudgetWindow
from shared.model.leases.lease import ClaimAllocation, LeaseState, MigPlacement
from shared.model.leases.ledger import Reservation
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import GpuRequest, PodRequest, SharingPolicy, Term
from tests.support.placer.ledger import (
    NOW,
    queued,
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

    assert taken == DemandRecord(A, (_booking(1, 700, cores_percent=30),), (1, 1))


def _booking(gpu: int, mib: int, **more: Any) -> BookingRecord:
    known: dict[str, Any] = {
        "cores_percent": 0,
        "shares": 1,
        "slots": 1,
        "layout": "",
        "mode": "hami-core",
    }
    return BookingRecord(
        device=uuid("a", gpu),
        memory_mib=mib,
        sharing=SharingPolicy.SHARED,
        most_shares=0,
        **known | more,
    )


def test_an_init_container_takes_the_slot_of_a_later_one() -> None:
    shares = [
        share("a", 0, mib=9, container="init", init=True),
        share("a", 0, mib=4, container="one"),
        share("a", 0, mib=4, container="two"),
        share("a", 1, mib=5, container="two", slotted=False),
    ]

    taken = demand_of(A, shares)

    assert taken.bookings == (
        _booking(0, 9, shares=2, slots=2),
        _booking(1, 5, slots=0),
    )
    assert taken.slots == (1, 1, 1, 1, 1, 2, 2, 0)


def test_a_slot_of_a_sidecar_is_not_given_to_the_containers_after_it() -> None:
    shares = [
        share("a", container="first", init=True),
        share("a", container="sidecar"),
        share("a", container="second", init=True),
        share("a", container="main"),
    ]

    taken = demand_of(A, shares)

    assert taken.bookings[0].slots == 2
    assert taken.slots == (1, 1, 1, 1, 1, 2, 1, 2)


def test_an_instance_takes_its_position_of_the_layout_that_it_requires() -> None:
    place = MigPlacement(layout="group2", position=3, profile="1g.5gb")

    taken = demand_of(A, [share("a", 0, mib=5_120, cores=60, mig=place)])

    assert taken == DemandRecord(A, (_booking(0, 5_120, slots=0, layout="group2"),), (1, -4))


def test_a_reservation_is_packed_as_the_parts_of_the_leases_of_its_candidates() -> None:
    several = [share("b", 0, mib=9), share("b", 1, whole=True)]
    wanted = reservation_among("p", [("a", [share("a", 1)]), ("b", several)], tag="red")

    first, second = pieces_of(wanted)

    for number, node in enumerate(("a", "b"), start=1):
        grants = iter([17, *[3, 40] * number])
        lease = new_lease(wanted, number, grants, NOW, NOW + 30)
        numbers = msgspec.msgpack.encode(
            ("reserved", 17, 17, NOW, NOW + 30, 0.0, 0.0, [3, 40] * number)
        )
        request, demand, shares, description = _parts_of(first)
        if number == 2:
            demand, shares = _parts_of(second)
        value = b"".join((b"\x95", numbers, request, demand, shares, description))
        assert decode_lease(value) == lease
        assert lease.node == node


def _parts_of(piece: bytes) -> list[bytes]:
    """Return the values that a piece contains, each packed."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(piece)
    ends = [0, *(unpacker.tell() for _ in unpacker)]
    return [piece[start:end] for start, end in pairwise(ends)]


def test_joined_values_have_their_boundaries() -> None:
    assert joined([b"ab", b"", b"c"]) == ([0, 2, 2, 3], b"abc")


def test_a_lease_is_read_as_it_was_written() -> None:
    wanted = reservation_among(
        "p",
        [("b", [share("b")]), ("a", [share("a", 0), share("a", 1, slotted=False)])],
        tag="red",
    )
    wanted = structs.replace(wanted, weighed="0.47 on b, 0.52 on a")
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

    row = waiting_row(waiting)

    amounts = (row.group, row.order, row.verdict, row.since, row.record, row.gang, row.group)
    assert (row.pod, as_waiting_pod([*amounts, "default", ""])) == ("p", waiting)
    permanent = replace(waiting, refusal=structs.replace(waiting.refusal, permanent=True))
    assert waiting_row(permanent).group == ""


@pytest.mark.parametrize(
    "beyond", [{"start_ms": -1}, {"id": "w" * 2_000}, {"closed": 1}, {"forgotten": 1}]
)
def test_a_window_of_an_account_has_bounds(beyond: dict[str, Any]) -> None:
    stored = {"id": "2031-03", "start_ms": 1, "limit_units": 7}

    assert decode_window(json.dumps(stored)) == BudgetWindow(
        id="2031-03", start_ms=1, limit_units=7
    )
    with pytest.raises(msgspec.ValidationError):
        decode_window(json.dumps(stored | beyond))

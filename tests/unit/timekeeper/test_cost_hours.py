"""What every GPU was used for adds up to the capacity, for any history and any window."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.timekeeper.accounts.cost_hours import (
    WEEK_MS,
    WHOLE_SIZE,
    Size,
    device_states,
    holdings,
    parts_of_device,
    record_hours,
    sizes_seen,
)
from shared.model.budgets.budget import HOUR_MS, JournalEntry
from shared.model.budgets.cost_records import (
    FREE,
    IDLE,
    MOST_MODELS,
    OTHER_MODELS,
    STRANDED,
    UNLEASED,
    UNMEASURED,
    USED,
    WHOLE,
    CostHour,
    add_up,
)
from shared.model.devices.device import NO_USE, DeviceMode, DeviceUse, MigLayout, MigProfile
from shared.model.devices.node import CORDON_PREFIX
from shared.model.leases.lease import Lease, ShareKey, share_key
from shared.model.leases.ledger import NodeTotals
from shared.model.names import DeviceUuid, Namespace
from tests.support.build import device, ledger_node, use
from tests.support.placer.ledger import share
from tests.support.timekeeper.accounts import T0, TEAM, lease

MODEL = "Tesla T4"
GPUS = 2
END = T0 + 3 * HOUR_MS
INSTANTS = st.integers(T0, END)
USE_OF = {True: IDLE, False: USED, None: UNMEASURED}


class Held(NamedTuple):
    """A lease of a history; `idle` is what its agent reports, None: nothing."""

    namespace: str
    gpu: int
    mib: int
    begin: int
    end: int
    idle: bool | None


@st.composite
def held_leases(draw: st.DrawFn) -> Held:
    begin, end = sorted((draw(INSTANTS), draw(INSTANTS)))
    idle = draw(st.sampled_from([True, False, None]))
    mib = draw(st.integers(1, 16_000))
    return Held(draw(st.sampled_from("ab")), draw(st.integers(0, GPUS - 1)), mib, begin, end, idle)


def as_lease(place: int, held: Held) -> Lease:
    namespace = Namespace(held.namespace)
    return lease(f"p{place}", created_ms=T0, mib=held.mib, gpu=held.gpu, namespace=namespace)


def key_of(one: Lease) -> ShareKey:
    return share_key(one.pod, one.shares[0])


def devices_of(names: Sequence[int]) -> dict[DeviceUuid, tuple[str, bool]]:
    """The devices of these numbers; the first has room for another share."""
    return {share("a", gpu).device: (MODEL, gpu == 0) for gpu in names}


def recorded(history: Sequence[Held], steps: Sequence[int], gpus: Sequence[int]) -> list[CostHour]:
    """Record a history step by step, as the journal and the readings show it."""
    found: dict[int, CostHour] = {}
    all_leases = [(as_lease(place, held), held) for place, held in enumerate(history)]
    idle = {
        key_of(lease): 0.0 if held.idle else None
        for lease, held in all_leases
        if held.idle is not None
    }
    for begin, end in pairwise(steps):
        live = tuple(lease for lease, held in all_leases if held.begin <= end < held.end)
        entries = [
            JournalEntry(at_ms=at, kind=kind, leases=(lease,))
            for lease, held in all_leases
            for at, kind in ((held.begin, "held"), (held.end, "ended"))
            if begin < at <= end or at == begin == T0
        ]
        entries.sort(key=lambda entry: (entry.at_ms, entry.kind == "ended"))
        of_step = holdings(live, entries, (idle, idle), begin, end)
        record_hours(found, of_step, devices_of(gpus), begin, end)
    return list(found.values())


def expected(history: Sequence[Held], begin: int, end: int) -> dict[tuple[str, int], int]:
    """The same, from the history alone: between two changes nothing changes."""
    found: dict[tuple[str, int], int] = {}
    inside = {at for held in history for at in (held.begin, held.end) if begin < at < end}
    for start, stop in pairwise(sorted({begin, end, *inside})):
        for gpu in range(GPUS):
            rows = sorted(
                (h.namespace, -(-h.mib * WHOLE // 16_000), USE_OF[h.idle])
                for h in history
                if h.gpu == gpu and h.begin <= start < h.end
            )
            parts = parts_of_device([weight for _, weight, _ in rows])
            shares = [
                (name, use_of, part) for (name, _, use_of), part in zip(rows, parts, strict=True)
            ]
            shares.append((FREE, STRANDED if gpu else UNLEASED, WHOLE - sum(parts)))
            for name, used, part in shares:
                found[name, used] = found.get((name, used), 0) + part * (stop - start)
    return {key: units for key, units in found.items() if units}


def by_use(
    hours: Sequence[CostHour], begin: int, end: int
) -> Mapping[tuple[str, int], Fraction | int]:
    sums, _, _ = add_up(hours, begin, end)
    return {
        (name, use): units
        for (name, _), amounts in sums.items()
        for use, units in enumerate(amounts)
        if units
    }


@given(st.lists(held_leases(), max_size=6), st.lists(INSTANTS, max_size=5), INSTANTS, INSTANTS)
def test_every_window_adds_up_to_its_capacity_whatever_the_history_and_the_steps(
    history: list[Held], cuts: list[int], one: int, other: int
) -> None:
    hours = recorded(history, sorted({T0, END, *cuts}), range(GPUS))
    first, last = sorted((one, other))

    sums, capacity, passed = add_up(hours, first, last)

    assert sum(map(sum, sums.values())) == GPUS * WHOLE * (last - first)
    assert sum(capacity.values()) == GPUS * WHOLE * (last - first)
    assert passed == last - first
    assert all(units >= 0 for amounts in sums.values() for units in amounts)
    assert not [text for hour in hours for text in hour.imbalances()]
    for begin in range(T0, END, HOUR_MS):
        assert by_use(hours, begin, begin + HOUR_MS) == expected(history, begin, begin + HOUR_MS)
    parts = [by_use(hours, *part) for part in ((T0, first), (first, last), (last, END))]
    for key, units in expected(history, T0, END).items():
        assert sum(part.get(key, Fraction(0)) for part in parts) == units


@given(st.lists(held_leases(), max_size=5), st.lists(INSTANTS, max_size=3))
def test_a_device_that_no_reading_shows_counts_for_the_steps_in_which_a_lease_has_it(
    history: list[Held], cuts: list[int]
) -> None:
    hours = recorded(history, sorted({T0, END, *cuts}), [0])

    assert not [text for hour in hours for text in hour.imbalances()]
    leased = {key: units for key, units in expected(history, T0, END).items() if key[0] != FREE}
    assert {k: v for k, v in by_use(hours, T0, END).items() if k[0] != FREE} == leased


@given(st.lists(st.integers(1, WHOLE), max_size=8))
def test_leases_share_a_device_in_proportion_where_they_add_up_to_more(weights: list[int]) -> None:
    parts = parts_of_device(weights)

    assert sum(parts) == min(sum(weights), WHOLE)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - Fraction(weight * WHOLE, max(sum(weights), WHOLE))) < 1


def test_a_lease_that_was_resized_or_restored_has_no_time_twice() -> None:
    small, large = lease("p", mib=4_000), lease("p", mib=8_000, resized_at=(T0 + 10) / 1000)
    old = lease("q", gpu=1, created_ms=T0 - 5)
    entries = [
        JournalEntry(at_ms=T0 + 10, kind="ended", leases=(small,)),
        JournalEntry(at_ms=T0 + 10, kind="held", leases=(large,)),
        JournalEntry(at_ms=T0 + 20, kind="restored", leases=(old,)),
    ]
    found = holdings((large, old), entries, ({}, {}), T0, T0 + 100)

    assert sorted((h.milli_gpu, h.from_ms - T0, h.to_ms - T0) for h in found) == [
        (250, 0, 10),
        (500, 0, 100),
        (500, 10, 100),
    ]


PROFILES = (MigProfile(name="3g.20gb", memory_mib=8_000, count=2),)
MIG = {"mode": DeviceMode.MIG, "layouts": (MigLayout(name="group1", profiles=PROFILES),)}
SMALL, LARGE = Size(4_000, 0, 0), Size(12_000, 50, 0)


@pytest.mark.parametrize(
    ("sizes", "used", "fields", "of_node", "has_room"),
    [
        ([], use(), {}, {}, True),
        ([SMALL, LARGE], use(12_000), {}, {}, True),
        ([LARGE], use(12_000), {}, {}, False),
        ([LARGE], use(1_000, 60), {}, {}, False),
        ([SMALL], use(shares=10), {}, {}, False),
        ([SMALL], NO_USE, {"healthy": False}, {}, False),
        ([SMALL], NO_USE, {}, {"unschedulable": True}, False),
        ([SMALL], NO_USE, {}, {"served": (f"{CORDON_PREFIX}repair",)}, False),
        ([SMALL], NO_USE, {}, {"excluded_devices": (0,), "exclusions": ("why",)}, False),
        ([WHOLE_SIZE], use(), {}, {}, False),
        ([WHOLE_SIZE], NO_USE, {"memory_mib": 40_000}, {}, True),
        ([SMALL], DeviceUse(shares=1, slots_taken="01"), MIG, {}, True),
        ([SMALL], DeviceUse(shares=2, slots_taken="11"), MIG, {}, False),
    ],
)
def test_what_is_free_is_stranded_where_no_share_of_the_last_week_fits(
    sizes: list[Size],
    used: DeviceUse,
    fields: Mapping[str, Any],
    of_node: Mapping[str, Any],
    has_room: bool,
) -> None:
    one = device("g", **({"memory_mib": 16_000} | dict(fields)))
    totals = NodeTotals(node=ledger_node("a", (one, used), **of_node), leases=())

    assert device_states([totals], sizes) == {"g": (one.model, has_room)}


def test_a_size_counts_for_a_week_after_its_last_lease() -> None:
    half = lease("p", mib=8_000)
    whole = lease("q", shares=(share("a", 1, mib=16_000, whole=True),))
    seen = sizes_seen({}, [half, whole], T0)

    assert set(seen) == {Size(8_000, 0, 0), WHOLE_SIZE}
    assert set(sizes_seen(seen, [half], T0 + WEEK_MS)) == {Size(8_000, 0, 0)}
    assert half.namespace == TEAM


def test_models_that_a_node_invents_leave_those_of_others_as_they_are_and_all_adds_up() -> None:
    honest = NodeTotals(node=ledger_node("a", (device("a-0", model=MODEL), NO_USE)), leases=())
    hours: dict[int, CostHour] = {}

    for minute in range(24 * 60):
        devices = [(device(f"b-{n}", model=f"{minute}-{n}"), NO_USE) for n in range(16)]
        invented = NodeTotals(node=ledger_node("b", *devices), leases=())
        begin = T0 + minute * 60_000
        states = device_states([invented, honest], ())
        record_hours(hours, (), states, begin, begin + 60_000)
    sums, capacity, _ = add_up(hours.values(), T0, T0 + 24 * HOUR_MS)

    assert all(not list(hour.imbalances()) for hour in hours.values())
    assert max(len(hour.device_ms) for hour in hours.values()) == MOST_MODELS
    assert len(capacity) == len(sums) == MOST_MODELS
    assert capacity[MODEL] == 24 * HOUR_MS * WHOLE
    assert sum(capacity.values()) == 17 * 24 * HOUR_MS * WHOLE
    assert capacity[OTHER_MODELS] > 15 * 23 * HOUR_MS * WHOLE


@pytest.mark.parametrize(
    ("unused_minutes", "used_minutes"),
    [(None, 60), (-5, 0), (0, 0), (20, 20), (61, 60)],
    ids=["in use", "from before", "from its start", "in between", "by a clock that is ahead"],
)
def test_a_share_is_idle_from_its_last_use_on(
    unused_minutes: int | None, used_minutes: int
) -> None:
    held = as_lease(0, Held("a", 0, 16_000, T0, END, idle=True))
    since = None if unused_minutes is None else T0 / 1000 + 60 * unused_minutes
    last_uses = {key_of(held): since}

    parts = holdings((held,), (), (last_uses, last_uses), T0, T0 + HOUR_MS)

    minutes = {part.use: (part.to_ms - part.from_ms) / 60_000 for part in parts}
    assert minutes == {
        use: length for use, length in ((USED, used_minutes), (IDLE, 60 - used_minutes)) if length
    }

"""The timekeeper on a real valkey-server: charges for leases, and for each of their sizes."""

import asyncio
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from msgspec import structs
from prometheus_client import REGISTRY

from services.api.reports.showback import EntryRange, add_up, showback_view
from services.timekeeper.config.budget_spec import parse_status
from services.timekeeper.report.budget_reports import budget_status
from services.timekeeper.service import Timekeeper
from shared.kubernetes.types import RawObject
from shared.ledger.rows.account_rows import GRANT_TTL_S
from shared.model.budgets.budget import HOUR_MS, Account, Period, PolicyType, minutes
from shared.model.clock import SystemClock
from shared.model.errors import RequestError
from shared.model.events.pod_events import BudgetChanged, ResyncRequested
from shared.model.leases.lease import Lease
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import Term
from tests.support.placer.ledger import rebuild, reservation, reserve, share
from tests.support.servers.valkey import ValkeyServer
from tests.support.timekeeper.accounts import (
    MINUTE_MS,
    T0,
    TEAM,
    AccountLedger,
    CrashedError,
    Timeline,
    account_ledger,
    budget,
    lease,
    units,
)

DEFAULT = Namespace("default")


def real(found: AccountLedger) -> Timekeeper:
    """A replica that lives in the server's own time."""
    return found.timekeeper(store=found.store, clock=SystemClock())


async def total(found: AccountLedger, namespace: Namespace = TEAM) -> int:
    return sum(entry.units for entry in await found.charges(namespace))


async def test_gpusharing_16_reservations_are_free_and_leases_are_charged_until_they_are_released(
    opened: AccountLedger,
) -> None:
    timekeeper = real(opened)
    wanted = [
        reservation("only-reserved", share("a", 0)),
        reservation("bound", share("a", 1, mib=16_000)),
    ]
    only_reserved, bound = await reserve(opened.leases, *wanted)
    await timekeeper.count()
    assert await opened.account(DEFAULT) == Account(namespace=DEFAULT)

    await opened.leases.bind([bound])
    await opened.leases.release([only_reserved.pod], reason="a test")
    await timekeeper.count()
    held = (await opened.account(DEFAULT)).leases
    await opened.leases.activate([(bound.pod, bound.node)])
    await opened.leases.release([PodUid("bound")], reason="a test")
    await timekeeper.count()

    (tenure,) = held
    charges = await opened.charges(DEFAULT)
    assert (tenure.pod, tenure.weight, tenure.model) == ("bound", 1000, "Tesla T4")
    assert {entry.lease for entry in charges} == {tenure.id}
    journaled = await opened.leases._connection._redis.xinfo_stream(
        f"{opened.ledger_prefix}tenures"
    )
    released_ms = int(journaled["last-generated-id"].decode().partition("-")[0])
    assert await total(opened, DEFAULT) == 1000 * (released_ms - tenure.since_ms)
    assert (await opened.account(DEFAULT)).leases == ()


def compared() -> float:
    """How many pods' run times were compared with what their authors expected."""
    count = REGISTRY.get_sample_value("leasehold_run_time_ratio_count", {"source": "author"})
    return count or 0.0


async def test_run_times_are_learned_once_whichever_replicas_read_the_ends(
    opened: AccountLedger,
) -> None:
    leases = opened.leases
    replicas = [real(opened), real(opened)]
    before = compared()
    for pod in ("p1", "p2", "p3"):
        wanted = structs.replace(reservation(pod, share("a")), term=Term(expected_run_s=1))
        await leases.bind(await reserve(leases, wanted))
        [active] = await leases.activate([(PodUid(pod), NodeName("a"))])
        assert active is not None
        smaller = tuple(structs.replace(each, memory_mib=1_000) for each in active.shares)
        await leases.resizes.apply(structs.replace(active, shares=smaller))
        await leases.release([PodUid(pod)], reason="a test")

    await asyncio.gather(*(each.count() for each in replicas))
    for each in replicas:
        await each.learn_run_times()

    learned = (await leases.run_times.load()).series
    assert {name: one.runs for name, one in learned.items()} == {"default/name-of-p#": 3}
    assert compared() - before == 3


async def test_a_lease_older_than_the_first_timekeeper_is_charged_from_its_creation(
    opened: AccountLedger,
) -> None:
    (bound,) = await reserve(opened.leases, reservation("old", share("a", 0)))
    await opened.leases.bind([bound])
    await opened.leases._connection._redis.delete(f"{opened.ledger_prefix}tenures")

    await real(opened).count()

    (tenure,) = (await opened.account(DEFAULT)).leases
    assert (tenure.pod, tenure.since_ms) == ("old", round(bound.created_at * 1000))


async def test_a_rebuild_of_the_ledger_loses_no_account(opened: AccountLedger) -> None:
    timekeeper = real(opened)
    stays, goes = await reserve(
        opened.leases, reservation("stays", share("a", 0)), reservation("goes", share("a", 1))
    )
    bound = await opened.leases.bind([stays, goes])
    await timekeeper.count()
    before = (await opened.account(DEFAULT)).leases
    await rebuild(opened.leases, kept=[bound[0]], now=0.0, force=True)  # type: ignore[list-item]

    await timekeeper.count()

    after = await opened.account(DEFAULT)
    assert [(t.pod, t.since_ms) for t in after.leases] == [
        (t.pod, t.since_ms) for t in before if t.pod == "stays"
    ]
    assert "name-of-goes" in {entry.pod for entry in await opened.charges(DEFAULT)}


async def test_gpusharing_19_a_recreated_namespace_keeps_its_usage(
    opened: AccountLedger,
) -> None:
    await opened.journal("held", T0, lease("p"))
    await opened.journal("ended", T0 + 60_000, lease("p"))
    await opened.count(T0 + 70_000)
    # The namespace is deleted with its pods, and made again under its name.
    await opened.journal("held", T0 + 120_000, lease("q", created_ms=T0 + 119_000))
    timekeeper = opened.timekeeper()
    await opened.count(T0 + 180_000, keeper=timekeeper)

    assert timekeeper.balance_of(TEAM).used_units == 2 * 60_000 * 500


async def test_gpusharing_20_after_a_flush_use_is_restored_from_the_status(
    server: ValkeyServer,
) -> None:
    wanted = budget(100, time_zone="Europe/Berlin")
    async with account_ledger(server.url, wanted) as before:
        timekeeper = before.timekeeper()
        await before.journal("held", T0, lease("p"))
        await before.count(T0 + 10 * MINUTE_MS, keeper=timekeeper)
        account = timekeeper.accounts[TEAM]
        seen = timekeeper.balance_of(TEAM)
        status = budget_status(account, seen, RawObject(), None)
        copy = parse_status(msgspec.to_builtins(status), wanted)
    async with account_ledger(server.url, wanted) as after:  # other keys: everything is lost
        after.config.statuses = {TEAM: copy}
        timekeeper = after.timekeeper()
        await after.journal("restored", T0 + 12 * MINUTE_MS, lease("p"))
        await after.count(T0 + 20 * MINUTE_MS, keeper=timekeeper)
        await after.count(T0 + 20 * MINUTE_MS)

        assert timekeeper.balance_of(TEAM).used_units == 20 * MINUTE_MS * 500
        assert {e.kind for e in await after.ledger()} >= {"adjust"}


async def test_a_trimmed_journal_is_detected_and_live_leases_are_still_charged(
    opened: AccountLedger,
) -> None:
    timekeeper = real(opened)
    (bound,) = await reserve(opened.leases, reservation("p", share("a", 0)))
    await opened.leases.bind([bound])
    await timekeeper.count()
    (other,) = await reserve(opened.leases, reservation("q", share("a", 1)))
    await opened.leases.bind([other])
    await opened.leases._connection._redis.xtrim(f"{opened.ledger_prefix}tenures", maxlen=0)
    await opened.leases.release([bound.pod], reason="a test")

    await timekeeper.count()

    assert {t.pod for t in (await opened.account(DEFAULT)).leases} == {"q"}


async def test_gpusharing_37_showback_equals_the_ledger_and_a_closed_window_never_changes(
    opened: AccountLedger,
) -> None:
    opened.config.given[TEAM] = budget(5, period=Period.DAY, time_zone="Europe/Berlin")
    await opened.journal("held", T0 + 7, lease("p"), lease("q", mib=5_333, gpu=1))
    await opened.count(T0 + 33_333)
    await opened.journal("ended", T0 + 20 * MINUTE_MS + 1, lease("p"))
    for hour in range(1, 26):
        await opened.count(T0 + hour * 3_600_000)

    async def report() -> str:
        rows = await add_up(opened.store, [TEAM], EntryRange(window="2031-05-01"))
        return showback_view(rows).as_csv()

    everything = await add_up(opened.store, [TEAM], EntryRange())
    assert sum(row.units for row in everything) == await total(opened)
    assert sum(r.in_budget_units + r.out_of_budget_units for r in everything) == await total(opened)
    windows = {window.id: window.used_units for window in await opened.store.windows(TEAM)}
    for name, used in windows.items():
        rows = await add_up(opened.store, [TEAM], EntryRange(window=name))
        assert sum(row.units for row in rows) == used
    closed = await report()
    assert "reclaimable" in closed
    await opened.count(T0 + 60 * 3_600_000)
    assert await report() == closed

    half = T0 + 12 * 3_600_000
    parts = [EntryRange(to_ms=half), EntryRange(from_ms=half)]
    everything = await add_up(opened.store, [TEAM], EntryRange())
    rows = [row for part in parts for row in await add_up(opened.store, [TEAM], part)]
    assert sum(row.units for row in rows) == sum(row.units for row in everything)


async def test_a_change_of_state_is_published_once_by_the_replica_that_wrote_it(
    opened: AccountLedger,
) -> None:
    opened.config.given[TEAM] = budget(10)
    first, second = opened.timekeeper(), opened.timekeeper()
    for timekeeper in (first, second):
        await opened.count(T0, keeper=timekeeper)
    await opened.journal("held", T0, lease("p"))
    events: list[BudgetChanged] = []
    for minute in (1, 16, 20, 21):
        for timekeeper in (first, second):
            events += await opened.count(T0 + minute * MINUTE_MS, keeper=timekeeper)

    assert [(e.state, e.previous_state, e.lease_class, e.warned_percent) for e in events] == [
        ("warning", "ok", "guaranteed", 80),
        ("exhausted", "warning", "reclaimable", 95),
    ]
    assert events[1].remaining_units == 0
    assert events[1].current_rate_milli_gpu == 500


async def test_a_change_of_state_is_published_although_its_write_got_no_reply(
    opened: AccountLedger,
) -> None:
    opened.config.given[TEAM] = budget(10)
    keeper = opened.timekeeper()
    await opened.journal("held", T0, lease("p"))
    await opened.count(T0, keeper=keeper)
    assert isinstance(keeper.store, Timeline)
    keeper.store.crash_at = 0
    keeper.store.crash_after = True
    with pytest.raises(CrashedError):
        await opened.count(T0 + 20 * MINUTE_MS, keeper=keeper)

    [event] = await opened.count(T0 + 20 * MINUTE_MS, keeper=keeper)

    assert event.state == "exhausted"


async def test_the_states_of_budgets_are_published_again_on_request(opened: AccountLedger) -> None:
    opened.config.given[TEAM] = budget(10)
    keeper = opened.timekeeper()
    await opened.count(T0, keeper=keeper)
    assert await opened.count(T0, keeper=keeper) == []

    await keeper.report_again([ResyncRequested(reason="a test")])

    [event] = await opened.count(T0, keeper=keeper)
    assert (event.namespace, event.state) == (TEAM, "ok")
    assert await opened.count(T0, keeper=keeper) == []


async def test_a_grant_is_made_once_per_key_and_improves_the_state(
    opened: AccountLedger,
) -> None:
    opened.config.given[TEAM] = budget(10)
    await opened.journal("held", T0, lease("p"))
    keeper = opened.timekeeper()
    await opened.count(T0 + 20 * MINUTE_MS, keeper=keeper)
    for _ in range(3):
        await keeper.add_grant(TEAM, units(30), actor="me", reason="deadline", key="one")
    events = await opened.count(T0 + 20 * MINUTE_MS)

    window = (await opened.account()).windows[-1]
    assert window.granted_units == units(30)
    assert [(e.state, e.lease_class) for e in events] == [("ok", "guaranteed")]
    kinds = [(e.kind, e.actor, e.reason) for e in await opened.ledger()]
    assert kinds.count(("grant", "me", "deadline")) == 1
    key = opened.store._keys.of("grant", f"{TEAM}:one")
    assert 0 < await opened.leases._connection._redis.ttl(key) <= GRANT_TTL_S


@pytest.mark.parametrize(("amount", "reason"), [(0, "why"), (1, " ")])
async def test_a_grant_of_nothing_or_without_a_reason_is_refused(
    opened: AccountLedger, amount: int, reason: str
) -> None:
    keeper = opened.timekeeper()
    await opened.count(T0, keeper=keeper)
    with pytest.raises(RequestError):
        await keeper.add_grant(TEAM, amount, actor="me", reason=reason, key="")


async def test_a_namespace_without_a_budget_is_metered_and_never_exhausted(
    opened: AccountLedger,
) -> None:
    other = Namespace("other")
    timekeeper = opened.timekeeper()
    in_may = T0 + 120 * MINUTE_MS
    await opened.journal("held", in_may, lease("p", namespace=other))
    await opened.count(in_may + 600 * MINUTE_MS, keeper=timekeeper)

    seen = timekeeper.balance_of(other)
    assert (minutes(seen.used_units), seen.state, seen.remaining_units) == ("300.000", "ok", None)
    with pytest.raises(RequestError, match="no budget"):
        await timekeeper.add_grant(other, 1, actor="me", reason="r", key="")


@pytest.mark.parametrize(
    ("policy", "looks_back_h"),
    [
        ({"type": PolicyType.SLIDING, "length_ms": 2 * HOUR_MS}, 24),
        ({"type": PolicyType.SLIDING, "length_ms": 30 * HOUR_MS}, 31),
        ({"type": PolicyType.FIXED, "period": Period.HOUR}, 24),
        ({"type": PolicyType.NONE}, None),
    ],
)
async def test_windows_before_the_retention_are_deleted(
    opened: AccountLedger, policy: dict[str, Any], looks_back_h: int | None
) -> None:
    opened.config.given[TEAM] = budget(100, **policy)
    timekeeper = opened.timekeeper(keep_days=1)
    for hour in range(0, 72, 2):
        await opened.count(T0 + hour * HOUR_MS, keeper=timekeeper)

    found = await opened.store.windows(TEAM)

    oldest = 0 if looks_back_h is None else T0 + (70 - looks_back_h) * HOUR_MS
    assert found[0].start_ms == oldest
    assert looks_back_h is None or len(found) == looks_back_h + 1


async def test_the_metric_of_what_remains_is_removed_with_the_limit(
    opened: AccountLedger,
) -> None:
    left = partial(
        REGISTRY.get_sample_value, "leasehold_budget_remaining_gpu_seconds", {"namespace": TEAM}
    )
    timekeeper = opened.timekeeper()
    opened.config.given[TEAM] = budget(100)
    await opened.count(T0, keeper=timekeeper)
    limited = left()
    opened.config.given[TEAM] = budget(None)
    await opened.count(T0 + 5_000, keeper=timekeeper)

    assert (limited, left()) == (6_000, None)


async def test_an_idle_timekeeper_writes_nothing(opened: AccountLedger) -> None:
    timekeeper = opened.timekeeper()
    await opened.count(T0, keeper=timekeeper)
    before = await opened.store.revisions()
    for tick in range(1, 20):
        await opened.count(T0 + tick * 5_000, keeper=timekeeper)

    assert await opened.store.revisions() == before


WHOLE = 1_000
HALF = 500
QUARTER = 250


def sized(was: Lease, mib: int, resized_ms: int) -> Lease:
    """Return a lease as it is after a resize at an instant."""
    return structs.replace(
        was,
        shares=tuple(structs.replace(each, memory_mib=mib) for each in was.shares),
        resized_at=resized_ms / 1000,
        version=was.version + 1,
    )


async def rebuilt(found: AccountLedger, *leases: Lease, at_ms: int) -> None:
    """Have the ledger lose everything, and be built anew from these."""
    await rebuild(found.leases, {"a": 4}, kept=leases, now=at_ms / 1000, force=True)


@pytest.mark.parametrize("ticks", [1, 7, 300])
async def test_each_size_is_charged_to_the_millisecond_whatever_the_ticks(
    opened: AccountLedger, ticks: int
) -> None:
    small = lease("p")
    large = sized(small, 16_000, T0 + 61_337)
    last = sized(large, 4_000, T0 + 61_338)
    story = [
        (T0, "held", small),
        (T0 + 61_337, "ended", small),
        (T0 + 61_337, "held", large),
        (T0 + 61_338, "ended", large),
        (T0 + 61_338, "held", last),
        (T0 + 100_001, "ended", last),
    ]
    replicas = [opened.timekeeper(charge_every_s=0) for _ in range(3)]
    for tick in range(1, ticks + 1):
        at = T0 + 120_000 * tick // ticks
        while story and story[0][0] <= at:
            when, kind, pod = story.pop(0)
            await opened.journal(kind, when, pod)
        await opened.count(at, keeper=replicas[tick % 3])
        await opened.count(at, keeper=replicas[(tick + 1) % 3])

    assert await total(opened) == 61_337 * HALF + 1 * WHOLE + (100_001 - 61_338) * QUARTER


async def test_sizes_in_the_ledgers_journal_have_no_gap_and_no_overlap(
    opened: AccountLedger,
) -> None:
    timekeeper = opened.timekeeper(charge_every_s=0, store=opened.store)
    [reserved] = await reserve(opened.leases, reservation("p", share("a", 0, 8_000)))
    [bound] = await opened.leases.bind([reserved])
    assert isinstance(bound, Lease)
    await timekeeper.count()
    (first,) = (await opened.account(DEFAULT)).leases
    larger = structs.replace(bound, shares=(structs.replace(bound.shares[0], memory_mib=16_000),))
    resized = await opened.leases.resizes.apply(larger)
    assert isinstance(resized, Lease)
    await timekeeper.count()
    (second,) = (await opened.account(DEFAULT)).leases
    await opened.leases.release([bound.pod], reason="over")
    await timekeeper.count()

    entries = sorted(await opened.charges(DEFAULT), key=lambda entry: entry.from_ms)
    split = round(resized.resized_at * 1000)
    assert (first.weight, second.weight) == (HALF, WHOLE)
    assert second.since_ms == split
    assert {(e.lease, e.weight) for e in entries} <= {(first.id, HALF), (second.id, WHOLE)}
    for before, after in pairwise(entries):
        assert before.to_ms == after.from_ms
    halves = [e for e in entries if e.lease == first.id]
    assert not halves or halves[-1].to_ms == split
    assert sum(e.units for e in entries) == sum((e.to_ms - e.from_ms) * e.weight for e in entries)


async def test_a_resize_missing_from_the_journal_is_charged_from_the_time_in_its_lease(
    opened: AccountLedger,
) -> None:
    """The journal is lost; the lease itself has the time of its resize."""
    [reserved] = await reserve(opened.leases, reservation("p", share("a", 0, 8_000)), now=T0 / 1000)
    [bound] = await opened.leases.bind([reserved])
    assert isinstance(bound, Lease)
    await opened.count(T0 + 10_000)
    resized = sized(bound, 16_000, T0 + 30_000)
    (first,) = (await opened.account(DEFAULT)).leases
    await rebuilt(opened, resized, at_ms=T0 + 40_000)

    for at in (T0 + 50_000, T0 + 60_000):
        await opened.count(at, keeper=opened.timekeeper(charge_every_s=0))

    half = (T0 + 30_000 - first.since_ms) * HALF
    assert await total(opened, DEFAULT) == half + 30_000 * WHOLE


async def test_a_resize_lost_with_the_ledger_is_charged_until_the_loss(
    opened: AccountLedger,
) -> None:
    """What comes back is the lease before its resize: no time of it is charged twice."""
    was = lease("p")
    await opened.journal("held", T0, was)
    await opened.count(T0 + 5_000)
    await opened.journal("ended", T0 + 10_000, was)
    await opened.journal("held", T0 + 10_000, sized(was, 16_000, T0 + 10_000))
    await opened.count(T0 + 20_000, keeper=opened.timekeeper(charge_every_s=0))
    await rebuilt(opened, was, at_ms=T0 + 20_000)

    timekeeper = opened.timekeeper(charge_every_s=0)
    for at in (T0 + 30_000, T0 + 40_000):
        await opened.count(at, keeper=timekeeper)

    entries = sorted(await opened.charges(), key=lambda entry: entry.from_ms)
    for before, after in pairwise(entries):
        assert before.to_ms == after.from_ms
    assert sum(e.units for e in entries) == 10_000 * HALF + 10_000 * WHOLE + 20_000 * HALF


async def test_the_ended_tenures_of_a_large_cluster_are_read_after_a_rebuild(
    opened: AccountLedger,
) -> None:
    """All its leases are compared with them at once."""
    tenures = [f"tenure-{number}" for number in range(8_500)]
    key = opened.store._keys.of("done", tenures[-1])
    await opened.leases._connection._redis.set(key, T0)

    assert await opened.store.charged_until(tenures) == {tenures[-1]: T0}

"""Windows, states, buckets and steps, by example."""

from dataclasses import replace
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from services.timekeeper.accounts.accrual import (
    MOST_PERIODS,
    advance,
    apply_update,
    grant_update,
    open_window,
    period_at,
    rollover_units,
)
from services.timekeeper.accounts.consequences import consequence, missing_units
from services.timekeeper.report.budget_reports import budget_changed, budget_status
from shared.kubernetes.types import RawObject
from shared.model.budgets.balance import balance, hysteresis_units, level_at
from shared.model.budgets.budget import (
    HOUR_MS,
    Account,
    Budget,
    BudgetPolicy,
    BudgetState,
    BudgetWindow,
    LeaseClass,
    OnExhausted,
    Period,
    PolicyType,
    StoredBudgetState,
)
from shared.model.errors import RequestError
from shared.model.events.pod_events import BudgetChanged
from shared.nats import wire
from tests.support.timekeeper.accounts import MINUTE_MS, T0, account, budget, charged_lease, units

BERLIN = ZoneInfo("Europe/Berlin")
DAY_MS = 24 * HOUR_MS


def ms(*when: int, zone: ZoneInfo = BERLIN) -> int:
    return int(datetime(*when, tzinfo=zone).timestamp() * 1000)  # type: ignore[arg-type, misc]


def stepped(before: Account, wanted: Budget, now_ms: int) -> Account:
    update = advance(before, wanted, now_ms, charge_every_ms=0)
    return apply_update(before, update) if update else before


def states(wanted: Budget, *at_min: float, **fields: Any) -> list[str]:
    """The states of an account that holds half a GPU from T0 on, counted at these minutes."""
    now = account(charged_lease(**fields))
    found = []
    for minute in at_min:
        now = stepped(now, wanted, T0 + round(minute * MINUTE_MS))
        found.append(str(now.state.state))
    return found


def test_gpusharing_21_an_interval_across_midnight_is_split_to_the_millisecond() -> None:
    wanted = budget(100, period=Period.DAY, time_zone="Europe/Berlin")
    since = T0 - 1_234
    update = advance(account(charged_lease(since)), wanted, T0 + 766, charge_every_ms=0)

    assert update is not None
    charges = [entry for entry in update.entries if entry.kind == "charge"]
    assert [(e.window, e.from_ms, e.to_ms, e.units) for e in charges] == [
        ("2031-04-30", since, T0, 1_234 * 500),
        ("2031-05-01", T0, T0 + 766, 766 * 500),
    ]
    assert [(w.id, w.used_units, w.closed) for w in update.windows] == [
        ("2031-04-30", 1_234 * 500, True),
        ("2031-05-01", 766 * 500, False),
    ]


def test_gpusharing_22_a_month_across_a_daylight_saving_change_keeps_its_stored_boundaries() -> (
    None
):
    policy = BudgetPolicy(period=Period.MONTH, time_zone="Europe/Berlin")
    march = period_at(policy, ms(2031, 3, 15))

    assert (march.id, march.start_ms, march.end_ms) == (
        "2031-03",
        ms(2031, 3, 1),
        ms(2031, 4, 1),
    )
    assert march.end_ms is not None
    assert march.end_ms - march.start_ms == 31 * DAY_MS - HOUR_MS

    # The zone's rules change while the window is open: what is stored stays.
    wanted = budget(100, period=Period.MONTH, time_zone="Europe/Berlin")
    began = stepped(account(charged_lease(ms(2031, 3, 15))), wanted, ms(2031, 3, 16))
    moved = replace(began, windows=(structs.replace(began.windows[0], end_ms=ms(2031, 4, 1) + 1),))
    after = stepped(moved, wanted, ms(2031, 4, 2))

    assert [(w.start_ms, w.end_ms) for w in after.windows] == [
        (ms(2031, 3, 1), ms(2031, 4, 1) + 1),
        (ms(2031, 4, 1) + 1, ms(2031, 5, 1)),
    ]


@pytest.mark.parametrize(
    ("period", "at", "id_", "length_ms"),
    [
        (Period.DAY, (2031, 3, 30, 12), "2031-03-30", 23 * HOUR_MS),
        (Period.DAY, (2031, 10, 26, 12), "2031-10-26", 25 * HOUR_MS),
        (Period.WEEK, (2031, 3, 30, 12), "2031-W13", 7 * DAY_MS - HOUR_MS),
        (Period.HOUR, (2031, 10, 26, 2, 30), "2031-10-26T02+0200", HOUR_MS),
        (Period.MONTH, (2031, 10, 26), "2031-10", 31 * DAY_MS + HOUR_MS),
    ],
)
def test_periods_follow_the_local_calendar(
    period: Period, at: tuple[int, ...], id_: str, length_ms: int
) -> None:
    span = period_at(BudgetPolicy(period=period, time_zone="Europe/Berlin"), ms(*at))

    assert span.end_ms is not None
    assert (span.id, span.end_ms - span.start_ms) == (id_, length_ms)


@given(
    at_ms=st.integers(0, 4_000_000_000_000),
    period=st.sampled_from(Period),
    zone=st.sampled_from(
        ("UTC", "Europe/Berlin", "America/Sao_Paulo", "Asia/Kolkata", "Australia/Lord_Howe")
    ),
)
def test_every_instant_is_in_its_period_and_the_next_begins_where_it_ends(
    at_ms: int, period: Period, zone: str
) -> None:
    policy = BudgetPolicy(period=period, time_zone=zone)
    span = period_at(policy, at_ms)

    assert span.end_ms is not None
    assert span.start_ms <= at_ms < span.end_ms
    after = open_window(budget(1, period=period, time_zone=zone), span.end_ms)
    assert after.start_ms == span.end_ms
    assert after.end_ms is not None
    assert after.end_ms > after.start_ms


BUCKET = budget(60, type=PolicyType.BUCKET, refill_units_per_hour=units(10))


def test_gpusharing_23_a_bucket_refills_without_drift_and_never_above_its_capacity() -> None:
    empty = BudgetWindow(
        id="bucket", start_ms=0, limit_units=units(60), level_scaled=0, level_ms=T0
    )
    level = 0
    window = empty
    for tick in range(1, 1_000_001):
        if tick % 1000 == 0:  # each of a million ticks asks; every thousandth writes
            at = T0 + tick * 3_600_000 // 1_000_000
            window = structs.replace(
                window, level_scaled=level_at(window, (), BUCKET, at), level_ms=at
            )
    level = window.level_scaled

    assert level == units(10) * HOUR_MS
    assert level_at(empty, (), BUCKET, T0 + HOUR_MS) == units(10) * HOUR_MS
    assert level_at(empty, (), BUCKET, T0 + 7 * HOUR_MS) == units(60) * HOUR_MS


@given(
    ticks=st.lists(st.integers(1, 6 * HOUR_MS), max_size=30),
    held=st.lists(st.tuples(st.integers(0, DAY_MS), st.integers(1, DAY_MS)), max_size=4),
    start=st.integers(0, 60),
)
def test_a_buckets_level_does_not_depend_on_when_it_is_written(
    ticks: list[int], held: list[tuple[int, int]], start: int
) -> None:
    tenures = [
        charged_lease(T0 + since, id_=f"p/{n}", weight=300, ended_ms=T0 + since + length)
        for n, (since, length) in enumerate(held)
    ]
    first = BudgetWindow(
        id="b", start_ms=0, limit_units=units(60), level_scaled=units(start) * HOUR_MS, level_ms=T0
    )
    end = T0 + 3 * DAY_MS
    window = first
    charged = tenures
    at = T0
    for tick in ticks:
        at += tick
        window = structs.replace(
            window, level_scaled=level_at(window, charged, BUCKET, at), level_ms=at
        )
        charged = [
            structs.replace(each, charged_ms=max(each.charged_ms, min(at, each.ended_ms or at)))
            for each in charged
        ]
    end = max(end, at)

    assert level_at(window, charged, BUCKET, end) == level_at(first, tenures, BUCKET, end)


def test_gpusharing_24_rollover_grants_half_of_what_is_left_up_to_its_cap() -> None:
    policy = BudgetPolicy(rollover_percent=50, rollover_max_units=units(30))

    def rolled(used: float) -> int:
        window = BudgetWindow(id="w", start_ms=0, limit_units=units(100), used_units=units(used))
        return rollover_units(policy, window)

    assert [rolled(used) for used in (0, 60, 90, 130)] == [units(30), units(20), units(5), 0]


def test_rolled_over_units_can_be_used_in_the_next_window() -> None:
    wanted = budget(10, period=Period.DAY, time_zone="Europe/Berlin", rollover_percent=50)
    after = stepped(stepped(account(), wanted, T0 - 1), wanted, T0)

    assert after.windows[-1].rolled_units == units(5)
    assert balance(after, wanted, T0).remaining_units == units(15)


def test_no_grant_or_rollover_makes_an_account_that_cannot_be_read() -> None:
    wanted = budget(
        153_722_867_280, period=Period.DAY, time_zone="Europe/Berlin", rollover_percent=100
    )
    after = account()
    for day in range(3):
        after = stepped(after, wanted, T0 + day * DAY_MS)
    window = after.windows[-1]

    assert msgspec.json.decode(msgspec.json.encode(window), type=BudgetWindow) == window
    with pytest.raises(RequestError, match="more than 153722867280 GPU-minutes"):
        grant_update(after, units(10**9), actor="me", reason="more", key="k")


def test_gpusharing_25_exhausted_at_zero_and_back_only_above_the_hysteresis() -> None:
    wanted = budget(10, hysteresis_units=units(1))

    assert states(wanted, 15, 16, 19, 20, 24) == ["ok", "warning", "warning", *["exhausted"] * 2]

    spent = stepped(account(charged_lease()), wanted, T0 + 24 * MINUTE_MS)
    for grant, state in ((2.5, "exhausted"), (0.5, "warning")):
        spent = apply_update(
            spent, grant_update(spent, units(grant), actor="a", reason="r", key="")
        )
        spent = stepped(spent, wanted, T0 + 24 * MINUTE_MS)
        assert spent.state.state == state


def test_gpusharing_25_the_state_does_not_flap_when_the_rate_equals_the_refill() -> None:
    wanted = budget(60, type=PolicyType.BUCKET, refill_units_per_hour=units(30))
    now = account(charged_lease())
    found = []
    now = stepped(now, wanted, T0)
    now = replace(now, windows=(structs.replace(now.windows[0], level_scaled=0),))
    for minute in range(600):
        now = stepped(now, wanted, T0 + minute * MINUTE_MS)
        found.append(now.state.state)

    assert set(found) == {BudgetState.EXHAUSTED}
    assert now.windows[0].level_scaled == 0


def test_gpusharing_26_use_beyond_the_budget_is_charged_as_such() -> None:
    wanted = budget(10)
    now = account(charged_lease())
    entries = []
    for minute in (20, 24):
        update = advance(now, wanted, T0 + minute * MINUTE_MS, charge_every_ms=0)
        assert update is not None
        entries += [entry for entry in update.entries if entry.kind == "charge"]
        now = apply_update(now, update)

    assert [(entry.units, entry.lease_class) for entry in entries] == [
        (units(10), "guaranteed"),
        (units(2), "reclaimable"),
    ]


def test_a_new_window_makes_leases_guaranteed_again() -> None:
    wanted = budget(10, period=Period.DAY, time_zone="Europe/Berlin")
    spent = stepped(account(charged_lease(T0 - HOUR_MS)), wanted, T0 - 1)
    after = stepped(spent, wanted, T0 + 1)

    assert (spent.state.state, after.state.state) == (BudgetState.EXHAUSTED, BudgetState.OK)


def test_a_namespace_at_its_debt_limit_is_overdrawn_and_its_leases_expire() -> None:
    wanted = budget(10, debt_limit_units=units(5), evict_on_debt=True, debt_grace_minutes=3)

    assert states(wanted, 20, 29, 30) == ["exhausted", "exhausted", "overdrawn"]
    follows = consequence(wanted, BudgetState.OVERDRAWN)
    assert (follows.lease_class, follows.evict_after_minutes) == (LeaseClass.EXPIRED, 3)


@pytest.mark.parametrize(
    ("action", "new_pods", "evict_after"),
    [("demote", "admit", None), ("queue", "queue", None), ("deny", "deny", None),
     ("evict", "admit", 10)],
)  # fmt: skip
def test_the_configured_action_decides_what_follows_exhaustion(
    action: str, new_pods: str, evict_after: int | None
) -> None:
    wanted = budget(10, on_exhausted=OnExhausted(action))

    exhausted = consequence(wanted, BudgetState.EXHAUSTED)
    assert (exhausted.new_pods, exhausted.evict_after_minutes) == (new_pods, evict_after)
    assert consequence(wanted, BudgetState.WARNING).lease_class is LeaseClass.GUARANTEED


def test_a_heavy_user_can_get_back_in_budget_although_its_rate_is_large() -> None:
    assert hysteresis_units(budget(10), 64_000) == units(5)
    assert hysteresis_units(budget(1000), 500) == units(50)


def test_the_time_of_exhaustion_stands_still_after_it_has_come() -> None:
    wanted = budget(10)
    now = stepped(account(charged_lease()), wanted, T0 + 19 * MINUTE_MS)
    seen = [balance(now, wanted, T0 + round(m * MINUTE_MS)).exhausted_at_ms for m in (19, 20, 20.5)]
    now = stepped(now, wanted, T0 + 21 * MINUTE_MS)
    (ended,) = now.leases
    now = replace(now, leases=(structs.replace(ended, ended_ms=T0 + 22 * MINUTE_MS),))
    for minute in (23, 40):
        now = stepped(now, wanted, T0 + minute * MINUTE_MS)
        seen.append(balance(now, wanted, T0 + (minute + 1) * MINUTE_MS).exhausted_at_ms)

    assert seen == [T0 + 20 * MINUTE_MS] * 5


def test_a_budget_that_is_exhausted_again_after_a_grant_has_the_later_time() -> None:
    wanted = budget(10, hysteresis_units=units(5))
    now = stepped(account(charged_lease()), wanted, T0 + 20 * MINUTE_MS)
    now = apply_update(now, grant_update(now, units(2), actor="a", reason="r", key=""))
    now = stepped(now, wanted, T0 + 21 * MINUTE_MS)
    granted = balance(now, wanted, T0 + 21 * MINUTE_MS)
    now = stepped(now, wanted, T0 + 30 * MINUTE_MS)

    assert granted.state is BudgetState.EXHAUSTED
    assert granted.exhausted_at_ms == T0 + 24 * MINUTE_MS
    assert balance(now, wanted, T0 + 31 * MINUTE_MS).exhausted_at_ms == T0 + 24 * MINUTE_MS


@pytest.mark.parametrize("kind", [PolicyType.NONE, PolicyType.SLIDING, PolicyType.BUCKET])
def test_a_balance_without_an_exhaustion_time_is_published(kind: PolicyType) -> None:
    refill: dict[str, Any] = {"refill_units_per_hour": 1} if kind is PolicyType.BUCKET else {}
    wanted = budget(10**12, type=kind, **refill)
    now = stepped(account(charged_lease(weight=1)), wanted, T0 + MINUTE_MS)

    seen = balance(now, wanted, T0 + MINUTE_MS)
    event = budget_changed(wanted, now, seen, previous=StoredBudgetState())

    assert seen.exhausted_at_ms is None
    left = budget_status(now, seen, RawObject(), None).remaining_minutes
    assert str(left).startswith("99999999999")
    assert wire.decode(wire.encode([event]), BudgetChanged) == [event]


def test_sliding_use_expires_bucket_by_bucket() -> None:
    wanted = budget(100, type=PolicyType.SLIDING, length_ms=3 * HOUR_MS, bucket_ms=HOUR_MS)
    now = stepped(
        account(charged_lease(weight=1000, ended_ms=T0 + 30 * MINUTE_MS)), wanted, T0 + HOUR_MS
    )

    used = []
    for hour in range(1, 6):
        now = stepped(now, wanted, T0 + hour * HOUR_MS)
        used.append(balance(now, wanted, T0 + hour * HOUR_MS).used_units)

    assert used == [units(30)] * 3 + [0, 0]


@pytest.mark.parametrize(
    ("policy", "earlier_ms"),
    [
        ({"period": Period.HOUR}, 0),
        ({"type": PolicyType.SLIDING, "length_ms": DAY_MS, "bucket_ms": HOUR_MS}, DAY_MS),
    ],
)
def test_a_lease_from_a_clock_in_1970_is_charged_in_one_step_of_few_windows(
    policy: dict[str, Any], earlier_ms: int
) -> None:
    wanted = budget(100, **policy)
    now = stepped(account(charged_lease(0, weight=1000)), wanted, T0 + MINUTE_MS)

    assert sum(window.used_units for window in now.windows) == 1000 * (T0 + MINUTE_MS)
    assert len(now.windows) <= MOST_PERIODS + 2
    used_units = balance(now, wanted, T0 + MINUTE_MS).used_units
    assert used_units == 1000 * (earlier_ms + MINUTE_MS)


def test_running_leases_are_charged_at_intervals_and_counted_in_every_balance() -> None:
    wanted = budget(100)
    now = stepped(account(charged_lease()), wanted, T0)

    assert advance(now, wanted, T0 + MINUTE_MS, charge_every_ms=900_000) is None
    assert balance(now, wanted, T0 + MINUTE_MS).used_units == units(0.5)
    assert advance(now, wanted, T0 + 900_000, charge_every_ms=900_000) is not None


def test_a_new_limit_changes_the_open_window_and_a_new_period_closes_it() -> None:
    now = stepped(account(charged_lease()), budget(100), T0 + 20 * MINUTE_MS)
    raised = stepped(now, budget(200), T0 + 20 * MINUTE_MS)
    daily = budget(200, period=Period.DAY)
    update = advance(raised, daily, T0 + 30 * MINUTE_MS, charge_every_ms=0)

    assert (raised.windows[-1].limit_units, raised.windows[-1].used_units) == (
        units(200),
        units(10),
    )
    assert update is not None
    closed, fresh = update.windows
    assert (closed.closed, closed.used_units, closed.end_ms) == (
        True,
        units(15),
        T0 + 30 * MINUTE_MS,
    )
    assert (fresh.start_ms, fresh.used_units) == (T0 + 30 * MINUTE_MS, 0)
    assert fresh.id not in {closed.id, "2031-04-30"}


@given(
    st.sampled_from(PolicyType),
    st.integers(0, 90),
    st.sampled_from([None, 0, 5, 40]),
    st.sampled_from([None, 0, 20]),
    st.integers(1, 600),
)
def test_what_is_missing_is_what_a_grant_must_be_for_pods_to_be_admitted(
    kind: PolicyType, limit: int, hysteresis: int | None, debt: int | None, minute: int
) -> None:
    thresholds: dict[str, Any] = {
        "hysteresis_units": None if hysteresis is None else units(hysteresis),
        "debt_limit_units": None if debt is None else units(debt),
    }
    wanted = budget(
        limit,
        type=kind,
        refill_units_per_hour=units(1),
        on_exhausted=OnExhausted.DENY,
        **thresholds,
    )
    at_ms = T0 + minute * MINUTE_MS
    now = stepped(stepped(account(charged_lease()), wanted, T0), wanted, at_ms)
    missing = missing_units(balance(now, wanted, at_ms), wanted)

    def new_pods(granted: int) -> str:
        order = grant_update(now, granted, actor="", reason="", key="")
        return consequence(wanted, balance(apply_update(now, order), wanted, at_ms).state).new_pods

    if missing:
        assert (new_pods(missing), new_pods(missing - 1)) == ("admit", "deny")
    else:
        assert new_pods(0) == "admit"

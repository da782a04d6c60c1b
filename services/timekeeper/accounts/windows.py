"""The begin and end of budget windows; pure.

A boundary is computed once, when its window is opened, and stored as an instant. Later changes of a
time zone (daylight saving, new tables) do not move existing windows.
"""

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from shared.model.budget import HOUR_MS, Budget, BudgetPolicy, BudgetWindow, Period, PolicyType

DAY_MS = 24 * HOUR_MS
_IDS = {Period.DAY: "%Y-%m-%d", Period.WEEK: "%G-W%V", Period.MONTH: "%Y-%m"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPeriod:
    """A natural period, such as a calendar month."""

    id: str
    start_ms: int
    end_ms: int | None


def period_at(policy: BudgetPolicy, at_ms: int) -> WindowPeriod:
    """Return the policy's period that contains the instant."""
    if policy.type is PolicyType.NONE:
        return WindowPeriod(id="lifetime", start_ms=0, end_ms=None)
    if policy.type is PolicyType.BUCKET:
        return WindowPeriod(id="bucket", start_ms=0, end_ms=None)
    if policy.type is PolicyType.SLIDING:
        start = at_ms - at_ms % policy.bucket_ms
        stamp = datetime.fromtimestamp(start / 1000, UTC).strftime("%Y-%m-%dT%H:%MZ")
        return WindowPeriod(id=stamp, start_ms=start, end_ms=start + policy.bucket_ms)
    zone = ZoneInfo(policy.time_zone)
    local = datetime.fromtimestamp(at_ms // 1000, zone)
    if policy.period is Period.HOUR:
        start = at_ms - (local.minute * 60 + local.second) * 1000 - at_ms % 1000
        return WindowPeriod(
            id=local.strftime("%Y-%m-%dT%H%z"), start_ms=start, end_ms=start + HOUR_MS
        )
    first, after = _days(policy.period, local.date())
    return WindowPeriod(
        id=first.strftime(_IDS[policy.period]),
        start_ms=_midnight_ms(first, zone),
        end_ms=_midnight_ms(after, zone),
    )


def _days(period: Period, day: date) -> tuple[date, date]:
    """Return the first day of the period and the first of the next."""
    if period is Period.DAY:
        return day, day + timedelta(days=1)
    if period is Period.WEEK:
        first = day - timedelta(days=day.weekday())
        return first, first + timedelta(days=7)
    first = day.replace(day=1)
    return first, (first + timedelta(days=32)).replace(day=1)


def _midnight_ms(day: date, zone: ZoneInfo) -> int:
    """Return when a day begins; if daylight saving skips midnight, the instant of the change."""
    return int(datetime.combine(day, time(), zone).timestamp()) * 1000


def open_window(
    budget: Budget, at_ms: int, *, natural: bool = False, rolled_units: int = 0
) -> BudgetWindow:
    """Return a new window that begins at the instant; a `natural` one begins with its period.

    A window that begins inside its period has the instant in its id, so that ids are unique.
    """
    policy = budget.policy
    period = period_at(policy, at_ms)
    start = period.start_ms if natural else at_ms
    full = policy.type is PolicyType.BUCKET and budget.limit_units is not None
    return BudgetWindow(
        id=period.id if start == period.start_ms else f"{period.id}+{start}",
        start_ms=start,
        end_ms=period.end_ms,
        limit_units=budget.limit_units,
        rolled_units=rolled_units,
        level_scaled=(budget.limit_units or 0) * HOUR_MS if full else 0,
        level_ms=at_ms if full else 0,
    )


def window_shape(policy: BudgetPolicy) -> str:
    """Return the settings that determine a policy's windows; a change opens a new window."""
    if policy.type is PolicyType.FIXED:
        return f"fixed {policy.period} {policy.time_zone}"
    if policy.type is PolicyType.SLIDING:
        return f"sliding {policy.bucket_ms}"
    return str(policy.type)


def rollover_units(policy: BudgetPolicy, closed: BudgetWindow) -> int:
    """Return the unused units of a window that roll over to the next one."""
    if policy.type is not PolicyType.FIXED or closed.allowed_units is None:
        return 0
    unused = max(0, closed.allowed_units - closed.used_units)
    granted = unused * policy.rollover_percent // 100
    most = policy.rollover_max_units
    return granted if most is None else min(granted, most)


def retained_since_ms(policy: BudgetPolicy, now_ms: int, *, keep_days: int) -> int:
    """Return the instant before which entries and windows are deleted."""
    reach_ms = keep_days * DAY_MS
    if policy.type is PolicyType.SLIDING:
        reach_ms = max(reach_ms, policy.length_ms + policy.bucket_ms)
    return max(0, now_ms - reach_ms)

"""The step of an account: its charges, the windows that close and open, and its state; pure.

A step is written only if the account still has the revision from which it was computed. Each charge
begins where the last one of the same lease ended. So the steps of any replicas add up to weight x
(end - begin).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from fractions import Fraction
from zoneinfo import ZoneInfo

from msgspec import structs

from services.timekeeper.accounts.consequences import LEASE_CLASSES
from shared.model.budgets.balance import balance, level_at, uncharged_units
from shared.model.budgets.budget import (
    HOUR_MS,
    UNITS_PER_GPU_MINUTE,
    Account,
    AccountUpdate,
    Balance,
    Budget,
    BudgetPolicy,
    BudgetState,
    BudgetWindow,
    ChargedLease,
    ChargeEntry,
    Period,
    PolicyType,
    StoredBudgetState,
)
from shared.model.errors import RequestError

DAY_MS = 24 * HOUR_MS
_IDS = {Period.DAY: "%Y-%m-%d", Period.WEEK: "%G-W%V", Period.MONTH: "%Y-%m"}
_LENGTHS_MS = {
    Period.HOUR: HOUR_MS,
    Period.DAY: DAY_MS,
    Period.WEEK: 7 * DAY_MS,
    Period.MONTH: 31 * DAY_MS,
}
MOST_UNITS = 2**63 - 1
"""No account with more could be read."""
MOST_PERIODS = 1000
"""Of one step: what is before them, as after a clock in 1970, is charged to one window."""


def period_at(policy: BudgetPolicy, at_ms: int) -> BudgetWindow:
    """The window is unused, and of a whole period."""
    if policy.type is PolicyType.NONE:
        return BudgetWindow(id="lifetime", start_ms=0, end_ms=None)
    if policy.type is PolicyType.BUCKET:
        return BudgetWindow(id="bucket", start_ms=0, end_ms=None)
    if policy.type is PolicyType.SLIDING:
        start = at_ms - at_ms % policy.bucket_ms
        stamp = datetime.fromtimestamp(start / 1000, UTC).strftime("%Y-%m-%dT%H:%MZ")
        return BudgetWindow(id=stamp, start_ms=start, end_ms=start + policy.bucket_ms)
    zone = ZoneInfo(policy.time_zone)
    local = datetime.fromtimestamp(at_ms // 1000, zone)
    if policy.period is Period.HOUR:
        start = at_ms - (local.minute * 60 + local.second) * 1000 - at_ms % 1000
        return BudgetWindow(
            id=local.strftime("%Y-%m-%dT%H%z"), start_ms=start, end_ms=start + HOUR_MS
        )
    first, after = _days(policy.period, local.date())
    return BudgetWindow(
        id=first.strftime(_IDS[policy.period]),
        start_ms=_midnight_ms(first, zone),
        end_ms=_midnight_ms(after, zone),
    )


def _days(period: Period, day: date) -> tuple[date, date]:
    if period is Period.DAY:
        return day, day + timedelta(days=1)
    if period is Period.WEEK:
        first = day - timedelta(days=day.weekday())
        return first, first + timedelta(days=7)
    first = day.replace(day=1)
    return first, (first + timedelta(days=32)).replace(day=1)


def _midnight_ms(day: date, zone: ZoneInfo) -> int:
    """If daylight saving skips midnight, return the instant of the change."""
    return int(datetime.combine(day, time(), zone).timestamp()) * 1000


def open_window(
    budget: Budget, at_ms: int, *, natural: bool = False, rolled_units: int = 0
) -> BudgetWindow:
    """A window that begins inside its period has the instant in its id; a `natural` one does not.

    Its boundaries are stored: no later change of a time zone moves them.
    """
    policy = budget.policy
    period = period_at(policy, at_ms)
    start = period.start_ms if natural else at_ms
    full = policy.type is PolicyType.BUCKET and budget.limit_units is not None
    return structs.replace(
        period,
        id=period.id if start == period.start_ms else f"{period.id}+{start}",
        start_ms=start,
        limit_units=budget.limit_units,
        rolled_units=rolled_units,
        level_scaled=(budget.limit_units or 0) * HOUR_MS if full else 0,
        level_ms=at_ms if full else 0,
    )


def window_shape(budget: Budget) -> str:
    """Return the settings whose change opens a new window."""
    policy = budget.policy
    unit = f" {budget.currency}" if budget.currency else ""
    if policy.type is PolicyType.FIXED:
        return f"fixed {policy.period} {policy.time_zone}{unit}"
    if policy.type is PolicyType.SLIDING:
        return f"sliding {policy.bucket_ms}{unit}"
    return f"{policy.type}{unit}"


def rollover_units(policy: BudgetPolicy, closed: BudgetWindow) -> int:
    if policy.type is not PolicyType.FIXED or closed.allowed_units is None:
        return 0
    unused = max(0, closed.allowed_units - closed.used_units)
    granted = unused * policy.rollover_percent // 100
    most = policy.rollover_max_units
    room = MOST_UNITS - (closed.limit_units or 0)
    return min(granted, room if most is None else min(most, room))


def retained_since_ms(policy: BudgetPolicy, now_ms: int, *, keep_days: int) -> int:
    """Return the instant before which entries and windows are deleted."""
    reach_ms = keep_days * DAY_MS
    if policy.type is PolicyType.SLIDING:
        reach_ms = max(reach_ms, policy.length_ms + policy.bucket_ms)
    return max(0, now_ms - reach_ms)


RESTORED = "restored from"
_MINUTES = re.compile(r"-?\d{1,9}(\.\d{1,30})?(e-?\d{1,2})?")
"""Grants are never deleted from the ledger, so amounts that no float can represent are refused."""
MAX_MINUTES = 10**9
MOST_MINUTES = MOST_UNITS // UNITS_PER_GPU_MINUTE


@dataclass(slots=True)
class _AccountStep:
    account: Account
    budget: Budget
    charged: dict[str, int] = field(default_factory=dict)
    windows: dict[str, BudgetWindow] = field(default_factory=dict)
    entries: list[ChargeEntry] = field(default_factory=list)

    def leases(self) -> list[ChargedLease]:
        return [
            structs.replace(lease, charged_ms=self.charged.get(lease.id, lease.charged_ms))
            for lease in self.account.leases
        ]


def advance(
    account: Account, budget: Budget, now_ms: int, *, charge_every_ms: int
) -> AccountUpdate | None:
    """Return the step that advances an account to an instant, or None if nothing is due.

    All leases that began or ended until `now_ms` must be in the account. A running lease is charged
    every `charge_every_ms`, and when a window closes, the lease ends or the state changes.
    """
    if not _is_due(account, budget, now_ms, charge_every_ms):
        return None
    step = _AccountStep(account, budget)
    window = account.windows[-1] if account.windows else _first_window(step, now_ms)
    stored_shape = account.state.shape
    same_unit = account.budget is None or account.budget.currency == budget.currency
    while True:
        window = _up_to_recent(budget.policy, window, now_ms)
        until = now_ms if window.end_ms is None else min(now_ms, window.end_ms)
        window = _charge(step, window, until)
        reshaped = bool(stored_shape) and stored_shape != window_shape(budget)
        if window.end_ms is not None and window.end_ms <= now_ms:
            window = _close(step, window, window.end_ms, same_unit=same_unit)
        elif reshaped:
            window = _close(step, window, now_ms, same_unit=same_unit)
        else:
            break
        stored_shape = window_shape(budget)
    _apply_limit(step, window, now_ms)
    return _finish(step, now_ms)


def _is_due(account: Account, budget: Budget, now_ms: int, charge_every_ms: int) -> bool:
    if not account.windows or account.budget != budget:
        return True
    window = account.windows[-1]
    state = account.state
    if window.end_ms is not None and window.end_ms <= now_ms:
        return True
    if any(
        lease.ended_ms is not None or now_ms - lease.charged_ms >= charge_every_ms
        for lease in account.leases
    ):
        return True
    current = balance(account, budget, now_ms)
    now = (current.state, current.warned_percent, _exhausted_ms(current))
    return now != (state.state, state.warned_percent, state.exhausted_ms)


def _first_window(step: _AccountStep, now_ms: int) -> BudgetWindow:
    first = min([now_ms, *(lease.charged_ms for lease in step.account.leases)])
    window = open_window(step.budget, first, natural=True)
    step.windows[window.id] = window
    return window


def _up_to_recent(policy: BudgetPolicy, window: BudgetWindow, now_ms: int) -> BudgetWindow:
    """Let a window last until the periods that a step has time for, or that a balance counts."""
    if window.end_ms is None or policy.type not in {PolicyType.FIXED, PolicyType.SLIDING}:
        return window
    reach_ms = MOST_PERIODS * _LENGTHS_MS[policy.period]
    if policy.type is PolicyType.SLIDING:
        reach_ms = policy.length_ms + policy.bucket_ms
    if window.end_ms >= now_ms - reach_ms:
        return window
    recent = period_at(policy, now_ms - reach_ms)
    return structs.replace(window, end_ms=max(window.end_ms, recent.start_ms))


def _charge(step: _AccountStep, window: BudgetWindow, until_ms: int) -> BudgetWindow:
    leases = step.leases()
    bucket = step.budget.policy.type is PolicyType.BUCKET and window.limit_units is not None
    if bucket and until_ms > window.level_ms:
        level = level_at(window, leases, step.budget, until_ms)
        window = structs.replace(window, level_scaled=level, level_ms=until_ms)
    lease_class = LEASE_CLASSES[_state_in(step.account, window)]
    used = window.used_units
    for lease in leases:
        units = uncharged_units(lease, until_ms)
        until = until_ms if lease.ended_ms is None else min(until_ms, lease.ended_ms)
        if until <= lease.charged_ms:
            continue
        used += units
        step.charged[lease.id] = until
        step.entries.append(_charge_entry(lease, window, until, units, lease_class))
    window = structs.replace(window, used_units=used)
    step.windows[window.id] = window
    return window


def _state_in(account: Account, window: BudgetWindow) -> BudgetState:
    state = account.state
    return state.state if state.window in {window.id, ""} else BudgetState.OK


def _charge_entry(
    lease: ChargedLease, window: BudgetWindow, until_ms: int, units: int, lease_class: str
) -> ChargeEntry:
    return ChargeEntry(
        window=window.id,
        kind="charge",
        units=units,
        lease=lease.id,
        pod=lease.name,
        from_ms=lease.charged_ms,
        to_ms=until_ms,
        weight=lease.weight,
        lease_class=str(lease_class),
        model=lease.model,
        cores_milli=lease.cores_milli,
        memory_mib=lease.memory_mib,
    )


def _close(
    step: _AccountStep, window: BudgetWindow, at_ms: int, *, same_unit: bool
) -> BudgetWindow:
    closed = structs.replace(window, end_ms=at_ms, closed=True)
    step.windows[closed.id] = closed
    step.entries.append(ChargeEntry(window=closed.id, kind="close", units=closed.used_units))
    rolled = rollover_units(step.budget.policy, closed) if same_unit else 0
    fresh = open_window(step.budget, at_ms, rolled_units=rolled)
    if rolled:
        step.entries.append(
            ChargeEntry(
                window=fresh.id, kind="rollover", units=rolled, reason=f"unused in {closed.id}"
            )
        )
    step.windows[fresh.id] = fresh
    return fresh


def _apply_limit(step: _AccountStep, window: BudgetWindow, now_ms: int) -> None:
    before, after = window.limit_units, step.budget.limit_units
    if before == after:
        return
    changed = structs.replace(window, limit_units=after)
    if step.budget.policy.type is PolicyType.BUCKET and after is not None:
        full = after * HOUR_MS
        level = full if before is None else min(full, window.level_scaled)
        changed = structs.replace(changed, level_scaled=level, level_ms=now_ms)
    step.windows[window.id] = changed
    shown = ["none" if limit is None else str(limit) for limit in (before, after)]
    reason = f"the limit was {shown[0]} and is {shown[1]}"
    units = (after or 0) - (before or 0)
    step.entries.append(ChargeEntry(window=window.id, kind="adjust", units=units, reason=reason))


def _finish(step: _AccountStep, now_ms: int) -> AccountUpdate:
    account = step.account
    over = {
        lease.id: lease.charged_ms
        for lease in step.leases()
        if lease.ended_ms is not None and lease.charged_ms >= lease.ended_ms
    }
    update = AccountUpdate(
        namespace=account.namespace,
        revision=account.revision,
        windows=tuple(sorted(step.windows.values(), key=lambda window: window.place)),
        charged=step.charged,
        ended=over,
        entries=tuple(step.entries),
        budget=None if account.budget == step.budget else step.budget,
    )
    current = balance(apply_update(account, update), step.budget, now_ms)
    before = account.state
    is_stored = bool(before.since_ms)
    state = StoredBudgetState(
        state=current.state,
        warned_percent=current.warned_percent,
        since_ms=before.since_ms if is_stored and current.state is before.state else now_ms,
        window=current.window.id,
        shape=window_shape(step.budget),
        restored_ms=before.restored_ms,
        exhausted_ms=_exhausted_ms(current),
    )
    return replace(update, state=state)


def _exhausted_ms(current: Balance) -> int:
    remaining = current.remaining_units
    return 0 if remaining is None or remaining > 0 else current.exhausted_at_ms or 0


def apply_update(account: Account, update: AccountUpdate) -> Account:
    charged: Mapping[str, int] = update.charged
    windows = {window.id: window for window in account.windows}
    windows.update((window.id, window) for window in update.windows)
    return replace(
        account,
        revision=account.revision + 1,
        leases=tuple(
            structs.replace(lease, charged_ms=charged.get(lease.id, lease.charged_ms))
            for lease in account.leases
            if lease.id not in update.ended
        ),
        windows=tuple(sorted(windows.values(), key=lambda window: window.place)),
        state=account.state if update.state is None else update.state,
        budget=account.budget if update.budget is None else update.budget,
    )


def grant_update(
    account: Account, units: int, *, actor: str, reason: str, key: str
) -> AccountUpdate:
    """A negative grant reduces the open window. Raises RequestError for more than it can hold."""
    window = account.windows[-1]
    changed = structs.replace(window, granted_units=window.granted_units + units)
    if abs(changed.granted_units) > MOST_UNITS or (changed.allowed_units or 0) > MOST_UNITS:
        raise RequestError(
            f"with this grant, window {window.id} would have more than {MOST_MINUTES} GPU-minutes "
            f"({MOST_MINUTES // 60} in a budget's currency): grant less"
        )
    if window.level_ms:
        changed = structs.replace(changed, level_scaled=window.level_scaled + units * HOUR_MS)
    entry = ChargeEntry(window=window.id, kind="grant", units=units, actor=actor, reason=reason)
    return AccountUpdate(
        namespace=account.namespace,
        revision=account.revision,
        windows=(changed,),
        entries=(entry,),
        grant_key=key,
    )


def restore_update(
    account: Account, budget: Budget, *, window: BudgetWindow, at_ms: int
) -> AccountUpdate:
    entry = ChargeEntry(
        window=window.id,
        kind="adjust",
        units=window.used_units,
        reason=f"{RESTORED} the budget's status of {at_ms}",
    )
    return AccountUpdate(
        namespace=account.namespace,
        revision=account.revision,
        windows=(window,),
        entries=(entry,),
        state=StoredBudgetState(window=window.id, shape=window_shape(budget), restored_ms=at_ms),
    )


def trim_windows(account: Account, budget: Budget, now_ms: int) -> Account:
    since = now_ms
    if budget.policy.type is PolicyType.SLIDING:
        since -= budget.policy.length_ms
    kept = [window for window in account.windows[:-1] if (window.end_ms or 0) > since]
    return replace(account, windows=(*kept, *account.windows[-1:]))


def parse_gpu_minutes(value: object) -> int:
    """Return units. Raises RequestError."""
    text = str(value)
    if isinstance(value, bool) or not _MINUTES.fullmatch(text):
        raise RequestError(f"{value!r} is not a number of GPU-minutes such as 120 or -0.5")
    amount = Fraction(text)
    if abs(amount) > MAX_MINUTES:
        raise RequestError(f"{text} GPU-minutes are too many: {MAX_MINUTES} at most in one grant")
    return round(amount * UNITS_PER_GPU_MINUTE)

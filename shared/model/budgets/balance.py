"""The balance and state of a budget, in exact amounts; pure."""

from collections.abc import Iterable

from shared.model.bounds import LATEST_S
from shared.model.budgets.budget import (
    HOUR_MS,
    Account,
    Balance,
    Budget,
    BudgetState,
    BudgetWindow,
    ChargedLease,
    PolicyType,
)

LATEST_MS = round(LATEST_S) * 1000
HYSTERESIS_PERCENT = 5
HYSTERESIS_RATE_MS = 10 * 60_000
OUT_OF_BUDGET = frozenset({BudgetState.EXHAUSTED, BudgetState.OVERDRAWN})


def uncharged_units(lease: ChargedLease, until_ms: int) -> int:
    until = until_ms if lease.ended_ms is None else min(until_ms, lease.ended_ms)
    return lease.weight * max(0, until - lease.charged_ms)


def rate_at(leases: Iterable[ChargedLease], at_ms: int) -> int:
    return sum(
        lease.weight
        for lease in leases
        if lease.since_ms <= at_ms and (lease.ended_ms is None or lease.ended_ms > at_ms)
    )


def balance(account: Account, budget: Budget, at_ms: int) -> Balance:
    window = account.windows[-1]
    end = at_ms if window.end_ms is None else min(at_ms, window.end_ms)
    window_used = window.used_units + sum(uncharged_units(lease, end) for lease in account.leases)
    rate = rate_at(account.leases, at_ms)
    used, allowed = _used_and_allowed(account, budget, window_used, at_ms)
    remaining = None if allowed is None else allowed - used
    if budget.policy.type is PolicyType.BUCKET and window.limit_units is not None:
        remaining = level_at(window, account.leases, budget, at_ms) // HOUR_MS
    state = BudgetState.INVALID
    if not budget.unreadable:
        state = next_state(
            _state_before(account, budget),
            budget,
            used=used,
            allowed=allowed,
            remaining=remaining,
            rate=rate,
        )
    return Balance(
        namespace=account.namespace,
        at_ms=at_ms,
        window=window,
        state=state,
        warned_percent=warned_percent(budget, used=used, allowed=allowed, remaining=remaining),
        used_units=used,
        window_used_units=window_used,
        allowed_units=allowed,
        remaining_units=remaining,
        current_rate_milli_gpu=rate,
        leases=len([lease for lease in account.leases if lease.ended_ms is None]),
        exhausted_at_ms=_exhausted_before(account, budget, remaining)
        or exhaustion_ms(budget, window, remaining, rate, at_ms),
        problem=budget.problem,
        currency=budget.currency,
    )


def _used_and_allowed(
    account: Account, budget: Budget, window_used: int, at_ms: int
) -> tuple[int, int | None]:
    allowed = account.windows[-1].allowed_units
    if budget.policy.type is not PolicyType.SLIDING:
        return window_used, allowed
    since_ms = at_ms - budget.policy.length_ms
    earlier = [window for window in account.windows[:-1] if (window.end_ms or 0) > since_ms]
    if allowed is not None:
        allowed += sum(window.granted_units for window in earlier)
    return window_used + sum(window.used_units for window in earlier), allowed


def _state_before(account: Account, budget: Budget) -> BudgetState:
    return account.state.state if _state_continues(account, budget) else BudgetState.OK


def _state_continues(account: Account, budget: Budget) -> bool:
    sliding = budget.policy.type is PolicyType.SLIDING
    return sliding or account.state.window == account.windows[-1].id


def _exhausted_before(account: Account, budget: Budget, remaining: int | None) -> int:
    if remaining is None or remaining > 0 or not _state_continues(account, budget):
        return 0
    return account.state.exhausted_ms


def next_state(
    before: BudgetState,
    budget: Budget,
    *,
    used: int,
    allowed: int | None,
    remaining: int | None,
    rate: int,
) -> BudgetState:
    """A namespace is back in budget only above the hysteresis."""
    if remaining is None:
        return BudgetState.OK
    if budget.debt_limit_units is not None and remaining <= min(-budget.debt_limit_units, 0):
        return BudgetState.OVERDRAWN
    if before in OUT_OF_BUDGET and remaining < hysteresis_units(budget, rate):
        return before
    if remaining <= 0:
        return BudgetState.EXHAUSTED
    if warned_percent(budget, used=used, allowed=allowed, remaining=remaining):
        return BudgetState.WARNING
    return BudgetState.OK


def hysteresis_units(budget: Budget, rate_milli_gpu: int) -> int:
    """Return at most half of the limit, so that a heavy user can get back in budget."""
    if budget.hysteresis_units is not None:
        return max(1, budget.hysteresis_units)
    limit = budget.limit_units or 0
    wanted = max(limit * HYSTERESIS_PERCENT // 100, rate_milli_gpu * HYSTERESIS_RATE_MS)
    return max(1, min(wanted, limit // 2))


def warned_percent(budget: Budget, *, used: int, allowed: int | None, remaining: int | None) -> int:
    """Return the highest threshold that is reached, or 0.

    For a bucket, what is missing from its limit counts as used.
    """
    if allowed is None or remaining is None:
        return 0
    if budget.policy.type is PolicyType.BUCKET:
        allowed = budget.limit_units or 0
        used = allowed - remaining
    reached = [percent for percent in budget.warn_at if used * 100 >= allowed * percent]
    return max(reached, default=0)


def exhaustion_ms(
    budget: Budget, window: BudgetWindow, remaining: int | None, rate: int, at_ms: int
) -> int | None:
    """Return when the budget is or was exhausted at the current rate, if in this window."""
    if remaining is None:
        return None
    slope = rate * HOUR_MS
    if budget.policy.type is PolicyType.BUCKET:
        slope -= budget.policy.refill_units_per_hour
    if slope <= 0:
        return at_ms if remaining <= 0 else None
    at = max(window.start_ms, at_ms + -(-remaining * HOUR_MS // slope))
    ends_ms = window.end_ms if budget.policy.type is PolicyType.FIXED else None
    return at if at <= (LATEST_MS if ends_ms is None else ends_ms) else None


def level_at(
    window: BudgetWindow, leases: Iterable[ChargedLease], budget: Budget, at_ms: int
) -> int:
    """Return the level of a bucket at an instant, in units times HOUR_MS to avoid rounding.

    It stops rising at the limit. A grant above the limit remains until it is used.
    """
    leases = tuple(leases)
    late = sum(uncharged_units(lease, window.level_ms) for lease in leases)
    level = window.level_scaled - late * HOUR_MS
    now = window.level_ms
    moments = {at_ms} | {
        moment
        for lease in leases
        for moment in (lease.since_ms, lease.ended_ms)
        if moment is not None and now < moment < at_ms
    }
    full = (budget.limit_units or 0) * HOUR_MS
    refill = budget.policy.refill_units_per_hour
    for moment in sorted(moments):
        length = max(0, moment - now)
        rate = rate_at(leases, now) * HOUR_MS
        level = _advance_level(level, full, refill=refill * length, used=rate * length)
        now += length
    return level


def _advance_level(level: int, full: int, *, refill: int, used: int) -> int:
    if level <= full:
        return min(full, level + refill - used)
    if level - used >= full:
        return level - used
    return min(full, level + refill - used - refill * (level - full) // used)

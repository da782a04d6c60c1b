"""How a namespace stands, and what follows from that. All amounts exact; no clock, no store."""

from collections.abc import Iterable
from dataclasses import dataclass

from shared.model.budget import (
    HOUR_MS,
    Account,
    Balance,
    Budget,
    BudgetState,
    BudgetWindow,
    ChargedLease,
    LeaseClass,
    OnExhausted,
    PolicyType,
)

LATEST_MS = 253_402_300_799_000
"""The last second of which a date can be written; what would end later does not end."""
HYSTERESIS_PERCENT = 5
HYSTERESIS_BURN_MS = 10 * 60_000

CLASSES = {
    BudgetState.OK: LeaseClass.GUARANTEED,
    BudgetState.WARNING: LeaseClass.GUARANTEED,
    BudgetState.EXHAUSTED: LeaseClass.RECLAIMABLE,
    BudgetState.OVERDRAWN: LeaseClass.EXPIRED,
}
OUT = frozenset({BudgetState.EXHAUSTED, BudgetState.OVERDRAWN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence:
    """What follows from a state; who acts on it is not said here."""

    lease_class: LeaseClass
    new_pods: str
    """admit, queue or deny."""
    evict_after_minutes: int | None = None
    """Running leases end so long after the state was entered; None: they do not."""


def consequence(budget: Budget, state: BudgetState) -> Consequence:
    """Return what a state means under a budget."""
    new_pods, evict_after = "admit", None
    if state in OUT:
        if budget.on_exhausted in {OnExhausted.QUEUE, OnExhausted.DENY}:
            new_pods = str(budget.on_exhausted)
        if budget.on_exhausted is OnExhausted.EVICT:
            evict_after = budget.grace_minutes
    if state is BudgetState.OVERDRAWN and budget.evict_on_debt:
        evict_after = min(
            budget.debt_grace_minutes,
            budget.debt_grace_minutes if evict_after is None else evict_after,
        )
    return Consequence(
        lease_class=CLASSES[state], new_pods=new_pods, evict_after_minutes=evict_after
    )


def accrued(tenure: ChargedLease, until_ms: int) -> int:
    """Return the units of a tenure's time before an instant that is not charged yet."""
    until = until_ms if tenure.ended_ms is None else min(until_ms, tenure.ended_ms)
    return tenure.weight * max(0, until - tenure.charged_ms)


def burn_at(tenures: Iterable[ChargedLease], at_ms: int) -> int:
    """Return the milli-GPU held at an instant."""
    return sum(
        each.weight
        for each in tenures
        if each.since_ms <= at_ms and (each.ended_ms is None or each.ended_ms > at_ms)
    )


def balance(account: Account, budget: Budget, at_ms: int) -> Balance:
    """Return how an account stands at an instant, the time not charged yet included."""
    window = account.windows[-1]
    end = at_ms if window.end_ms is None else min(at_ms, window.end_ms)
    uncharged = sum(accrued(each, end) for each in account.leases)
    burn = burn_at(account.leases, at_ms)
    here = used = window.used_units + uncharged
    allowed = window.allowed_units
    if budget.policy.type is PolicyType.SLIDING:
        inside = [
            each
            for each in account.windows[:-1]
            if (each.end_ms or 0) > at_ms - budget.policy.length_ms
        ]
        used += sum(each.used_units for each in inside)
        if allowed is not None:
            allowed += sum(each.granted_units for each in inside)
    remaining = None if allowed is None else allowed - used
    if budget.policy.type is PolicyType.BUCKET and window.limit_units is not None:
        remaining = level_at(window, account.leases, budget, at_ms) // HOUR_MS
    state = state_of(
        _state_before(account, budget),
        budget,
        used=used,
        allowed=allowed,
        remaining=remaining,
        burn=burn,
    )
    return Balance(
        namespace=account.namespace,
        at_ms=at_ms,
        window=window,
        state=state,
        warned_percent=warned_percent(budget, used=used, allowed=allowed, remaining=remaining),
        used_units=used,
        window_used_units=here,
        allowed_units=allowed,
        remaining_units=remaining,
        current_rate_milli_gpu=burn,
        leases=len([each for each in account.leases if each.ended_ms is None]),
        exhausted_at_ms=projected_ms(budget, window, remaining, burn, at_ms),
    )


def _state_before(account: Account, budget: Budget) -> BudgetState:
    """Return the state to go on from: a new calendar window forgets the one before."""
    sliding = budget.policy.type is PolicyType.SLIDING
    same = account.state.window == account.windows[-1].id
    return account.state.state if sliding or same else BudgetState.OK


def state_of(
    before: BudgetState,
    budget: Budget,
    *,
    used: int,
    allowed: int | None,
    remaining: int | None,
    burn: int,
) -> BudgetState:
    """Return the state that follows; out of budget is left only above the hysteresis."""
    if remaining is None:
        return BudgetState.OK
    if budget.debt_limit_units is not None and remaining <= min(-budget.debt_limit_units, 0):
        return BudgetState.OVERDRAWN
    if before in OUT and remaining < hysteresis_units(budget, burn):
        return before
    if remaining <= 0:
        return BudgetState.EXHAUSTED
    if warned_percent(budget, used=used, allowed=allowed, remaining=remaining):
        return BudgetState.WARNING
    return BudgetState.OK


def hysteresis_units(budget: Budget, burn_milli_gpu: int) -> int:
    """Return what must be left before an exhausted budget counts as refilled.

    Unless the budget says otherwise, 5 % of the limit or ten minutes of the present burn, whichever
    is more, but never above half of the limit, or a heavy user could never come back.
    """
    if budget.hysteresis_units is not None:
        return max(1, budget.hysteresis_units)
    limit = budget.limit_units or 0
    wanted = max(limit * HYSTERESIS_PERCENT // 100, burn_milli_gpu * HYSTERESIS_BURN_MS)
    return max(1, min(wanted, limit // 2))


def warned_percent(budget: Budget, *, used: int, allowed: int | None, remaining: int | None) -> int:
    """Return the highest threshold that was reached, 0 for none.

    A bucket has no use since a beginning: what is missing from its limit counts instead.
    """
    if allowed is None or remaining is None:
        return 0
    if budget.policy.type is PolicyType.BUCKET:
        allowed = budget.limit_units or 0
        used = allowed - remaining
    reached = [percent for percent in budget.warn_at if used * 100 >= allowed * percent]
    return max(reached, default=0)


def projected_ms(
    budget: Budget, window: BudgetWindow, remaining: int | None, burn: int, at_ms: int
) -> int | None:
    """Return when nothing will be left at the present burn; None: not in this window."""
    if remaining is None or remaining <= 0:
        return None if remaining is None else at_ms
    slope = burn * HOUR_MS
    if budget.policy.type is PolicyType.BUCKET:
        slope -= budget.policy.refill_units_per_hour
    if slope <= 0:
        return None
    at = at_ms + -(-remaining * HOUR_MS // slope)
    ends_ms = window.end_ms if window.end_ms is not None and _ends(budget) else LATEST_MS
    return at if at <= ends_ms else None


def _ends(budget: Budget) -> bool:
    return budget.policy.type is PolicyType.FIXED


def level_at(
    window: BudgetWindow, tenures: Iterable[ChargedLease], budget: Budget, at_ms: int
) -> int:
    """Return what a bucket holds at an instant, in units times HOUR_MS, so that nothing is rounded.

    Between two changes of what is held, the level moves in a straight line, and stops rising at the
    limit. What a grant put on top of the limit stays until it is used.
    """
    tenures = tuple(tenures)
    late = sum(accrued(each, window.level_ms) for each in tenures)
    level, now = window.level_scaled - late * HOUR_MS, window.level_ms
    moments = {at_ms} | {
        moment
        for each in tenures
        for moment in (each.since_ms, each.ended_ms)
        if moment is not None and now < moment < at_ms
    }
    full, refill = (budget.limit_units or 0) * HOUR_MS, budget.policy.refill_units_per_hour
    for moment in sorted(moments):
        length = max(0, moment - now)
        burn = burn_at(tenures, now) * HOUR_MS
        level = _moved(level, full, refill=refill * length, burnt=burn * length)
        now += length
    return level


def _moved(level: int, full: int, *, refill: int, burnt: int) -> int:
    """Move a level over a time in which nothing changes; above the limit nothing is refilled."""
    if level <= full:
        return min(full, level + refill - burnt)
    if level - burnt >= full:
        return level - burnt
    return min(full, level + refill - burnt - refill * (level - full) // burnt)

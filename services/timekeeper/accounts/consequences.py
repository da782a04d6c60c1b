"""What follows from the state of a budget for leases, new pods and running pods; pure."""

from dataclasses import dataclass

from shared.model.budgets.balance import OUT_OF_BUDGET, hysteresis_units
from shared.model.budgets.budget import (
    Balance,
    Budget,
    BudgetState,
    LeaseClass,
    OnExhausted,
)

LEASE_CLASSES = {
    BudgetState.OK: LeaseClass.GUARANTEED,
    BudgetState.WARNING: LeaseClass.GUARANTEED,
    BudgetState.EXHAUSTED: LeaseClass.RECLAIMABLE,
    BudgetState.OVERDRAWN: LeaseClass.EXPIRED,
    BudgetState.INVALID: LeaseClass.GUARANTEED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence:
    lease_class: LeaseClass
    new_pods: str
    """admit, queue or deny."""
    evict_after_minutes: int | None = None
    """None if leases do not end in this state."""


def consequence(budget: Budget, state: BudgetState) -> Consequence:
    new_pods = "queue" if state is BudgetState.INVALID else "admit"
    evict_after = None
    if state in OUT_OF_BUDGET:
        if budget.on_exhausted in {OnExhausted.QUEUE, OnExhausted.DENY}:
            new_pods = str(budget.on_exhausted)
        if budget.on_exhausted is OnExhausted.EVICT:
            evict_after = budget.grace_minutes
    if state is BudgetState.OVERDRAWN and budget.evict_on_debt:
        earliest = budget.debt_grace_minutes if evict_after is None else evict_after
        evict_after = min(budget.debt_grace_minutes, earliest)
    return Consequence(
        lease_class=LEASE_CLASSES[state], new_pods=new_pods, evict_after_minutes=evict_after
    )


def missing_units(current: Balance, budget: Budget) -> int:
    if current.state not in OUT_OF_BUDGET or current.remaining_units is None:
        return 0
    return hysteresis_units(budget, current.current_rate_milli_gpu) - current.remaining_units

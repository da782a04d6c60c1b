"""What is said of a budget, and when it is news. No clock, no store."""

from services.timekeeper.accounts.budget import consequence
from shared.model.budget import Account, Balance, Budget, StoredBudgetState
from shared.model.events.pod_events import BudgetChanged

MOST_UNITS = 2**63 - 1
"""What a message can hold: 150 thousand million GPU-minutes; more is told as so much."""


def differs(before: StoredBudgetState, after: StoredBudgetState) -> bool:
    """Return whether something has changed that others must hear of."""
    return (before.state, before.warned_percent) != (after.state, after.warned_percent)


def told(
    budget: Budget, account: Account, seen: Balance, *, previous: StoredBudgetState
) -> BudgetChanged:
    """Return the event that says how a budget stands."""
    follows = consequence(budget, seen.state)
    exhausted = seen.exhausted_at_ms
    return BudgetChanged(
        namespace=account.namespace,
        state=str(seen.state),
        previous=str(previous.state),
        lease_class=str(follows.lease_class),
        new_pods=follows.new_pods,
        evict_after_minutes=follows.evict_after_minutes,
        warned_percent=seen.warned_percent,
        share=budget.share,
        since=account.state.since_ms / 1000,
        at=seen.at_ms / 1000,
        window=seen.window.id,
        used_units=min(seen.used_units, MOST_UNITS),
        remaining_units=(
            None if seen.remaining_units is None else min(seen.remaining_units, MOST_UNITS)
        ),
        current_rate_milli_gpu=seen.current_rate_milli_gpu,
        exhausted_at=None if exhausted is None else exhausted / 1000,
    )

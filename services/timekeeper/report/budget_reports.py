"""Reports of a budget: its object's status, and its event; pure."""

import datetime
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from services.timekeeper.config.budget_spec import SPEC_IN_FORCE
from shared.model.balance import consequence
from shared.model.budget import (
    Account,
    Balance,
    Budget,
    BudgetState,
    StoredBudgetState,
    minutes,
)
from shared.model.events.pod_events import BudgetChanged

T = TypeVar("T")

MAX_UNITS = 2**63 - 1
"""The maximum in an event, 150 billion GPU-minutes; higher amounts are capped."""


def stamp(at_ms: int) -> str:
    """Return an instant in Kubernetes' format, to the second."""
    return datetime.datetime.fromtimestamp(at_ms // 1000, datetime.UTC).strftime(
        "%Y-%m-%dT%H:%M:%SZ"
    )


def optional(form: Callable[[int], T], value: int | None) -> T | None:
    """Return a value in a form, or None without one."""
    return None if value is None else form(value)


def budget_status(account: Account, current: Balance, *, spec: object = None) -> dict[str, object]:
    """Return the status; amounts are text, since JSON numbers lose integers above 2^53.

    `spec` is the object's spec that is in force. The condition `Valid` has what is wrong with the
    latest one.

    Fields that do not apply are null, so that a merge patch removes them.
    """
    window = current.window
    return {
        "state": str(current.state),
        "since": stamp(account.state.since_ms),
        "window": {"id": window.id, "start": window.start_ms, "end": window.end_ms},
        "usedUnits": str(current.used_units),
        "windowUsedUnits": str(current.window_used_units),
        "grantedUnits": str(window.granted_units),
        "rolloverUnits": str(window.rolled_units),
        "remainingUnits": optional(str, current.remaining_units),
        "usedGPUMinutes": minutes(current.used_units),
        "remainingGPUMinutes": optional(minutes, current.remaining_units),
        "currentRateMilliGPU": current.current_rate_milli_gpu,
        "leases": current.leases,
        "projectedExhaustion": optional(stamp, current.exhausted_at_ms),
        "checkpointAt": current.at_ms,
        "problem": current.problem or None,
        "conditions": [_valid_condition(current)],
        SPEC_IN_FORCE: spec,
    }


def _valid_condition(current: Balance) -> dict[str, object]:
    return {
        "type": "Valid",
        "status": "False" if current.problem else "True",
        "reason": "InvalidSpec" if current.problem else "SpecInForce",
        "message": current.problem or "the spec is in force",
        "lastTransitionTime": stamp(current.at_ms),
    }


def is_reportable_change(before: Account, after: Account) -> bool:
    """Return whether a change of state, or of what is wrong with the budget, is published."""
    return _reported(before) != _reported(after)


def _reported(account: Account) -> tuple[BudgetState, int, str]:
    problem = account.budget.problem if account.budget else ""
    return account.state.state, account.state.warned_percent, problem


def budget_changed(
    budget: Budget, account: Account, current: Balance, *, previous: StoredBudgetState
) -> BudgetChanged:
    """Return the event with a namespace's balance."""
    follows = consequence(budget, current.state)
    return BudgetChanged(
        namespace=account.namespace,
        state=str(current.state),
        previous_state=str(previous.state),
        lease_class=str(follows.lease_class),
        new_pods=follows.new_pods,
        evict_after_minutes=follows.evict_after_minutes,
        warned_percent=current.warned_percent,
        weight=budget.share,
        state_since=account.state.since_ms / 1000,
        reported_at=current.at_ms / 1000,
        window=current.window.id,
        used_units=min(current.used_units, MAX_UNITS),
        remaining_units=optional(partial(min, MAX_UNITS), current.remaining_units),
        current_rate_milli_gpu=current.current_rate_milli_gpu,
        exhausted_at=optional(lambda at_ms: at_ms / 1000, current.exhausted_at_ms),
    )

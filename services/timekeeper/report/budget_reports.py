"""How a budget is reported: its object's status, and its event; pure."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

from services.timekeeper.accounts.balance import consequence
from shared.model.budget import (
    HOUR_MS,
    UNITS_PER_GPU_MINUTE,
    Account,
    Balance,
    Budget,
    BudgetWindow,
    PolicyType,
    StoredBudgetState,
)
from shared.model.events.pod_events import BudgetChanged

MAX_UNITS = 2**63 - 1
"""The most that an event can hold, 150 thousand million GPU-minutes; more is capped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusCopy:
    """An account as its budget's status shows it; a lost account is restored from it."""

    window: BudgetWindow
    """The window that was open, with its usage and level."""
    at_ms: int


def minutes(units: int) -> str:
    """Return units as GPU-minutes with three decimals, rounded towards zero."""
    sign, thousandths = "-" if units < 0 else "", abs(units) * 1000 // UNITS_PER_GPU_MINUTE
    return f"{sign}{thousandths // 1000}.{thousandths % 1000:03d}"


def stamp(at_ms: int) -> str:
    """Return an instant in Kubernetes' format, to the second."""
    return datetime.datetime.fromtimestamp(at_ms // 1000, datetime.UTC).strftime(
        "%Y-%m-%dT%H:%M:%SZ"
    )


def budget_status(account: Account, current: Balance, *, problem: str = "") -> dict[str, object]:
    """Return the status; amounts are text, since JSON numbers lose integers above 2^53.

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
        "remainingUnits": _text(current.remaining_units),
        "usedGPUMinutes": minutes(current.used_units),
        "remainingGPUMinutes": (
            None if current.remaining_units is None else minutes(current.remaining_units)
        ),
        "currentRateMilliGPU": current.current_rate_milli_gpu,
        "leases": current.leases,
        "projectedExhaustion": (
            None if current.exhausted_at_ms is None else stamp(current.exhausted_at_ms)
        ),
        "checkpointAt": current.at_ms,
        "problem": problem or None,
    }


def parse_status(status: object, budget: Budget | None) -> StatusCopy | None:
    """Parse a status; None if there is none, or if it is invalid."""
    if not isinstance(status, Mapping) or budget is None or "checkpointAt" not in status:
        return None
    try:
        window, at_ms = status["window"], int(status["checkpointAt"])
        end, left = window.get("end"), status.get("remainingUnits")
        bucket = budget.policy.type is PolicyType.BUCKET
        return StatusCopy(
            at_ms=at_ms,
            window=BudgetWindow(
                id=str(window["id"]),
                start_ms=int(window["start"]),
                end_ms=None if end is None else int(end),
                limit_units=budget.limit_units,
                used_units=int(status["windowUsedUnits"]),
                granted_units=int(status["grantedUnits"]),
                rolled_units=int(status["rolloverUnits"]),
                level_scaled=int(left or 0) * HOUR_MS if bucket else 0,
                level_ms=at_ms if bucket else 0,
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _text(units: int | None) -> str | None:
    return None if units is None else str(units)


def is_reportable_change(before: StoredBudgetState, after: StoredBudgetState) -> bool:
    """Return whether a change of state must be published."""
    return (before.state, before.warned_percent) != (after.state, after.warned_percent)


def budget_changed(
    budget: Budget, account: Account, current: Balance, *, previous: StoredBudgetState
) -> BudgetChanged:
    """Return the event with a namespace's balance."""
    follows = consequence(budget, current.state)
    exhausted = current.exhausted_at_ms
    return BudgetChanged(
        namespace=account.namespace,
        state=str(current.state),
        previous=str(previous.state),
        lease_class=str(follows.lease_class),
        new_pods=follows.new_pods,
        evict_after_minutes=follows.evict_after_minutes,
        warned_percent=current.warned_percent,
        share=budget.share,
        since=account.state.since_ms / 1000,
        at=current.at_ms / 1000,
        window=current.window.id,
        used_units=min(current.used_units, MAX_UNITS),
        remaining_units=(
            None if current.remaining_units is None else min(current.remaining_units, MAX_UNITS)
        ),
        current_rate_milli_gpu=current.current_rate_milli_gpu,
        exhausted_at=None if exhausted is None else exhausted / 1000,
    )

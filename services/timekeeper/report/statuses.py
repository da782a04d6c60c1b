"""A budget's status: what its object shows, and what an account is opened from when it was lost."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.model.budget import (
    HOUR_MS,
    UNITS_PER_GPU_MINUTE,
    Account,
    Balance,
    Budget,
    BudgetWindow,
    PolicyType,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusCopy:
    """An account as its budget's status tells it."""

    window: BudgetWindow
    """The window that was open, with its use and its level."""
    at_ms: int


def minutes(units: int) -> str:
    """Write units as GPU-minutes, to the thousandth, towards zero."""
    sign, thousandths = "-" if units < 0 else "", abs(units) * 1000 // UNITS_PER_GPU_MINUTE
    return f"{sign}{thousandths // 1000}.{thousandths % 1000:03d}"


def stamp(at_ms: int) -> str:
    """Write an instant as Kubernetes does, to the second."""
    return datetime.datetime.fromtimestamp(at_ms // 1000, datetime.UTC).strftime(
        "%Y-%m-%dT%H:%M:%SZ"
    )


def status_of(account: Account, seen: Balance, *, problem: str = "") -> dict[str, Any]:
    """Return the status; amounts are text, since JSON numbers lose integers above 2^53.

    Fields that do not apply are null, so that a merge patch takes them away.
    """
    window = seen.window
    return {
        "state": str(seen.state),
        "since": stamp(account.state.since_ms),
        "window": {"id": window.id, "start": window.start_ms, "end": window.end_ms},
        "usedUnits": str(seen.used_units),
        "windowUsedUnits": str(seen.window_used_units),
        "grantedUnits": str(window.granted_units),
        "rolloverUnits": str(window.rolled_units),
        "remainingUnits": _text(seen.remaining_units),
        "usedGPUMinutes": minutes(seen.used_units),
        "remainingGPUMinutes": (
            None if seen.remaining_units is None else minutes(seen.remaining_units)
        ),
        "burnMilliGPU": seen.current_rate_milli_gpu,
        "leases": seen.leases,
        "projectedExhaustion": (
            None if seen.exhausted_at_ms is None else stamp(seen.exhausted_at_ms)
        ),
        "checkpointAt": seen.at_ms,
        "problem": problem or None,
    }


def read_status(status: Any, budget: Budget | None) -> StatusCopy | None:
    """Read a status back; None if there is none, or it is of another making."""
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

"""Budgets as the REST interface shows them; pure."""

from services.timekeeper.accounts.balance import OUT_OF_BUDGET, consequence
from services.timekeeper.report.budget_reports import minutes, stamp
from shared.model.budget import UNITS_PER_GPU_MINUTE, Balance, Budget

Json = dict[str, object]


def budget_json(balance: Balance, budget: Budget) -> Json:
    """Return a balance as /v1 shows it: units and minutes as text, exactly."""
    follows = consequence(budget, balance.state)
    window = balance.window
    return {
        "namespace": balance.namespace,
        "state": str(balance.state),
        "leaseClass": str(follows.lease_class),
        "newPods": follows.new_pods,
        "window": {"id": window.id, "start": window.start_ms, "end": window.end_ms},
        "usedUnits": str(balance.used_units),
        "usedGPUMinutes": minutes(balance.used_units),
        "allowedGPUMinutes": _minutes(balance.allowed_units),
        "remainingGPUMinutes": _minutes(balance.remaining_units),
        "currentRateMilliGPU": balance.current_rate_milli_gpu,
        "leases": balance.leases,
        "projectedExhaustion": _stamp(balance.exhausted_at_ms),
        "problem": balance.problem or None,
        "asOf": stamp(balance.at_ms),
    }


def proof_of_concept_json(balance: Balance) -> Json:
    """Return a balance as the proof of concept showed it, and more fields."""
    remaining = balance.remaining_units
    return {
        "budget_available": balance.state not in OUT_OF_BUDGET,
        "budget": _number(balance.allowed_units),
        "budget_remaining": _number(None if remaining is None else max(0, remaining)),
        "state": str(balance.state),
        "window": balance.window.id,
        "resetAt": _stamp(balance.window.end_ms),
        "currentRateMilliGPU": balance.current_rate_milli_gpu,
    }


def _minutes(units: int | None) -> str | None:
    return None if units is None else minutes(units)


def _number(units: int | None) -> float | None:
    return None if units is None else units / UNITS_PER_GPU_MINUTE


def _stamp(at_ms: int | None) -> str | None:
    return None if at_ms is None else stamp(at_ms)

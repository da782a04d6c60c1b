"""Reports of budgets and quotas: the status of their objects, and events; pure."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from msgspec import Struct, field

from services.timekeeper.accounts.accrual import MOST_UNITS
from services.timekeeper.accounts.consequences import consequence
from services.timekeeper.config.budget_spec import LAST_VALID, BudgetStatus, WindowStatus
from shared.kubernetes.kinds.custom_kinds import LatestSpecs, ObjectStatus, conditions_of
from shared.kubernetes.kinds.gpu_quotas import NOTHING
from shared.kubernetes.types import RawObject
from shared.model.budgets.budget import (
    Account,
    Balance,
    Budget,
    BudgetState,
    StoredBudgetState,
    amount,
)
from shared.model.budgets.quota import Quota, QuotaTotals, QuotaUsage
from shared.model.events.pod_events import BudgetChanged
from shared.model.names import Namespace
from shared.model.quantity import timestamp

T = TypeVar("T")

NOTHING_NEW = "no new pod is allowed until it is valid"


def optional(form: Callable[[int], T], value: int | None) -> T | None:
    return None if value is None else form(value)


def budget_status(
    account: Account, current: Balance, item: RawObject, spec: object
) -> BudgetStatus:
    window = current.window
    reason = "InvalidSpec" if current.problem else "SpecInForce"
    return BudgetStatus(
        observed_generation=item.metadata.generation,
        conditions=conditions_of(
            item, current.problem, reason=reason, at=timestamp(current.at_ms // 1000)
        ),
        spec_in_force=spec,
        state=str(current.state),
        since=timestamp(account.state.since_ms // 1000),
        window=WindowStatus(id=window.id, start=window.start_ms, end=window.end_ms),
        used_units=str(current.used_units),
        window_used_units=str(current.window_used_units),
        granted_units=str(window.granted_units),
        rollover_units=str(window.rolled_units),
        remaining_units=optional(str, current.remaining_units),
        used_minutes=amount(current.used_units, current.currency),
        remaining_minutes=optional(
            lambda units: amount(units, current.currency), current.remaining_units
        ),
        current_rate=current.current_rate_milli_gpu,
        leases=current.leases,
        projected_exhaustion=optional(
            lambda at_ms: timestamp(at_ms // 1000), current.exhausted_at_ms
        ),
        checkpoint_at=current.at_ms,
    )


class QuotaUsed(Struct, frozen=True, rename="camel"):
    """What leases hold of a quota."""

    milli_gpu: int = field(name="milliGPU")
    core_percent: int
    memory: str
    cards: int


class QuotaStatus(ObjectStatus, frozen=True, kw_only=True):
    """The status of a GPUQuota."""

    used: QuotaUsed | None = None


def quota_status(
    name: Namespace, latest: LatestSpecs[Quota], totals: QuotaTotals, *, at: str
) -> QuotaStatus:
    """What the ledger enforces is in force."""
    item = latest.items[name]
    stored = totals.quotas.get(name)
    usage = totals.used.get(name, {}).get("", QuotaUsage())
    in_force = stored is not None and latest.valid.get(name) == stored
    reason = "SpecInForce"
    fault = ""
    if problem := latest.problems.get(name):
        nothing = stored is None or stored.limits == NOTHING
        reason = "InvalidSpec"
        fault = f"{problem}; {NOTHING_NEW if nothing else LAST_VALID}"
    elif not in_force:
        reason = "Pending"
        fault = "no watcher and binder have put it in force yet"
    return QuotaStatus(
        observed_generation=item.metadata.generation,
        conditions=conditions_of(item, fault, reason=reason, at=at),
        spec_in_force=latest.specs[name] if in_force else None,
        used=QuotaUsed(
            milli_gpu=usage.milli_gpu,
            core_percent=usage.cores_milli // 10,
            memory=f"{usage.memory_mib}Mi",
            cards=len(usage.devices),
        ),
    )


def is_reportable_change(before: Account, after: Account) -> bool:
    return _reported(before) != _reported(after)


def _reported(account: Account) -> tuple[BudgetState, int, str]:
    problem = account.budget.problem if account.budget else ""
    return account.state.state, account.state.warned_percent, problem


def budget_changed(
    budget: Budget, account: Account, current: Balance, *, previous: StoredBudgetState
) -> BudgetChanged:
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
        used_units=min(current.used_units, MOST_UNITS),
        remaining_units=optional(partial(min, MOST_UNITS), current.remaining_units),
        current_rate_milli_gpu=current.current_rate_milli_gpu,
        exhausted_at=optional(lambda at_ms: at_ms / 1000, current.exhausted_at_ms),
        currency=current.currency,
    )

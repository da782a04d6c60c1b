"""Rules of preemption for the planner's plans and the binder's evictions; pure.

A namespace with budget left preempts leases of namespaces without. A pod of higher priority
preempts lower ones, unless their namespace has a better lease class.
"""

from collections.abc import Collection
from dataclasses import dataclass

from shared.model.events.pod_events import BudgetChanged
from shared.model.leases.preemption import Preemption, PreemptionCause, PreemptionState, Victim
from shared.model.names import Namespace, PodUid
from shared.model.quantity import MINUTE_S

LEASE_CLASSES = {"guaranteed": 0, "reclaimable": 1, "expired": 2}
_CAUSES = {1: PreemptionCause.RECLAIMABLE, 2: PreemptionCause.EXPIRED}
SLACK_S = 30.0
"""How much longer than notice and grace period a preemption may last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPod:
    pod: PodUid
    namespace: Namespace
    priority: int
    preempts: bool = True


def lease_class(budget: BudgetChanged | None) -> int:
    """0 is the best class, which an unknown budget has, too."""
    return LEASE_CLASSES.get(budget.lease_class, 0) if budget else 0


def cause_for(
    pending: PendingPod, theirs: BudgetChanged | None, own: BudgetChanged | None, priority: int
) -> PreemptionCause | None:
    """`theirs` is the budget of the lease's namespace."""
    own_class = lease_class(own)
    their_class = lease_class(theirs)
    if own_class == 0 and their_class > 0:
        return _CAUSES[their_class]
    if pending.preempts and priority < pending.priority and their_class >= own_class:
        return PreemptionCause.PRIORITY
    return None


def ends_by_policy(budget: BudgetChanged, now: float) -> bool:
    minutes = budget.evict_after_minutes
    return minutes is not None and now >= budget.state_since + minutes * MINUTE_S


def may_still_evict(
    victim: Victim, pending: PendingPod | None, state: PreemptionState, now: float
) -> bool:
    if victim.cause is PreemptionCause.VIOLATION:
        return True
    theirs = state.budget_of(victim.namespace)
    if pending is None:
        return theirs is not None and ends_by_policy(theirs, now)
    own = state.budget_of(pending.namespace)
    return cause_for(pending, theirs, own, victim.priority) is not None


def pending_pod_of(preemption: Preemption) -> PendingPod | None:
    if not preemption.wanted:
        return None
    return PendingPod(
        pod=preemption.pods[0],
        namespace=preemption.preemptor_namespace,
        priority=preemption.priority,
        preempts=preemption.preempts,
    )


def expiry(victims: Collection[Victim], notice_s: float, now: float) -> float:
    return now + notice_s + max((victim.grace_s for victim in victims), default=0.0) + SLACK_S

"""The next step of a planned preemption, and what its pods' Events say; pure."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from services.binder.report.explanations import KubernetesEvent, event_of
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.ledger import WaitingPod
from shared.model.leases.preemption import (
    EvictionOutcome,
    EvictionRecord,
    Preemption,
    PreemptionCause,
    PreemptionStage,
    PreemptionState,
    StoredPreemption,
    Victim,
)
from shared.model.names import Namespace, PodUid, name_in
from shared.model.quantity import timestamp
from shared.placing.preemption_rules import may_still_evict, pending_pod_of

BUDGET = "GPUBudgetPreempt"
PRIORITY = "GPUPriorityPreempt"
VIOLATION = "GPUViolationEvict"
REASONS = {PreemptionCause.PRIORITY: PRIORITY, PreemptionCause.VIOLATION: VIOLATION}
"""Of Events; all other causes concern budgets."""


class Step(StrEnum):
    ANNOUNCE = "announce"
    """Check by a dry run whether all victims may be evicted, and announce it to them."""
    WAIT = "wait"
    EVICT = "evict"
    OFFER = "offer"
    """Offer the freed devices to kube-scheduler."""
    RESERVE = "reserve"
    """Reserve the freed devices for the pending pod."""
    BIND = "bind"
    """Publish the placement of the pending pod."""
    CLOSE = "close"
    CANCEL = "cancel"
    """Victims that were not evicted stay, and the devices are free for all pods again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPreemption:
    waiting: WaitingPod | None
    """The pending pod, if it waits."""
    lease: Lease | None
    """Of the pending pod."""
    leased_victims: Collection[PodUid]


def next_step(
    read: StoredPreemption, observed: ObservedPreemption, state: PreemptionState, now: float
) -> tuple[Step, str]:
    """Return the next step, and the reason if it is to cancel.

    For example, a pending pod that was deleted cancels the preemption, and its victims stay.
    """
    preemption = read.preemption
    lease = observed.lease
    has_lease = preemption.wanted is not None and lease is not None
    reserved = lease is not None and lease.state is LeaseState.RESERVED
    handed = preemption.stage is PreemptionStage.HANDED
    reason = ""
    if not handed:
        reason = preemption.cancelled or _cancel_reason(read, observed, state, now)
    announced = preemption.stage is PreemptionStage.ANNOUNCED
    table = (
        (has_lease and bool(preemption.left), Step.CANCEL),
        (has_lease and reserved, Step.BIND),
        (has_lease or handed, Step.CLOSE),
        (bool(reason), Step.CANCEL),
        (preemption.stage is PreemptionStage.OPENED, Step.ANNOUNCE),
        (announced and now < preemption.evict_at, Step.WAIT),
        (bool(preemption.left), Step.EVICT),
        (preemption.wanted is None, Step.CLOSE),
        (bool(observed.leased_victims), Step.WAIT),
        (preemption.by_kube_scheduler, Step.OFFER),
        (True, Step.RESERVE),
    )
    return next((step, reason) for applies, step in table if applies)


def _cancel_reason(
    read: StoredPreemption, observed: ObservedPreemption, state: PreemptionState, now: float
) -> str:
    """Return why a preemption has become pointless, or an empty text if it has not."""
    preemption = read.preemption
    pending = pending_pod_of(read.preemption)
    if pending is not None and observed.lease is not None:
        return "the pending pod was placed elsewhere"
    if pending is not None and not observed.waiting:
        return "the pending pod is gone"
    if pending is not None and not read.claimed:
        return "the state in Redis was rebuilt meanwhile"
    if now >= preemption.expires_at:
        return "it took too long"
    if not all(may_still_evict(victim, pending, state, now) for victim in preemption.left):
        return "a pod that would be evicted may not be evicted any more"
    return ""


def victim_event(
    victim: Victim, preemption: Preemption, at: float | None = None
) -> KubernetesEvent:
    """Without a time, the victim was evicted."""
    what = "evicted" if at is None else f"will be evicted at {timestamp(at)}"
    return _victim_event(victim, f"{what}: {_cause(victim, preemption)}")


def beneficiary_event(preemption: Preemption) -> KubernetesEvent:
    victims = preemption.victims
    reader = preemption.wanted.namespace if preemption.wanted else Namespace("")
    named = dict.fromkeys(name_in(reader, pod.namespace, pod.name) for pod in victims)
    pods = "1 pod is" if len(victims) == 1 else f"{len(victims)} pods are"
    at = timestamp(preemption.evict_at)
    text = f"{pods} evicted for it on {victims[0].node} at {at}: {', '.join(named)}"
    return _pending_event(preemption, text, warning=False)


def cancelled_events(
    preemption: Preemption, reason: str, blocked: Victim | None = None
) -> list[KubernetesEvent]:
    """Return the Events of all pods concerned; why one is blocked reads its own namespace only."""

    def why(reader: Namespace) -> str:
        if blocked is None:
            return reason
        name = name_in(reader, blocked.namespace, blocked.name)
        return f"{name}: {reason if blocked.namespace == reader else 'it cannot be evicted'}"

    events = [
        _victim_event(victim, f"not evicted after all: {why(victim.namespace)}", warning=False)
        for victim in preemption.left
    ]
    if preemption.wanted is not None:
        text = f"no pod is evicted for it: {why(preemption.wanted.namespace)}"
        events.append(_pending_event(preemption, text, warning=True))
    return events


def eviction_record(
    victim: Victim,
    preemption: Preemption,
    outcome: EvictionOutcome,
    now: float,
    *,
    event: KubernetesEvent | None = None,
) -> EvictionRecord:
    """Return the journal's record of an eviction; of one that was done with its Event."""
    wanted = preemption.wanted
    return EvictionRecord(
        at=now,
        preemption=preemption.id,
        pod=victim.pod,
        namespace=victim.namespace,
        name=victim.name,
        node=victim.node,
        owner=victim.owner,
        cause=victim.cause,
        budget=victim.budget,
        devices=victim.devices,
        outcome=outcome,
        for_pod=wanted.pod if wanted else "",
        for_namespace=wanted.namespace if wanted else "",
        for_name=wanted.name if wanted else "",
        event=f"{event.namespace}/{event.event_name}" if event else "",
    )


def _cause(victim: Victim, preemption: Preemption) -> str:
    wanted = preemption.wanted
    if victim.cause is PreemptionCause.VIOLATION:
        return f"its node reports {preemption.reason}"
    budget = f"the GPU budget of namespace {victim.namespace} is {victim.budget}"
    if wanted is None:
        return f"{budget}, and its policy is to evict"
    pod = name_in(victim.namespace, wanted.namespace, wanted.name)
    if victim.cause is PreemptionCause.PRIORITY:
        return (
            f"{pod} of priority {preemption.priority} needs its share; its own priority is "
            f"{victim.priority}"
        )
    return f"{budget}, and {pod}, whose namespace has budget left, needs its share"


def _victim_event(victim: Victim, text: str, *, warning: bool = True) -> KubernetesEvent:
    return event_of(victim, REASONS.get(victim.cause, BUDGET), text, warning=warning)


def _pending_event(preemption: Preemption, text: str, *, warning: bool) -> KubernetesEvent:
    if preemption.wanted is None:
        raise ValueError(f"preemption {preemption.id} is for no pod")
    by_priority = all(victim.cause is PreemptionCause.PRIORITY for victim in preemption.victims)
    reason = PRIORITY if by_priority else BUDGET
    return event_of(preemption.wanted, reason, text, warning=warning)

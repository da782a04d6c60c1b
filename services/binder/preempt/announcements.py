"""Events and journal records of a preemption; pure."""

from services.binder.observations import stamp
from services.binder.report.explanations import KubernetesEvent, event_of
from shared.model.preemption import (
    EvictionOutcome,
    EvictionRecord,
    Preemption,
    PreemptionCause,
    Victim,
)

BUDGET = "GPUBudgetPreempt"
PRIORITY = "GPUPriorityPreempt"
VIOLATION = "GPUViolationEvict"
REASONS = {PreemptionCause.PRIORITY: PRIORITY, PreemptionCause.VIOLATION: VIOLATION}
"""Of Events; all other causes concern budgets."""


def announced_event(victim: Victim, preemption: Preemption, at: float) -> KubernetesEvent:
    """Return the Event of a victim that will be evicted."""
    return _victim_event(victim, f"will be evicted at {stamp(at)}: {_cause(victim, preemption)}")


def evicted_event(victim: Victim, preemption: Preemption) -> KubernetesEvent:
    """Return the Event of a victim that was evicted."""
    return _victim_event(victim, f"evicted: {_cause(victim, preemption)}")


def beneficiary_event(preemption: Preemption) -> KubernetesEvent:
    """Return the Event of the pending pod, with the pods that are evicted for it, and when."""
    victims = preemption.victims
    names = ", ".join(f"{victim.namespace}/{victim.name}" for victim in victims)
    pods = "1 pod is" if len(victims) == 1 else f"{len(victims)} pods are"
    at = stamp(preemption.evict_at)
    text = f"{pods} evicted for it on {victims[0].node} at {at}: {names}"
    return _pending_event(preemption, text, warning=False)


def cancelled_events(preemption: Preemption, reason: str) -> list[KubernetesEvent]:
    """Return the Events of all pods concerned: no more pods are evicted."""
    events = [
        _victim_event(victim, f"not evicted after all: {reason}", warning=False)
        for victim in preemption.left
    ]
    if preemption.wanted is not None:
        text = f"no pod is evicted for it: {reason}"
        events.append(_pending_event(preemption, text, warning=True))
    return events


def eviction_record(
    victim: Victim,
    preemption: Preemption,
    outcome: EvictionOutcome,
    event: KubernetesEvent,
    now: float,
) -> EvictionRecord:
    """Return the journal's record of an eviction."""
    wanted = preemption.wanted
    evicted = outcome is EvictionOutcome.EVICTED
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
        event=f"{event.namespace}/{event.event_name}" if evicted else "",
    )


def _cause(victim: Victim, preemption: Preemption) -> str:
    wanted = preemption.wanted
    if victim.cause is PreemptionCause.VIOLATION:
        return f"its node reports {preemption.reason}"
    budget = f"the GPU budget of namespace {victim.namespace} is {victim.budget}"
    if wanted is None:
        return f"{budget}, and its policy is to evict"
    pod = f"pod {wanted.namespace}/{wanted.name}"
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

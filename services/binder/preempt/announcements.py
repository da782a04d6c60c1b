"""What pods' owners and the journal are told about preemption."""

from services.binder.report.explanations import KubernetesEvent, cut, stamp
from shared.model.names import PodUid
from shared.model.preemption import (
    EvictionOutcome,
    EvictionRecord,
    Preemption,
    PreemptionCause,
    Victim,
)

RECLAIM = "GPUBudgetPreempt"
PREEMPT = "GPUPriorityPreempt"
VIOLATION = "GPUViolationEvict"
REASONS = {PreemptionCause.PRIORITY: PREEMPT, PreemptionCause.VIOLATION: VIOLATION}
"""Of Events; all other causes are a matter of budgets."""


def announced(victim: Victim, preemption: Preemption, at: float) -> KubernetesEvent:
    """Tell a pod that it will be evicted."""
    text = f"will be evicted at {stamp(at)}: {_why(victim, preemption)}"
    return _note(victim, text)


def evicted(victim: Victim, preemption: Preemption) -> KubernetesEvent:
    """Tell a pod that it was evicted."""
    return _note(victim, f"evicted: {_why(victim, preemption)}")


def makes_room(preemption: Preemption) -> KubernetesEvent:
    """Tell the pod in need who makes room for it, and when."""
    names = ", ".join(f"{each.namespace}/{each.name}" for each in preemption.victims)
    count = len(preemption.victims)
    pods = "1 pod is" if count == 1 else f"{count} pods are"
    at = stamp(preemption.evict_at)
    text = f"{pods} evicted for it on {preemption.victims[0].node} at {at}: {names}"
    return _for_need(preemption, text, warning=False)


def called_off(preemption: Preemption, why: str) -> list[KubernetesEvent]:
    """Tell everybody concerned that nobody else is evicted."""
    found = [
        _note(victim, f"not evicted after all: {why}", warning=False) for victim in preemption.left
    ]
    if preemption.wanted is not None:
        found.append(_for_need(preemption, f"no room is made for it: {why}", warning=True))
    return found


def record_of(
    victim: Victim,
    preemption: Preemption,
    outcome: EvictionOutcome,
    note: KubernetesEvent,
    now: float,
) -> EvictionRecord:
    """Return the line of the journal about an eviction."""
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
        event=f"{note.namespace}/{note.event_name}" if outcome is EvictionOutcome.EVICTED else "",
    )


def _why(victim: Victim, preemption: Preemption) -> str:
    wanted = preemption.wanted
    if victim.cause is PreemptionCause.VIOLATION:
        return f"its node reports {preemption.reason}"
    if wanted is None:
        return f"the GPU budget of namespace {victim.namespace} is {victim.budget}, and says so"
    pod = f"pod {wanted.namespace}/{wanted.name}"
    if victim.cause is PreemptionCause.PRIORITY:
        return (
            f"{pod} of priority {preemption.priority} needs its share; its own is {victim.priority}"
        )
    return (
        f"the GPU budget of namespace {victim.namespace} is {victim.budget}, and {pod}, whose "
        "namespace has budget left, needs its share"
    )


def _note(victim: Victim, text: str, *, warning: bool = True) -> KubernetesEvent:
    return KubernetesEvent(
        pod=victim.pod,
        namespace=victim.namespace,
        name=victim.name,
        reason=REASONS.get(victim.cause, RECLAIM),
        message=cut(text),
        warning=warning,
    )


def _for_need(preemption: Preemption, text: str, *, warning: bool) -> KubernetesEvent:
    wanted = preemption.wanted
    if wanted is None:
        raise ValueError(f"preemption {preemption.id} is for no pod")
    by_priority = all(victim.cause is PreemptionCause.PRIORITY for victim in preemption.victims)
    return KubernetesEvent(
        pod=PodUid(wanted.pod),
        namespace=wanted.namespace,
        name=wanted.name,
        reason=PREEMPT if by_priority else RECLAIM,
        message=cut(text),
        warning=warning,
    )

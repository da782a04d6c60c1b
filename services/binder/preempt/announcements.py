"""What pods' owners and the journal are told about taking back."""

from services.binder.report.explanations import Note, cut, stamp
from shared.model.names import PodUid
from shared.model.preemption import (
    EvictionOutcome,
    EvictionRecord,
    Preemption,
    PreemptionCause,
    Victim,
)

RECLAIM = "GPUBudgetReclaim"
PREEMPT = "GPUPriorityPreempt"
VIOLATION = "GPUViolationEvict"
REASONS = {PreemptionCause.PRIORITY: PREEMPT, PreemptionCause.VIOLATION: VIOLATION}
"""Of Events; all other causes are a matter of budgets."""


def announced(victim: Victim, taking: Preemption, at: float) -> Note:
    """Tell a pod that it will be evicted."""
    text = f"will be evicted at {stamp(at)}: {_why(victim, taking)}"
    return _note(victim, text)


def evicted(victim: Victim, taking: Preemption) -> Note:
    """Tell a pod that it was evicted."""
    return _note(victim, f"evicted: {_why(victim, taking)}")


def makes_room(taking: Preemption) -> Note:
    """Tell the pod in need who makes room for it, and when."""
    names = ", ".join(f"{each.namespace}/{each.name}" for each in taking.victims)
    count = len(taking.victims)
    pods = "1 pod is" if count == 1 else f"{count} pods are"
    text = f"{pods} evicted for it on {taking.victims[0].node} at {stamp(taking.evict_at)}: {names}"
    return _for_need(taking, text, warning=False)


def called_off(taking: Preemption, why: str) -> list[Note]:
    """Tell everybody concerned that nobody else is evicted."""
    found = [
        _note(victim, f"not evicted after all: {why}", warning=False) for victim in taking.left
    ]
    if taking.wanted is not None:
        found.append(_for_need(taking, f"no room is made for it: {why}", warning=True))
    return found


def line_of(
    victim: Victim, taking: Preemption, outcome: EvictionOutcome, note: Note, now: float
) -> EvictionRecord:
    """Return the line of the journal about an eviction."""
    wanted = taking.wanted
    return EvictionRecord(
        at=now,
        preemption=taking.id,
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


def _why(victim: Victim, taking: Preemption) -> str:
    wanted = taking.wanted
    if victim.cause is PreemptionCause.VIOLATION:
        return f"its node reports {taking.reason}"
    if wanted is None:
        return f"the GPU budget of namespace {victim.namespace} is {victim.budget}, and says so"
    pod = f"pod {wanted.namespace}/{wanted.name}"
    if victim.cause is PreemptionCause.PRIORITY:
        return f"{pod} of priority {taking.priority} needs its share; its own is {victim.priority}"
    return (
        f"the GPU budget of namespace {victim.namespace} is {victim.budget}, and {pod}, whose "
        "namespace has budget left, needs its share"
    )


def _note(victim: Victim, text: str, *, warning: bool = True) -> Note:
    return Note(
        pod=victim.pod,
        namespace=victim.namespace,
        name=victim.name,
        reason=REASONS.get(victim.cause, RECLAIM),
        message=cut(text),
        warning=warning,
    )


def _for_need(taking: Preemption, text: str, *, warning: bool) -> Note:
    wanted = taking.wanted
    if wanted is None:
        raise ValueError(f"taking {taking.id} is for no pod")
    by_priority = all(victim.cause is PreemptionCause.PRIORITY for victim in taking.victims)
    return Note(
        pod=PodUid(wanted.pod),
        namespace=wanted.namespace,
        name=wanted.name,
        reason=PREEMPT if by_priority else RECLAIM,
        message=cut(text),
        warning=warning,
    )

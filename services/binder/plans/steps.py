"""The next step of a planned preemption, and what its pods' Events say; pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.binder.report.explanations import KubernetesEvent, event_of
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.ledger import WaitingPod
from shared.model.leases.preemption import (
    MOST_START_EVENTS,
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
"""All other causes concern budgets."""
LATE_S = 30.0
"""So long after the time of an announced eviction, it is announced anew: no binder was there, or
Redis has an older plan, whose announcement was withdrawn."""
LOST = "the state in Redis was rebuilt meanwhile"
GIVEN_BACK = "what was reserved for its ResourceClaim was allocated, and given back"
MOST_NAMED = 8


class Step(StrEnum):
    ANNOUNCE = "announce"
    """Check by a dry run that all victims may be evicted, and announce it to them."""
    WAIT = "wait"
    EVICT = "evict"
    OFFER = "offer"
    """Offer the freed devices to kube-scheduler."""
    RESERVE = "reserve"
    BIND = "bind"
    CLOSE = "close"
    CANCEL = "cancel"
    """The devices are free for all pods again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPreemption:
    waiting: Sequence[WaitingPod]
    leases: Sequence[Lease]
    gone: Collection[PodUid] = ()
    leased_victims: Collection[PodUid] = ()
    """None are read while some are left to evict."""


def next_step(
    read: StoredPreemption, observed: ObservedPreemption, state: PreemptionState, now: float
) -> tuple[Step, str]:
    """Return the reason only of CANCEL."""
    preemption = read.preemption
    has_lease = bool(observed.leases)
    reserved = any(lease.state is LeaseState.RESERVED for lease in observed.leases)
    handed = preemption.stage is PreemptionStage.HANDED
    reason = ""
    if not handed:
        reason = preemption.cancelled or _cancel_reason(read, observed, state, now)
    announced = preemption.stage is PreemptionStage.ANNOUNCED
    table = (
        (has_lease and bool(preemption.left), Step.CANCEL),
        # kube-scheduler binds the pod of a claim, once it has written the claim's allocation.
        (has_lease and reserved and preemption.claiming is not None, Step.WAIT),
        (has_lease and reserved, Step.BIND),
        (has_lease or handed, Step.CLOSE),
        (bool(reason), Step.CANCEL),
        # A placer decides again about pods that do not wait: they wait again soon.
        (len(observed.waiting) < len(preemption.wanted), Step.WAIT),
        (preemption.stage is PreemptionStage.OPENED, Step.ANNOUNCE),
        (announced and now < preemption.evict_at, Step.WAIT),
        (announced and now >= preemption.evict_at + LATE_S, Step.ANNOUNCE),
        (bool(preemption.left), Step.EVICT),
        (not preemption.wanted, Step.CLOSE),
        (bool(observed.leased_victims), Step.WAIT),
        (preemption.by_kube_scheduler, Step.OFFER),
        (True, Step.RESERVE),
    )
    return next((step, reason) for applies, step in table if applies)


def _cancel_reason(
    read: StoredPreemption, observed: ObservedPreemption, state: PreemptionState, now: float
) -> str:
    preemption = read.preemption
    pending = pending_pod_of(read.preemption)
    if observed.leases:
        return _of_gang(preemption, "the pending pod was placed elsewhere")
    if observed.gone:
        return _of_gang(preemption, "the pending pod is gone")
    if pending is not None and not read.claimed:
        return LOST if preemption.claiming is None else GIVEN_BACK
    if now >= preemption.expires_at:
        return "it took too long"
    if not all(may_still_evict(victim, pending, state, now) for victim in preemption.left):
        return "a pod that would be evicted may not be evicted any more"
    return ""


def _of_gang(preemption: Preemption, text: str) -> str:
    return text if preemption.gang is None else text.replace("the pending pod", "a pod of the gang")


def victim_event(
    victim: Victim, preemption: Preemption, at: float | None = None
) -> KubernetesEvent:
    """Without a time, the victim was evicted."""
    what = "evicted" if at is None else f"will be evicted at {timestamp(at)}"
    return _victim_event(victim, f"{what}: {_cause(victim, preemption)}")


def beneficiary_events(preemption: Preemption) -> list[KubernetesEvent]:
    victims = preemption.victims
    reader = preemption.preemptor_namespace
    named = list(dict.fromkeys(name_in(reader, pod.namespace, pod.name) for pod in victims))
    more = f", and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    pods = "1 pod is" if len(victims) == 1 else f"{len(victims)} pods are"
    nodes = {victim.node for victim in victims}
    where = victims[0].node if len(nodes) == 1 else f"{len(nodes)} nodes"
    whom = "its gang" if preemption.gang is not None else "it"
    at = timestamp(preemption.evict_at)
    text = f"{pods} evicted for {whom} on {where} at {at}: {', '.join(named[:MOST_NAMED])}{more}"
    return _pending_events(preemption, text, warning=False)


def cancelled_events(
    preemption: Preemption, reason: str, blocked: Victim | None = None
) -> list[KubernetesEvent]:
    """Why a pod is blocked is shown in its own namespace only."""

    def why(reader: Namespace) -> str:
        if blocked is None:
            return reason
        name = name_in(reader, blocked.namespace, blocked.name)
        return f"{name}: {reason if blocked.namespace == reader else 'it cannot be evicted'}"

    events = [
        _victim_event(victim, f"not evicted after all: {why(victim.namespace)}", warning=False)
        for victim in preemption.left
    ]
    if preemption.wanted:
        text = f"no pod is evicted for it: {why(preemption.preemptor_namespace)}"
        events += _pending_events(preemption, text, warning=True)
    return events


def eviction_record(
    victim: Victim,
    preemption: Preemption,
    outcome: EvictionOutcome,
    now: float,
    *,
    event: KubernetesEvent | None = None,
) -> EvictionRecord:
    is_for_pod = bool(preemption.wanted) and preemption.gang is None
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
        for_pod=preemption.pods[0] if is_for_pod else "",
        for_namespace=preemption.preemptor_namespace,
        for_name=preemption.preemptor_name,
        event=f"{event.namespace}/{event.event_name}" if event else "",
    )


def _cause(victim: Victim, preemption: Preemption) -> str:
    if victim.cause is PreemptionCause.VIOLATION:
        return f"its node reports {preemption.reason}"
    budget = f"the GPU budget of namespace {victim.namespace} is {victim.budget}"
    if not preemption.wanted:
        return f"{budget}, and its policy is to evict"
    pod = _preemptor(preemption, victim.namespace)
    if victim.cause is PreemptionCause.PRIORITY:
        return (
            f"{pod} of priority {preemption.priority} needs its share; its own priority is "
            f"{victim.priority}"
        )
    return f"{budget}, and {pod}, whose namespace has budget left, needs its share"


def _preemptor(preemption: Preemption, reader: Namespace) -> str:
    namespace = preemption.preemptor_namespace
    if preemption.gang is None:
        return name_in(reader, namespace, preemption.preemptor_name)
    return preemption.preemptor_name if namespace == reader else "a gang of another namespace"


def _victim_event(victim: Victim, text: str, *, warning: bool = True) -> KubernetesEvent:
    return event_of(victim, REASONS.get(victim.cause, BUDGET), text, warning=warning)


def _pending_events(preemption: Preemption, text: str, *, warning: bool) -> list[KubernetesEvent]:
    by_priority = all(victim.cause is PreemptionCause.PRIORITY for victim in preemption.victims)
    reason = PRIORITY if by_priority else BUDGET
    shown_to = preemption.preemptors[:MOST_START_EVENTS]
    return [event_of(pod, reason, text, warning=warning) for pod in shown_to]

"""Rules of preemption: for which pods, which leases, how often, and what the next step is; pure.

A pod of a namespace with budget left may preempt leases of namespaces without. A pod of higher
priority may preempt those of lower priority, unless their namespace is in a better lease class. All
limits come from the journal of evictions, so every replica finds the same.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from services.binder.report.explanations import KubernetesEvent, event_of
from shared.model.events.node_events import ViolationFound
from shared.model.events.pod_events import BudgetChanged
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
from shared.model.names import Namespace, NodeName, PodUid, name_in
from shared.model.quantity import timestamp
from shared.pods.pod_snapshot import PodSnapshot

HOUR_S = 3600.0
MINUTE_S = 60.0
MAX_COOLDOWN_S = 8 * HOUR_S
MIN_USEFUL_S = 300.0
"""Nothing is preempted for a pod whose own budget is exhausted sooner."""
LEASE_CLASSES = {"guaranteed": 0, "reclaimable": 1, "expired": 2}
_CAUSES = {1: PreemptionCause.RECLAIMABLE, 2: PreemptionCause.EXPIRED}
_PRECEDENCE = list(PreemptionCause)
VIOLATION_ID = "violation:"
"""Prefix of the id of a preemption whose cause is a violation."""
MAX_VIOLATION_AGE_S = 600.0
"""An older violation is not a cause any more; one that lasts is reported again."""
SLACK_S = 30.0
"""How much longer than notice and grace period a preemption may last."""
BUDGET = "GPUBudgetPreempt"
PRIORITY = "GPUPriorityPreempt"
VIOLATION = "GPUViolationEvict"
REASONS = {PreemptionCause.PRIORITY: PRIORITY, PreemptionCause.VIOLATION: VIOLATION}
"""Of Events; all other causes concern budgets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionRules:
    """The operator's limits: settings of the binder, which say what each means."""

    plan_starts_after_s: float = 60.0
    planned_starts: int = 1
    preemption: bool = True
    preemption_notice_s: float = 30.0
    preemption_min_runtime_s: float = 600.0
    preemption_cooldown_s: float = 600.0
    preemption_per_namespace_hour: int = 6
    preemption_per_minute: int = 30
    evict_violators: tuple[str, ...] = ()
    evict_violators_spare: tuple[str, ...] = ()


DEFAULT_RULES = PreemptionRules()


class EvictionTier(NamedTuple):
    """How undesirable the eviction of one pod is; the pod with the lowest tier is evicted first."""

    unowned: bool
    """Whether the pod has no controller that replaces it."""
    cause: int
    overdraft: int
    """Minus the overdraft of its namespace's budget, in thousandths of the budget."""
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimCandidate:
    """A lease that may be preempted."""

    lease: Lease
    victim: Victim
    tier: EvictionTier
    used_gpu_s: float = 0.0
    """GPU-seconds that it has used, summed over its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPod:
    """The pod that needs room."""

    pod: PodUid
    namespace: Namespace
    priority: int
    preempts: bool = True


def lease_class(budget: BudgetChanged | None) -> int:
    """Return the class of a namespace's leases, 0 the best; an unknown budget is guaranteed."""
    return LEASE_CLASSES.get(budget.lease_class, 0) if budget else 0


def cause_for(
    pending: PendingPod, theirs: BudgetChanged | None, own: BudgetChanged | None, priority: int
) -> PreemptionCause | None:
    """Return why a lease of a namespace with budget `theirs` may be preempted, or None."""
    own_class = lease_class(own)
    their_class = lease_class(theirs)
    if own_class == 0 and their_class > 0:
        return _CAUSES[their_class]
    if pending.preempts and priority < pending.priority and their_class >= own_class:
        return PreemptionCause.PRIORITY
    return None


def is_worthwhile(own: BudgetChanged | None, now: float) -> bool:
    """Return whether the pending pod could run long enough on its own budget."""
    exhausted_at = own.exhausted_at if own and lease_class(own) == 0 else None
    return exhausted_at is None or exhausted_at - now >= MIN_USEFUL_S


def overdraft_permille(budget: BudgetChanged | None) -> int:
    """Return how far a budget is overdrawn, in thousandths of it."""
    if budget is None or budget.remaining_units is None or budget.remaining_units >= 0:
        return 0
    allowed = budget.used_units + budget.remaining_units
    return -budget.remaining_units * 1000 // max(1, allowed)


def ends_by_policy(budget: BudgetChanged, now: float) -> bool:
    """Return whether the budget's own policy ends the namespace's leases by now."""
    minutes = budget.evict_after_minutes
    return minutes is not None and now >= budget.state_since + minutes * MINUTE_S


def owner_key(pod: PodSnapshot) -> str:
    """Return a key that a pod shares with its replacements."""
    return pod.owner or f"{pod.namespace}/{pod.name}"


def cooldown_until(past: Iterable[EvictionRecord], owner: str, rules: PreemptionRules) -> float:
    """Return until when no other pod of an owner is evicted, or 0 if none has been."""
    evicted = [e.at for e in past if e.owner == owner and e.outcome is EvictionOutcome.EVICTED]
    if not evicted:
        return 0.0
    first_s = rules.preemption_cooldown_s
    cooldown_s = first_s * 2.0 ** min(len(evicted) - 1, 16)
    return max(evicted) + min(cooldown_s, max(MAX_COOLDOWN_S, first_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How many pods may be evicted now, open preemptions deducted."""

    total: int
    per_namespace: int
    used: Mapping[Namespace, int] = field(default_factory=dict)

    def of(self, namespace: Namespace) -> int:
        """Return how many more pods of a namespace."""
        return max(0, min(self.total, self.per_namespace - self.used.get(namespace, 0)))


def allowance(state: PreemptionState, rules: PreemptionRules, now: float) -> Allowance:
    """Return what the limits leave."""
    done = [e for e in state.evictions if e.outcome is EvictionOutcome.EVICTED]
    planned = [victim for each in state.open for victim in each.preemption.left]
    recent = sum(e.at > now - MINUTE_S for e in done) + len(planned)
    used = Counter(e.namespace for e in done if e.at > now - HOUR_S)
    used.update(victim.namespace for victim in planned)
    return Allowance(
        total=max(0, rules.preemption_per_minute - recent),
        per_namespace=rules.preemption_per_namespace_hour,
        used=used,
    )


def over_limit(
    preemption: Preemption, state: PreemptionState, rules: PreemptionRules, now: float
) -> str:
    """Return why a violator may not be evicted yet, or an empty text if it may.

    Preemptions that are not announced yet do not count: each comes to this check itself.
    """
    announced = tuple(
        each for each in state.open if each.preemption.stage is not PreemptionStage.OPENED
    )
    left = allowance(replace(state, open=announced), rules, now)
    if all(left.of(victim.namespace) for victim in preemption.victims):
        return ""
    return (
        f"at most {rules.preemption_per_namespace_hour} pods of a namespace are evicted in an "
        f"hour, and {rules.preemption_per_minute} of all in a minute; checked again while the "
        "violation lasts"
    )


def is_evictable(event: ViolationFound, rules: PreemptionRules, now: float) -> bool:
    """Return whether pods are evicted for a violation."""
    return (
        abs(now - event.found_at) < MAX_VIOLATION_AGE_S
        and event.reason in rules.evict_violators
        and event.namespace not in rules.evict_violators_spare
    )


class Exclusions:
    """Why leases are not preempted although there is a cause, by one state of preemptions."""

    def __init__(self, state: PreemptionState, rules: PreemptionRules, now: float) -> None:
        self._rules = rules
        self._now = now
        self._leaving = state.victims()
        self._evicted: dict[str, list[EvictionRecord]] = {}
        for each in state.evictions:
            self._evicted.setdefault(each.owner, []).append(each)

    def reason(self, lease: Lease, pod: PodSnapshot | None) -> str | None:
        """Return why a lease is not preempted, or None if it may be."""
        if pod is None or is_leaving(lease, pod, self._leaving):
            return "it does not run, or terminates already"
        if not pod.preemptible:
            return "it is labelled as not preemptible"
        if self._now - lease.created_at < self._rules.preemption_min_runtime_s:
            return f"it has not run for {self._rules.preemption_min_runtime_s:g} s"
        owner = owner_key(pod)
        if cooldown_until(self._evicted.get(owner, ()), owner, self._rules) > self._now:
            return "a pod of its owner was evicted recently"
        return None


def is_leaving(lease: Lease, pod: PodSnapshot, victims: Collection[PodUid]) -> bool:
    """Return whether there is nothing to evict, or it is among the victims already."""
    return pod.deleting or lease.state is LeaseState.RESERVED or lease.pod in victims


def victim_of(
    pod: PodSnapshot,
    node: NodeName,
    cause: PreemptionCause,
    *,
    lease: Lease | None = None,
    budget: str = "",
) -> Victim:
    """Return a pod as a victim; one that violates a rule may have no lease."""
    devices = {share.device for share in lease.shares} if lease else set()
    return Victim(
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        node=node,
        cause=cause,
        owner=owner_key(pod),
        budget=budget,
        grace_s=pod.grace_s,
        devices=tuple(sorted(devices)),
        priority=pod.priority,
    )


def preempted(
    lease: Lease, pod: PodSnapshot, cause: PreemptionCause, budget: BudgetChanged | None
) -> Victim:
    """Return a pod as the victim whose lease is preempted."""
    state = budget.state if budget else "none"
    return victim_of(pod, lease.node, cause, lease=lease, budget=state)


def tier_of(victim: Victim, pod: PodSnapshot, budget: BudgetChanged | None) -> EvictionTier:
    """Return the tier of its eviction."""
    return EvictionTier(
        unowned=not pod.owner,
        cause=_PRECEDENCE.index(victim.cause),
        overdraft=-overdraft_permille(budget),
        priority=pod.priority,
    )


def may_still_evict(
    victim: Victim, pending: PendingPod | None, state: PreemptionState, now: float
) -> bool:
    """Return whether a chosen victim may still be evicted under the current budgets."""
    if victim.cause is PreemptionCause.VIOLATION:
        return True
    theirs = state.budget_of(victim.namespace)
    if pending is None:
        return theirs is not None and ends_by_policy(theirs, now)
    own = state.budget_of(pending.namespace)
    return cause_for(pending, theirs, own, victim.priority) is not None


class Step(StrEnum):
    """The next step of a preemption."""

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
    """The preemption is done."""
    CANCEL = "cancel"
    """Victims that were not evicted stay, and the devices are free for all pods again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPreemption:
    """The observed state of a preemption's pods."""

    waiting: WaitingPod | None
    """The pending pod, if it waits."""
    lease: Lease | None
    """The pending pod's lease."""
    leased_victims: Collection[PodUid]
    """Victims whose leases are live."""


def pending_pod_of(preemption: Preemption) -> PendingPod | None:
    """Return the pod that the preemption is for, if it is for one."""
    if preemption.wanted is None:
        return None
    return PendingPod(
        pod=preemption.wanted.pod,
        namespace=preemption.wanted.namespace,
        priority=preemption.priority,
        preempts=preemption.preempts,
    )


def next_step(
    read: StoredPreemption, observed: ObservedPreemption, state: PreemptionState, now: float
) -> tuple[Step, str]:
    """Return the next step, and the reason if it is to cancel."""
    preemption = read.preemption
    lease = observed.lease
    has_lease = preemption.wanted is not None and lease is not None
    reserved = lease is not None and lease.state is LeaseState.RESERVED
    handed = preemption.stage is PreemptionStage.HANDED
    reason = "" if handed else _cancel_reason(read, observed, state, now)
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
    spared = [each for each in preemption.left if not may_still_evict(each, pending, state, now)]
    if spared:
        return "a pod that would be evicted may not be evicted any more"
    return ""


def expiry(victims: Collection[Victim], notice_s: float, now: float) -> float:
    """Return when a preemption is given up: after notice, the longest grace period, and slack."""
    return now + notice_s + max((each.grace_s for each in victims), default=0.0) + SLACK_S


def victim_event(
    victim: Victim, preemption: Preemption, at: float | None = None
) -> KubernetesEvent:
    """Return the Event of a victim that will be evicted at a time, or that was evicted."""
    what = "evicted" if at is None else f"will be evicted at {timestamp(at)}"
    return _victim_event(victim, f"{what}: {_cause(victim, preemption)}")


def beneficiary_event(preemption: Preemption) -> KubernetesEvent:
    """Return the Event of the pending pod, with the pods that are evicted for it, and when."""
    victims = preemption.victims
    reader = preemption.wanted.namespace if preemption.wanted else Namespace("")
    named = dict.fromkeys(name_in(reader, each.namespace, each.name) for each in victims)
    pods = "1 pod is" if len(victims) == 1 else f"{len(victims)} pods are"
    at = timestamp(preemption.evict_at)
    text = f"{pods} evicted for it on {victims[0].node} at {at}: {', '.join(named)}"
    return _pending_event(preemption, text, warning=False)


def cancelled_events(
    preemption: Preemption, reason: str, blocked: Victim | None = None
) -> list[KubernetesEvent]:
    """Return the Events of all pods concerned: no more are evicted, by the reason of one or all."""

    def why(reader: Namespace) -> str:
        if blocked is None:
            return reason
        name = name_in(reader, blocked.namespace, blocked.name)
        return f"{name}: {reason if blocked.namespace == reader else 'it cannot be evicted'}"

    events = [
        _victim_event(each, f"not evicted after all: {why(each.namespace)}", warning=False)
        for each in preemption.left
    ]
    if preemption.wanted is not None:
        text = f"no pod is evicted for it: {why(preemption.wanted.namespace)}"
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

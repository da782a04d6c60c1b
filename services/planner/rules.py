"""Rules of planning: for which pods leases are preempted, which ones, and how often; pure.

The limits come from the journal of evictions, so every replica applies the same.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.model.events.plan_events import ViolationConfirmed
from shared.model.events.pod_events import BudgetChanged
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.preemption import (
    EvictionOutcome,
    EvictionRecord,
    PreemptionCause,
    PreemptionState,
    Victim,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.quantity import HOUR_S, MINUTE_S
from shared.placing.preemption_rules import lease_class
from shared.pods.pod_snapshot import PodSnapshot

MAX_COOLDOWN_S = 8 * HOUR_S
"""Up to this, the cooldown of a pod's owner doubles with each eviction."""
MIN_USEFUL_S = 300.0
"""Nothing is preempted for a pod whose own budget is exhausted sooner."""
_PRECEDENCE = list(PreemptionCause)
VIOLATION_ID = "violation:"
MAX_VIOLATION_AGE_S = 600.0
"""An older violation is not a cause any more; one that lasts is reported again."""
BLOCKED_S = 60.0
"""For so long, no plan has a victim whose eviction the API server has refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionRules:
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
    """The pod with the lowest tier is evicted first."""

    unowned: bool
    """No controller replaces the pod."""
    cause: int
    overdraft: int
    """Minus the overdraft of its budget, in thousandths."""
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimCandidate:
    lease: Lease
    pods: tuple[PodSnapshot, ...]
    """All that use its ResourceClaim."""
    cause: PreemptionCause
    budget: BudgetChanged | None = None
    tier: EvictionTier
    used_gpu_s: float = 0.0
    """Summed over its devices."""

    @property
    def victims(self) -> tuple[Victim, ...]:
        return tuple(preempted(self.lease, pod, self.cause, self.budget) for pod in self.pods)


def is_worthwhile(own: BudgetChanged | None, now: float) -> bool:
    """Return whether the pod could run long enough on its own budget."""
    exhausted_at = own.exhausted_at if own and lease_class(own) == 0 else None
    return exhausted_at is None or exhausted_at - now >= MIN_USEFUL_S


def overdraft_permille(budget: BudgetChanged | None) -> int:
    if budget is None or budget.remaining_units is None or budget.remaining_units >= 0:
        return 0
    allowed = budget.used_units + budget.remaining_units
    return -budget.remaining_units * 1000 // max(1, allowed)


def owner_key(pod: PodSnapshot) -> str:
    """Return what a pod has in common with its replacements."""
    return pod.owner or f"{pod.namespace}/{pod.name}"


def cooldown_until(past: Iterable[EvictionRecord], owner: str, rules: PreemptionRules) -> float:
    """Return until when no other pod of an owner is evicted, or 0.

    With a cooldown of 600 s the second eviction begins one of 1,200 s.
    """
    return _pause_after((record for record in past if record.owner == owner), rules)


def no_plan_until(past: Iterable[EvictionRecord], pod: PodUid, rules: PreemptionRules) -> float:
    """Return until when no more pods are evicted for a pod with a ResourceClaim, or 0.

    kube-scheduler may choose other devices: each eviction in vain doubles the pause.
    """
    return _pause_after((record for record in past if record.for_pod == pod), rules)


def _pause_after(past: Iterable[EvictionRecord], rules: PreemptionRules) -> float:
    evicted = [record.at for record in past if record.outcome is EvictionOutcome.EVICTED]
    if not evicted:
        return 0.0
    first_s = rules.preemption_cooldown_s
    cooldown_s = first_s * 2.0 ** min(len(evicted) - 1, 16)
    return max(evicted) + min(cooldown_s, max(MAX_COOLDOWN_S, first_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """Pods that may be evicted now, without those of open preemptions."""

    total: int
    per_namespace: int
    used: Mapping[Namespace, int] = field(default_factory=dict)

    def of(self, namespace: Namespace) -> int:
        return max(0, min(self.total, self.per_namespace - self.used.get(namespace, 0)))


def allowance(state: PreemptionState, rules: PreemptionRules, now: float) -> Allowance:
    evicted = EvictionOutcome.EVICTED
    done = [record for record in state.evictions if record.outcome is evicted]
    planned = [
        victim
        for read in state.open
        if not read.preemption.cancelled
        for victim in read.preemption.left
    ]
    recent = sum(record.at > now - MINUTE_S for record in done) + len(planned)
    used = Counter(record.namespace for record in done if record.at > now - HOUR_S)
    used.update(victim.namespace for victim in planned)
    return Allowance(
        total=max(0, rules.preemption_per_minute - recent),
        per_namespace=rules.preemption_per_namespace_hour,
        used=used,
    )


def over_limit(
    namespace: Namespace, state: PreemptionState, rules: PreemptionRules, now: float
) -> str:
    if allowance(state, rules, now).of(namespace):
        return ""
    return (
        f"at most {rules.preemption_per_namespace_hour} pods of a namespace are evicted in an "
        f"hour, and {rules.preemption_per_minute} of all in a minute; checked again while the "
        "violation lasts"
    )


def is_evictable(event: ViolationConfirmed, rules: PreemptionRules, now: float) -> bool:
    return (
        abs(now - event.found_at) < MAX_VIOLATION_AGE_S
        and event.reason in rules.evict_violators
        and event.namespace not in rules.evict_violators_spare
    )


class Exclusions:
    def __init__(self, state: PreemptionState, rules: PreemptionRules, now: float) -> None:
        self._rules = rules
        self._now = now
        self._leaving = state.victims()
        self._evicted: dict[str, list[EvictionRecord]] = {}
        self._blocked: set[PodUid] = set()
        for record in state.evictions:
            self._evicted.setdefault(record.owner, []).append(record)
            if record.outcome is EvictionOutcome.BLOCKED and record.at > now - BLOCKED_S:
                self._blocked.add(record.pod)

    def reason(self, lease: Lease, pod: PodSnapshot | None) -> str | None:
        if pod is None or is_leaving(lease, pod, self._leaving):
            return "it does not run, or terminates already"
        if not pod.preemptible:
            return "it is labelled as not preemptible"
        if self._now - lease.created_at < self._rules.preemption_min_runtime_s:
            return f"it has not run for {self._rules.preemption_min_runtime_s:g} s"
        owner = owner_key(pod)
        past = self._evicted.get(owner)
        if past is not None and cooldown_until(past, owner, self._rules) > self._now:
            return "a pod of its owner was evicted recently"
        if pod.pod in self._blocked:
            return f"the API server refused its eviction less than {BLOCKED_S:g} s ago"
        return None


def is_leaving(lease: Lease, pod: PodSnapshot, victims: Collection[PodUid]) -> bool:
    return pod.deleting or lease.state is LeaseState.RESERVED or pod.pod in victims


def victim_of(
    pod: PodSnapshot,
    node: NodeName,
    cause: PreemptionCause,
    *,
    lease: Lease | None = None,
    budget: str = "",
) -> Victim:
    """A pod that violates a rule may have no lease."""
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
        claims=(lease.pod,) if lease is not None and lease.claim is not None else (),
    )


def preempted(
    lease: Lease, pod: PodSnapshot, cause: PreemptionCause, budget: BudgetChanged | None
) -> Victim:
    state = budget.state if budget else "none"
    return victim_of(pod, lease.node, cause, lease=lease, budget=state)


def tier_of(cause: PreemptionCause, pod: PodSnapshot, budget: BudgetChanged | None) -> EvictionTier:
    return EvictionTier(
        unowned=not pod.owner,
        cause=_PRECEDENCE.index(cause),
        overdraft=-overdraft_permille(budget),
        priority=pod.priority,
    )

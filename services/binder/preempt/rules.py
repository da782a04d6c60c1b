"""Whose leases may be taken back for whom, how often, and at what cost. No clock, no store.

A pod of a namespace with budget left may have leases of namespaces without taken back; a pod of
higher priority those of pods of lower priority, unless these are in better standing. All limits
come from the journal of evictions, so that every replica finds the same.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shared.model.errors import RequestError
from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.events.pod_events import BudgetChanged
from shared.model.lease import Lease, LeaseState
from shared.model.names import Namespace, PodUid
from shared.model.preemption import (
    EvictionOutcome,
    EvictionRecord,
    Preemption,
    PreemptionCause,
    PreemptionStage,
    PreemptionState,
    Victim,
)

HOUR_S = 3600.0
MINUTE_S = 60.0
COOLDOWN_MAX_S = 8 * HOUR_S
CLASSES = {"guaranteed": 0, "reclaimable": 1, "expired": 2}
_CAUSES = {1: PreemptionCause.RECLAIMABLE, 2: PreemptionCause.EXPIRED}
_ORDER = (
    PreemptionCause.EXPIRED,
    PreemptionCause.RECLAIMABLE,
    PreemptionCause.PRIORITY,
    PreemptionCause.POLICY,
    PreemptionCause.VIOLATION,
)
VIOLATION = "violation:"
"""What the id of a preemption begins with that is for what its pod did."""
VIOLATION_MAX_AGE_S = 600.0
"""What was seen longer ago is no reason any more: a violation that lasts is told again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionRules:
    """The operator's limits."""

    notice_s: float = 30.0
    """Between telling a pod that it will be evicted and evicting it."""
    min_runtime_s: float = 600.0
    """Younger leases stay."""
    min_useful_s: float = 300.0
    """Nothing is taken back for a pod whose own budget ends sooner."""
    cooldown_s: float = 600.0
    """An owner whose pod was evicted is left alone so long, and twice as long after the next."""
    per_namespace_hour: int = 6
    per_minute: int = 30
    violations: frozenset[str] = frozenset()
    """Reasons of violations for which pods are evicted."""
    spared: frozenset[str] = frozenset()
    """Namespaces whose pods are not, whatever they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """What decides of a pod besides its lease."""

    pod: PodUid
    namespace: Namespace
    name: str
    owner: str = ""
    """Uid of its controller; empty: none."""
    labels: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0
    preempts: bool = True
    preemptible: bool = True
    ending: bool = False
    """Its deletion has been asked for."""
    node: str = ""
    """Where it runs; empty: nowhere yet."""
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DisruptionBudget:
    """A PodDisruptionBudget: the pods that it counts, and how many of them may go now."""

    name: str
    """`NAMESPACE/NAME`."""
    pods: frozenset[PodUid]
    allowed: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class EvictionTier:
    """How unwelcome the eviction of one pod is, before its share is looked at; less comes first."""

    bare: bool
    """Nobody will make another pod in its place."""
    cause: int
    undrawn: int
    """Less the more its namespace has overdrawn its budget: minus thousandths of it."""
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimCandidate:
    """A lease that may be taken back."""

    lease: Lease
    victim: Victim
    tier: EvictionTier
    lost: float = 0.0
    """GPU-seconds that it has held, all devices' parts added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPod:
    """The pod in need, and the standing of its namespace."""

    pod: PodUid
    namespace: Namespace
    priority: int
    preempts: bool = True


def class_of(standing: BudgetChanged | None) -> int:
    """Return the class of a namespace's leases, 0 the best; unknown is guaranteed."""
    return CLASSES.get(standing.lease_class, 0) if standing else 0


def cause_for(
    need: PendingPod, theirs: BudgetChanged | None, own: BudgetChanged | None, priority: int
) -> PreemptionCause | None:
    """Say why a lease of a namespace in standing `theirs` may be taken back, or None."""
    mine, others = class_of(own), class_of(theirs)
    if mine == 0 and others > 0:
        return _CAUSES[others]
    if need.preempts and priority < need.priority and others >= mine:
        return PreemptionCause.PRIORITY
    return None


def is_worthwhile(own: BudgetChanged | None, rules: PreemptionRules, now: float) -> bool:
    """Say whether the pod in need could run long enough on its own budget."""
    ends_at = own.exhausted_at if own and class_of(own) == 0 else None
    return ends_at is None or ends_at - now >= rules.min_useful_s


def overdraft_permille(standing: BudgetChanged | None) -> int:
    """Return how far a budget is overdrawn, in thousandths of it."""
    if standing is None or standing.remaining_units is None or standing.remaining_units >= 0:
        return 0
    allowed = standing.used_units + standing.remaining_units
    return -standing.remaining_units * 1000 // max(1, allowed)


def ends_by_policy(standing: BudgetChanged, now: float) -> bool:
    """Say whether the budget's own policy ends the namespace's leases by now."""
    minutes = standing.evict_after_minutes
    return minutes is not None and now >= standing.since + minutes * MINUTE_S


def owner_key(pod: PodFacts) -> str:
    """Return by what a pod is recognised when it comes again."""
    return pod.owner or f"{pod.namespace}/{pod.name}"


def cooldown_until(past: Iterable[EvictionRecord], owner: str, rules: PreemptionRules) -> float:
    """Return until when no pod of an owner is evicted again; 0: it never was."""
    evicted = [e.at for e in past if e.owner == owner and e.outcome is EvictionOutcome.EVICTED]
    if not evicted:
        return 0.0
    cooldown_s = rules.cooldown_s * 2.0 ** min(len(evicted) - 1, 16)
    return max(evicted) + min(cooldown_s, max(COOLDOWN_MAX_S, rules.cooldown_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How many may be evicted now, what is under way already taken off."""

    everywhere: int
    per_namespace: int
    used: Mapping[Namespace, int] = field(default_factory=dict)

    def of(self, namespace: Namespace) -> int:
        """Return how many more of a namespace."""
        return max(0, min(self.everywhere, self.per_namespace - self.used.get(namespace, 0)))


def allowance(affairs: PreemptionState, rules: PreemptionRules, now: float) -> Allowance:
    """Return what the limits leave."""
    done = [e for e in affairs.evictions if e.outcome is EvictionOutcome.EVICTED]
    under_way = [victim for each in affairs.open for victim in each.preemption.left]
    lately = sum(e.at > now - MINUTE_S for e in done) + len(under_way)
    used = Counter(e.namespace for e in done if e.at > now - HOUR_S)
    used.update(victim.namespace for victim in under_way)
    return Allowance(
        everywhere=max(0, rules.per_minute - lately),
        per_namespace=rules.per_namespace_hour,
        used=used,
    )


def over_limit(
    preemption: Preemption, affairs: PreemptionState, rules: PreemptionRules, now: float
) -> str:
    """Say why a pod may not be evicted yet for what it did, as so many others were; or nothing.

    Others of whom nobody was told yet do not count: each of them comes to this question itself.
    """
    told = tuple(
        each for each in affairs.open if each.preemption.stage is not PreemptionStage.OPENED
    )
    left = allowance(replace(affairs, open=told), rules, now)
    if all(left.of(victim.namespace) for victim in preemption.victims):
        return ""
    return (
        f"{rules.per_namespace_hour} pods of a namespace are evicted in an hour at most, and "
        f"{rules.per_minute} of all in a minute; it is looked at again while the violation lasts"
    )


def violations_of(words: Iterable[str]) -> frozenset[str]:
    """Read the reasons for which pods are evicted. Raises RequestError for a word that is none."""
    for word in words:
        if word not in set(ViolationReason):
            raise RequestError(
                f"--evict-violators must be among {', '.join(ViolationReason)}, got {word!r}"
            )
    return frozenset(words)


def is_evictable(event: ViolationFound, rules: PreemptionRules, now: float) -> bool:
    """Say whether what an agent saw is a reason to evict the pod."""
    lately = now - event.found_at < VIOLATION_MAX_AGE_S
    return lately and event.reason in rules.violations and event.namespace not in rules.spared


def exclusion_reason(
    lease: Lease, pod: PodFacts | None, affairs: PreemptionState, rules: PreemptionRules, now: float
) -> str | None:
    """Say why a lease stays although its cause would do, or None."""
    if pod is None or is_leaving(lease, pod, affairs):
        return "it is not running, or ending already"
    if not pod.preemptible:
        return "it is labelled as not preemptible"
    if now - lease.created_at < rules.min_runtime_s:
        return f"it has not run for {rules.min_runtime_s:g} s"
    if cooldown_until(affairs.evictions, owner_key(pod), rules) > now:
        return "a pod of its owner was evicted lately"
    return None


def is_leaving(lease: Lease, pod: PodFacts, affairs: PreemptionState) -> bool:
    """Say whether there is nothing to evict, now or because it is under way."""
    return (
        pod.ending
        or lease.state is LeaseState.RESERVED
        or any(
            victim.pod == lease.pod for each in affairs.open for victim in each.preemption.victims
        )
    )


def victim_of(
    lease: Lease, pod: PodFacts, cause: PreemptionCause, standing: BudgetChanged | None
) -> Victim:
    """Return a pod as the one whose lease is taken back."""
    return Victim(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        node=lease.node,
        cause=cause,
        owner=owner_key(pod),
        budget=standing.state if standing else "none",
        grace_s=pod.grace_s,
        devices=tuple(sorted({share.device for share in lease.shares})),
        priority=pod.priority,
    )


def tier_of(victim: Victim, pod: PodFacts, standing: BudgetChanged | None) -> EvictionTier:
    """Return how unwelcome its eviction is."""
    return EvictionTier(
        bare=not pod.owner,
        cause=_ORDER.index(victim.cause),
        undrawn=-overdraft_permille(standing),
        priority=pod.priority,
    )


def may_still_evict(
    victim: Victim, need: PendingPod | None, affairs: PreemptionState, now: float
) -> bool:
    """Say whether a chosen victim may still be evicted as budgets stand now."""
    if victim.cause is PreemptionCause.VIOLATION:
        return True
    theirs = affairs.budget_of(victim.namespace)
    if need is None:
        return theirs is not None and ends_by_policy(theirs, now)
    return cause_for(need, theirs, affairs.budget_of(need.namespace), victim.priority) is not None

"""Plans of preemption: the cheapest leases whose end makes a pending pod fit on one node; pure."""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from services.planner.rules import (
    Allowance,
    Exclusions,
    PreemptionRules,
    VictimCandidate,
    allowance,
    is_worthwhile,
    preempted,
    tier_of,
)
from shared.model.events.pod_events import PodQueued
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import NodeTotals, WaitingPod
from shared.model.leases.preemption import PreemptionState
from shared.model.names import DeviceUuid, PodUid
from shared.model.requests.placement import Placement
from shared.model.requests.request import PodRequest
from shared.placing.anti_affinity import Domain, all_domains, repelled_request
from shared.placing.index.node_index import placement_key
from shared.placing.preemption_rules import PendingPod, cause_for, lease_class
from shared.placing.room import ClusterTrials, EndableLease, RoomSearch, used_gpu_s
from shared.pods.pod_snapshot import DisruptionBudget, PodSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPlan:
    placement: Placement
    victims: tuple[VictimCandidate, ...]

    @property
    def leases(self) -> list[Lease]:
        return [victim.lease for victim in self.victims]

    @property
    def devices(self) -> set[DeviceUuid]:
        return {share.device for share in self.placement.shares}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionLimits:
    """For example, no plan has two pods of a PodDisruptionBudget that allows one disruption."""

    disruption_budgets: Sequence[DisruptionBudget] = ()
    allowance: Allowance = field(
        default_factory=lambda: Allowance(total=1 << 30, per_namespace=1 << 30)
    )

    def allow(self, leases: Collection[Lease]) -> bool:
        """Return whether the pods of all these leases may be evicted.

        The API server evicts no pod that several PodDisruptionBudgets select.
        """
        if len(leases) > self.allowance.total:
            return False
        namespaces = Counter(lease.namespace for lease in leases)
        if any(count > self.allowance.of(name) for name, count in namespaces.items()):
            return False
        pods = {lease.pod for lease in leases}
        selected = Counter(pod for budget in self.disruption_budgets for pod in budget.pods & pods)
        return all(count < 2 for count in selected.values()) and all(
            len(budget.pods & pods) <= budget.allowed for budget in self.disruption_budgets
        )

    def after(self, leases: Collection[Lease]) -> Self:
        pods = {lease.pod for lease in leases}
        used = Counter(self.allowance.used)
        used.update(lease.namespace for lease in leases)
        return replace(
            self,
            disruption_budgets=[
                replace(budget, allowed=budget.allowed - len(budget.pods & pods))
                for budget in self.disruption_budgets
            ],
            allowance=replace(self.allowance, total=self.allowance.total - len(pods), used=used),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    trials: ClusterTrials
    candidates: Sequence[VictimCandidate]
    limits: EvictionLimits = field(default_factory=EvictionLimits)


def plan(request: PodRequest, given: PlanInput) -> PreemptionPlan | str:
    """Return the cheapest set of leases whose end makes the pod fit on one node, or why none is.

    There is no plan if the pod fits anyway, now or once the leaving pods are gone.
    """
    node = given.trials.node_as_it_is(request)
    if node is not None:
        return f"it will fit on {node} as it is"
    cheapest = next(_plans(request, given), None)
    if cheapest is not None:
        return cheapest
    if not any(given.limits.allow([candidate.lease]) for candidate in given.candidates):
        return "no pod may be preempted for it"
    return "it would fit on no node even if every preemptible pod were evicted"


def _plans(request: PodRequest, given: PlanInput) -> Iterator[PreemptionPlan]:
    """Yield plans for a pod, the cheapest first; any of them is enough."""
    search = RoomSearch(
        request,
        given.trials,
        allows=lambda ends: given.limits.allow([end.lease for end in ends]),
    )
    by_pod = {candidate.lease.pod: candidate for candidate in given.candidates}
    # Placement is compiled for the image: an interpreted class cannot inherit from a class of it.
    endables = [
        EndableLease(lease=candidate.lease, used_gpu_s=candidate.used_gpu_s, tier=candidate.tier)
        for candidate in given.candidates
    ]
    for room in search.rooms(endables):
        victims = sorted((by_pod[lease.pod] for lease in room.leases), key=lambda v: v.lease.pod)
        yield PreemptionPlan(placement=room.placement, victims=tuple(victims))


@dataclass(eq=False)
class ClusterSnapshot:
    """Nodes and pods, read at about one moment."""

    nodes: Sequence[NodeTotals]
    pods: Mapping[PodUid, PodSnapshot]
    disruption_budgets: Sequence[DisruptionBudget] = ()

    @cached_property
    def trials(self) -> ClusterTrials:
        """Without the pods that are being deleted."""
        return ClusterTrials(self.nodes, {uid for uid, pod in self.pods.items() if pod.deleting})

    @cached_property
    def domains(self) -> list[Domain]:
        return all_domains(totals.node.facts for totals in self.nodes)


def pending_pods(
    waiting: Sequence[WaitingPod], state: PreemptionState, now: float
) -> list[WaitingPod]:
    """Return the pods for which leases may be preempted, the best lease class first.

    Pods of gangs are left out: capacity for one would be reserved while the others still wait.
    """
    open_for = {read.preemption.id for read in state.open}

    def rank(pod: WaitingPod) -> tuple[int, int, float, str]:
        queued = pod.queued
        own_class = lease_class(state.budget_of(queued.namespace))
        return (own_class, -queued.request.priority, pod.waiting_since, queued.pod)

    return sorted(
        (
            pod
            for pod in waiting
            if pod.queued.pod not in open_for
            and _could_use_devices(pod)
            and is_worthwhile(state.budget_of(pod.queued.namespace), now)
        ),
        key=rank,
    )


def _could_use_devices(pod: WaitingPod) -> bool:
    request = pod.queued.request
    in_gang = request.gang is not None and request.gang.decided_as_one
    return bool(request.containers) and not (in_gang or pod.refusal.permanent or pod.refusal.quota)


def plan_input(
    pending: PendingPod,
    cluster: ClusterSnapshot,
    state: PreemptionState,
    rules: PreemptionRules,
    *,
    now: float,
) -> PlanInput:
    candidates: list[VictimCandidate] = []
    own = state.budget_of(pending.namespace)
    exclusions = Exclusions(state, rules, now)
    for node, lease in (
        (totals.node, lease) for totals in cluster.nodes for lease in totals.leases
    ):
        pod = cluster.pods.get(lease.pod)
        theirs = state.budget_of(lease.namespace)
        if pod is None or lease.pod == pending.pod:
            continue
        cause = cause_for(pending, theirs, own, pod.priority)
        if cause is None or exclusions.reason(lease, pod) is not None:
            continue
        victim = preempted(lease, pod, cause, theirs)
        candidates.append(
            VictimCandidate(
                lease=lease,
                victim=victim,
                tier=tier_of(victim, pod, theirs),
                used_gpu_s=used_gpu_s(lease, node, now),
            )
        )
    return PlanInput(
        trials=cluster.trials,
        candidates=candidates,
        limits=limits_of(cluster, state, rules, now),
    )


def limits_of(
    cluster: ClusterSnapshot, state: PreemptionState, rules: PreemptionRules, now: float
) -> EvictionLimits:
    return EvictionLimits(
        disruption_budgets=cluster.disruption_budgets, allowance=allowance(state, rules, now)
    )


class PlanRound:
    """Plans for many pods by one reading of the cluster.

    For example, a thousand pods with equal requests share one search, and take its plans one after
    the other.
    """

    def __init__(
        self, cluster: ClusterSnapshot, state: PreemptionState, rules: PreemptionRules, now: float
    ) -> None:
        self.cluster = cluster
        self.state = state
        self._rules = rules
        self._now = now
        self._inputs: dict[Hashable, PlanInput] = {}
        self._searches: dict[Hashable, Iterator[PreemptionPlan]] = {}
        self._victims: set[PodUid] = set()
        self._claimed: set[DeviceUuid] = set()
        self._limits = limits_of(cluster, state, rules, now)

    def next_plan(self, queued: PodQueued, pending: PendingPod) -> PreemptionPlan | None:
        """Return a plan for a pod, of other victims and devices than those before, or None."""
        for candidate in self._search(queued, pending):
            pods = {lease.pod for lease in candidate.leases}
            if (
                self._victims.isdisjoint(pods)
                and self._claimed.isdisjoint(candidate.devices)
                and self._limits.allow(candidate.leases)
            ):
                self._victims |= pods
                self._claimed |= candidate.devices
                self._limits = self._limits.after(candidate.leases)
                return candidate
        return None

    def _search(self, queued: PodQueued, pending: PendingPod) -> Iterator[PreemptionPlan]:
        request = repelled_request(queued, self.cluster.domains)
        rank = (pending.namespace, pending.preempts, request.priority)
        key = (rank, placement_key(request))
        if key not in self._searches:
            if rank not in self._inputs:
                self._inputs[rank] = plan_input(
                    pending, self.cluster, self.state, self._rules, now=self._now
                )
            given = self._inputs[rank]
            fits = given.trials.node_as_it_is(request) is not None
            self._searches[key] = iter(()) if fits else _plans(request, given)
        return self._searches[key]

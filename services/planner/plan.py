"""Plans of preemption: leases whose end makes a pending pod fit on one node, or a gang; pure.

A gang ends as a whole, or so few of its pods end that its minimum stays.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Self

from services.planner.claim_requests import ClaimDemand
from services.planner.rules import (
    Allowance,
    EvictionTier,
    Exclusions,
    PreemptionRules,
    VictimCandidate,
    allowance,
    is_worthwhile,
    no_plan_until,
    tier_of,
)
from shared.model.events.pod_events import PodQueued
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import NodeTotals, WaitingPod
from shared.model.leases.preemption import PreemptionState, Victim
from shared.model.names import DeviceUuid, PodUid
from shared.model.quantity import timestamp
from shared.model.requests.claim import CLAIMS_FIELD
from shared.model.requests.placement import Placement
from shared.model.requests.request import Gang, PodRequest
from shared.placing.anti_affinity import Domain, all_domains, repelled_request
from shared.placing.endable_leases import (
    EndableLease,
    EndingGangs,
    needs_others,
    used_gpu_s,
)
from shared.placing.gang_room import GangRoom, GangRoomSearch
from shared.placing.index.node_index import placement_key
from shared.placing.preemption_rules import PendingPod, cause_for, lease_class
from shared.placing.room import ClusterTrials, RoomSearch
from shared.placing.starts import WaitingUnit, with_claims
from shared.pods.pod_snapshot import DisruptionBudget, PodSnapshot

NO_VICTIM = "no pod may be preempted for it"
ONLY_CLAIMS = (
    "kube-scheduler allocates its ResourceClaims, by selectors that only kube-scheduler evaluates, "
    "and may choose other GPUs than those that evictions would free"
)


BESIDE_CLAIMS = (
    "another scheduler places it, and it is of a group of pods, requests GPUs by resource names "
    "beside its ResourceClaims, or has an invalid request"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPlan:
    placements: tuple[Placement | None, ...]
    """None for a pod that does not start with the others of its gang."""
    victims: tuple[VictimCandidate, ...]

    @property
    def placed(self) -> tuple[Placement, ...]:
        return tuple(placement for placement in self.placements if placement is not None)

    @property
    def leases(self) -> list[Lease]:
        return [victim.lease for victim in self.victims]

    @property
    def evicted(self) -> tuple[Victim, ...]:
        """Return each pod once, also if several of its claims end."""
        by_pod = dict[PodUid, Victim]()
        for victim in (victim for candidate in self.victims for victim in candidate.victims):
            other = by_pod.get(victim.pod)
            if other is not None:
                claims = (*other.claims, *victim.claims)
                devices = (*other.devices, *victim.devices)
                victim = replace(victim, claims=claims, devices=devices)  # noqa: PLW2901
            by_pod[victim.pod] = victim
        return tuple(by_pod.values())

    @property
    def devices(self) -> set[DeviceUuid]:
        return {share.device for placement in self.placed for share in placement.shares}

    @property
    def gangs(self) -> set[str]:
        return {lease.gang for lease in self.leases if lease.gang}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionLimits:
    disruption_budgets: Sequence[DisruptionBudget] = ()
    allowance: Allowance = field(
        default_factory=lambda: Allowance(total=1 << 30, per_namespace=1 << 30)
    )

    def allow(self, leases: Collection[Lease]) -> bool:
        """The API server evicts no pod that several PodDisruptionBudgets select."""
        namespace_of = {pod: lease.namespace for lease in leases for pod in lease.users}
        pods = namespace_of.keys()
        if len(pods) > self.allowance.total:
            return False
        namespaces = Counter(namespace_of.values())
        if any(count > self.allowance.of(name) for name, count in namespaces.items()):
            return False
        selected = Counter(pod for budget in self.disruption_budgets for pod in budget.pods & pods)
        return all(count < 2 for count in selected.values()) and all(
            len(budget.pods & pods) <= budget.allowed for budget in self.disruption_budgets
        )

    def after(self, leases: Collection[Lease]) -> Self:
        namespace_of = {pod: lease.namespace for lease in leases for pod in lease.users}
        pods = namespace_of.keys()
        used = Counter(self.allowance.used)
        used.update(namespace_of.values())
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
    ending: Set[PodUid] = frozenset()

    def endables(self) -> list[EndableLease]:
        """Give all leases of a gang its highest tier."""
        worst = dict[str, EvictionTier]()
        for candidate in self.candidates:
            if needs_others(candidate.lease):
                gang = candidate.lease.gang
                worst[gang] = max(candidate.tier, worst.get(gang, candidate.tier))
        # Placement is compiled for the image: an interpreted class cannot inherit from one of it.
        return [
            EndableLease(
                lease=candidate.lease,
                used_gpu_s=candidate.used_gpu_s,
                tier=worst.get(candidate.lease.gang, candidate.tier),
            )
            for candidate in self.candidates
        ]

    def gangs_among(self, endables: Iterable[EndableLease]) -> EndingGangs:
        nodes = self.trials.nodes.values()
        leases = (lease for totals in nodes for lease in totals.leases)
        return EndingGangs(leases, endables, self.ending)

    def allows(self, ends: Sequence[EndableLease]) -> bool:
        return self.limits.allow([end.lease for end in ends])

    def plan_of(
        self, placements: tuple[Placement | None, ...], ends: Iterable[EndableLease]
    ) -> PreemptionPlan:
        by_pod = {candidate.lease.pod: candidate for candidate in self.candidates}
        victims = [by_pod[end.lease.pod] for end in ends]
        victims.sort(key=lambda victim: (victim.lease.namespace, victim.lease.name))
        return PreemptionPlan(placements=placements, victims=tuple(victims))


def plan(request: PodRequest, given: PlanInput) -> PreemptionPlan | str:
    """Return the cheapest leases whose end makes the pod fit on one node, or why none is."""
    node = given.trials.node_as_it_is(request)
    if node is not None:
        return f"it will fit on {node} as it is"
    cheapest = next(_plans(request, given), None)
    if cheapest is not None:
        return cheapest
    if not any(given.limits.allow([candidate.lease]) for candidate in given.candidates):
        return NO_VICTIM
    return "it would fit on no node even if every preemptible pod were evicted"


def _plans(request: PodRequest, given: PlanInput) -> Iterator[PreemptionPlan]:
    """The cheapest come first."""
    endables = given.endables()
    gangs = given.gangs_among(endables)
    search = RoomSearch(request, given.trials, allows=given.allows, gangs=gangs)
    for room in search.rooms(endables):
        yield given.plan_of((room.placement,), room.ends)


def plan_for_gang(
    requests: Sequence[PodRequest], needed: int, gang: Gang, given: PlanInput
) -> PreemptionPlan | str:
    """Return few leases whose end makes `needed` pods of a gang fit, or why none is.

    A gang with a topology gets room in one domain; if it only prefers one, anywhere if none has
    room.
    """
    endables = given.endables()
    gangs = given.gangs_among(endables)
    preferred = (*gang.required_topology, *gang.preferred_topology)
    best: GangRoom | None = None
    for keys in dict.fromkeys((preferred, gang.required_topology)):
        for nodes in _domains(given.trials.nodes.values(), keys):
            search = GangRoomSearch(requests, needed, nodes, gangs, given.allows)
            if search.fits():
                return f"it will fit on {'nodes' if keys else 'the nodes'} as they are"
            room = search.room(endables)
            if room is not None and (best is None or room.cost < best.cost):
                best = room
        if best is not None:
            return given.plan_of(best.placements, best.ends)
    if not any(given.limits.allow([candidate.lease]) for candidate in given.candidates):
        return NO_VICTIM
    return "it would not fit even if every pod were evicted that may be evicted with the others"


def _domains(nodes: Iterable[NodeTotals], keys: Sequence[str]) -> list[list[NodeTotals]]:
    domains = dict[tuple[str, ...], list[NodeTotals]]()
    for totals in nodes:
        labels = totals.node.facts.labels
        if all(key in labels for key in keys):
            domains.setdefault(tuple(labels[key] for key in keys), []).append(totals)
    return [domains[values] for values in sorted(domains)]


@dataclass(eq=False)
class ClusterSnapshot:
    nodes: Sequence[NodeTotals]
    pods: Mapping[PodUid, PodSnapshot]
    disruption_budgets: Sequence[DisruptionBudget] = ()
    earlier: ClusterTrials | None = None
    """Trials of an earlier snapshot, which must not be used any more."""

    @cached_property
    def trials(self) -> ClusterTrials:
        """Without the pods that are being deleted."""
        trials = self.earlier or ClusterTrials()
        trials.update(self.nodes, {uid for uid, pod in self.pods.items() if pod.deleting})
        return trials

    def without_start_of(self, id_: str, state: PreemptionState) -> ClusterTrials:
        """Leave out the claims of a planned start, which a preemption replaces."""
        own = [start for start in state.starts if start.id == id_]
        leaving = {uid for uid, pod in self.pods.items() if pod.deleting}
        return ClusterTrials(with_claims(self.nodes, (), own), leaving)

    def runs_any_of(self, gang: Gang) -> bool:
        return any(lease.gang == gang.name for totals in self.nodes for lease in totals.leases)

    def gang_sizes(self, ending: Iterable[Lease]) -> dict[str, int]:
        names = {lease.gang for lease in ending if needs_others(lease)}
        if not names:
            return {}
        return Counter(
            lease.gang for totals in self.nodes for lease in totals.leases if lease.gang in names
        )

    @cached_property
    def domains(self) -> list[Domain]:
        return all_domains(totals.node.facts for totals in self.nodes)


def pending_units(
    waiting: Sequence[WaitingPod],
    state: PreemptionState,
    now: float,
    claims: Mapping[PodUid, ClaimDemand] = MappingProxyType({}),
) -> list[WaitingUnit]:
    """Return the pods and gangs to preempt leases for, the best lease class first.

    `claims` are what pods without GPUs of their own wait for.
    """
    open_for = state.preemptors()
    by_id = defaultdict[str, list[WaitingPod]](list)
    for pod in waiting:
        gang = gang_of(pod)
        by_id[gang.name if gang else pod.queued.pod].append(pod)

    def rank(unit: WaitingUnit) -> tuple[int, int, float, str]:
        own_class = lease_class(state.budget_of(unit.namespace))
        return (own_class, -unit.priority, unit.since, unit.id)

    units = [unit_of(id_, pods, claims) for id_, pods in by_id.items()]
    return sorted(
        (
            unit
            for unit in units
            if open_for.isdisjoint(pod.queued.pod for pod in unit.pods)
            and not unreached(unit)
            and is_worthwhile(state.budget_of(unit.namespace), now)
        ),
        key=rank,
    )


def gang_of(pod: WaitingPod) -> Gang | None:
    """Return the gang without whose other pods it does not start, or None."""
    gang = pod.queued.request.gang
    return gang if gang is not None and gang.decided_as_one else None


def unit_of(
    id_: str,
    pods: Sequence[WaitingPod],
    claims: Mapping[PodUid, ClaimDemand] = MappingProxyType({}),
) -> WaitingUnit:
    gangs = [gang for pod in pods if (gang := gang_of(pod)) is not None]
    gang = max(gangs, key=attrgetter("min_member"), default=None)
    demand = claims.get(pods[0].queued.pod)
    if demand is not None and gang is None:
        pod = with_devices(pods[0], demand)
        return WaitingUnit(id=id_, pods=(pod,), needed=1, gang=None, claim=demand.claim)
    by_size = sorted(pods, key=lambda pod: pod.queued.request.size, reverse=True)
    needed = gang.min_member if gang else 1
    return WaitingUnit(id=id_, pods=tuple(by_size), needed=needed, gang=gang)


def with_devices(pod: WaitingPod, demand: ClaimDemand) -> WaitingPod:
    """Return a pod as if it requested its claim's devices by resource names."""
    request = demand.added_to(pod.queued.request)
    return replace(pod, queued=replace(pod.queued, request=request))


def unreached(unit: WaitingUnit) -> str:
    """Return why no freed device could help, or an empty text."""
    refused = next((pod.refusal for pod in unit.pods if pod.refusal.permanent), None)
    if unit.claim is not None and not unit.pods[0].was_filtered_out:
        refused = None  # nothing but kube-scheduler has looked at it
    over_quota = next((pod.refusal for pod in unit.pods if pod.refusal.quota), None)
    by_kube_scheduler = any(pod.queued.by_kube_scheduler for pod in unit.pods)
    table = (
        (any(has_claims_alone(pod.queued) for pod in unit.pods), ONLY_CLAIMS),
        (unit.claim is None and bool(unit.pods[0].queued.scheduler), BESIDE_CLAIMS),
        (refused is not None, f"no freed device could help: {refused.text if refused else ''}"),
        (over_quota is not None, f"a quota refuses it: {over_quota.text if over_quota else ''}"),
        (unit.gang and by_kube_scheduler, "kube-scheduler binds pods of its gang one by one"),
        (not any(pod.queued.request.containers for pod in unit.pods), "it requests no device"),
        (
            any(pod.queued.request.has_required_rules for pod in unit.pods),
            "plans do not count its required affinity to other pods, anti-affinity or spread",
        ),
        (
            len(unit.pods) < unit.needed,
            f"{len(unit.pods)} pods of its gang wait, and it needs {unit.needed}",
        ),
        (
            len({_topology(pod.queued.request.gang) for pod in unit.pods}) > 1,
            "the pods of its gang name different topologies",
        ),
    )
    return next((reason for applies, reason in table if applies), "")


def pause_text(
    unit: WaitingUnit, state: PreemptionState, rules: PreemptionRules, now: float
) -> str:
    """Return why no more pods are evicted for a claim by now, or an empty text."""
    if unit.claim is None:
        return ""
    until = no_plan_until(state.evictions, unit.pods[0].queued.pod, rules)
    if until <= now:
        return ""
    return (
        "pods were evicted for it, and kube-scheduler has not allocated its ResourceClaim what "
        f"that freed: no more are before {timestamp(until)}"
    )


def has_claims_alone(queued: PodQueued) -> bool:
    return CLAIMS_FIELD in queued.handed_over and not queued.request.containers


def _topology(gang: Gang | None) -> tuple[tuple[str, ...], ...]:
    return (gang.required_topology, gang.preferred_topology) if gang else ()


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
    for lease, gpus in cluster.trials.leases():
        pods = [pod for uid in lease.users if (pod := cluster.pods.get(uid)) is not None]
        theirs = state.budget_of(lease.namespace)
        if not pods or len(pods) < len(lease.users) or lease.pod == pending.pod:
            continue
        cause = cause_for(pending, theirs, own, max([pod.priority for pod in pods]))
        if cause is None or any(exclusions.reason(lease, pod) is not None for pod in pods):
            continue
        candidates.append(
            VictimCandidate(
                lease=lease,
                pods=tuple(pods),
                cause=cause,
                budget=theirs,
                tier=max([tier_of(cause, pod, theirs) for pod in pods]),
                used_gpu_s=used_gpu_s(lease, gpus, now),
            )
        )
    return PlanInput(
        trials=cluster.trials,
        candidates=candidates,
        limits=limits_of(cluster, state, rules, now),
        ending=state.victims(),
    )


def limits_of(
    cluster: ClusterSnapshot, state: PreemptionState, rules: PreemptionRules, now: float
) -> EvictionLimits:
    return EvictionLimits(
        disruption_budgets=cluster.disruption_budgets, allowance=allowance(state, rules, now)
    )


class PlanRound:
    """Plans for many pods by one reading of the cluster: equal requests share one search."""

    def __init__(
        self, cluster: ClusterSnapshot, state: PreemptionState, rules: PreemptionRules, now: float
    ) -> None:
        self.cluster = cluster
        self.state = state
        self._rules = rules
        self._now = now
        self._inputs: dict[Hashable, PlanInput] = {}
        self._searches: dict[Hashable, Iterator[PreemptionPlan]] = {}
        self._without_plan: set[Hashable] = set()
        self._victims: set[PodUid] = set()
        self._gangs: set[str] = set()
        self._claimed: set[DeviceUuid] = set()
        self._limits = limits_of(cluster, state, rules, now)

    def next_plan(self, unit: WaitingUnit, pending: PendingPod) -> PreemptionPlan | None:
        """Return a plan with other victims and devices than those before, or None.

        A gang gets only the first plan of a round.
        """
        if unit.gang is not None:
            return None if self._victims else self._plan_for_gang(unit, unit.gang, pending)
        for candidate in self._search(unit.pods[0].queued, pending):
            pods = {pod for lease in candidate.leases for pod in lease.users}
            if (
                self._victims.isdisjoint(pods)
                and self._gangs.isdisjoint(candidate.gangs)
                and self._claimed.isdisjoint(candidate.devices)
                and self._limits.allow(candidate.leases)
            ):
                self._note(candidate)
                return candidate
        return None

    def _note(self, plan: PreemptionPlan) -> None:
        self._victims |= {pod for lease in plan.leases for pod in lease.users}
        self._gangs |= plan.gangs
        self._claimed |= plan.devices
        self._limits = self._limits.after(plan.leases)

    def _plan_for_gang(
        self, unit: WaitingUnit, gang: Gang, pending: PendingPod
    ) -> PreemptionPlan | None:
        requests = requests_of(unit, self.cluster)
        kinds = Counter(map(placement_key, requests)).items()
        topology = (gang.required_topology, gang.preferred_topology)
        own = any(start.id == unit.id for start in self.state.starts)
        key = (self._rank(pending), frozenset(kinds), unit.needed, topology, own and unit.id)
        if key in self._without_plan or self.cluster.runs_any_of(gang):
            return None
        given = self._input(pending)
        if own:
            given = replace(given, trials=self.cluster.without_start_of(unit.id, self.state))
        plan = plan_for_gang(requests, unit.needed, gang, given)
        if isinstance(plan, str):
            self._without_plan.add(key)
            return None
        self._note(plan)
        return plan

    def _rank(self, pending: PendingPod) -> Hashable:
        return (pending.namespace, pending.preempts, pending.priority)

    def _input(self, pending: PendingPod) -> PlanInput:
        rank = self._rank(pending)
        if rank not in self._inputs:
            self._inputs[rank] = plan_input(
                pending, self.cluster, self.state, self._rules, now=self._now
            )
        return self._inputs[rank]

    def _search(self, queued: PodQueued, pending: PendingPod) -> Iterator[PreemptionPlan]:
        request = repelled_request(queued, self.cluster.domains)
        key = (self._rank(pending), placement_key(request))
        if key not in self._searches:
            given = self._input(pending)
            fits = given.trials.node_as_it_is(request) is not None
            self._searches[key] = iter(()) if fits else _plans(request, given)
        return self._searches[key]


def requests_of(unit: WaitingUnit, cluster: ClusterSnapshot) -> list[PodRequest]:
    """Include what repels each pod from nodes."""
    return [repelled_request(pod.queued, cluster.domains) for pod in unit.pods]

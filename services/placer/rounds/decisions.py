"""Decisions for a batch of pods, each of which counts the choices for earlier ones as used; pure.

Of a gang, enough pods are placed together, or none at all.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter

from msgspec import structs

from shared.model.events.pod_events import PodQueued
from shared.model.leases.lease import will_end_by
from shared.model.leases.ledger import GangEnrollment
from shared.model.names import PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import Gang, GpuRequest, PodRequest
from shared.placing.choice.container_choice import build_shares
from shared.placing.choice.device_choice import choose_devices, fits
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import NodeIndex, placement_key
from shared.placing.index.ranked_nodes import CANDIDATES
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.mirror.node_mirror import MirroredNode, TentativeReservation, idle_copy
from shared.placing.node_filters import has_too_little
from shared.placing.placement import Rng, place, place_before
from shared.placing.refusal.quota_refusals import QuotaRefusals
from shared.placing.refusal.refusals import explain, possible_nodes, with_run_time

ChosenPod = tuple[PodQueued, tuple[Placement, ...]]
"""A pod, and its candidates, best first."""
RefusedPod = tuple[PodQueued, Refusal]

CONTESTED_PODS = 4096
"""After a first choice that the ledger did not grant, choices are contested for so many pods."""

CACHED_COUNTS = 1024


@dataclass(frozen=True, slots=True)
class PlacementUnit:
    gang: Gang | None
    pods: list[PodQueued]


def split_into_units(events: Iterable[PodQueued]) -> list[PlacementUnit]:
    """Split a batch into units, the highest priority first.

    A gang comes where the highest of its pods comes; a gang of one pod counts as none.
    """
    units: list[PlacementUnit] = []
    gangs: dict[str, PlacementUnit] = {}
    for event in sorted(events, key=lambda event: -event.request.priority):
        gang = event.request.gang
        if gang is None or gang.min_member <= 1:
            if not units or units[-1].gang is not None:
                units.append(PlacementUnit(None, []))
            units[-1].pods.append(event)
        elif gang.name in gangs:
            gangs[gang.name].pods.append(event)
        else:
            gangs[gang.name] = PlacementUnit(gang, [event])
            units.append(gangs[gang.name])
    return units


class CandidateCount:
    """How many candidates a pod may get: one, but more while other placers take first choices."""

    def __init__(self) -> None:
        self._contested_pods = 0

    def note_contention(self) -> None:
        self._contested_pods = CONTESTED_PODS

    @property
    def contested(self) -> bool:
        return self._contested_pods > 0

    def next(self) -> int:
        if not self._contested_pods:
            return 1
        self._contested_pods -= 1
        return CANDIDATES


@dataclass(frozen=True, slots=True)
class DecisionContext:
    """Input of decisions: the mirror with its index, refusals by quotas, and a random source."""

    index: NodeIndex
    rng: Rng
    now: Callable[[], float] = lambda: inf
    quotas: QuotaRefusals = field(default_factory=QuotaRefusals)
    candidates: CandidateCount = field(default_factory=CandidateCount)

    @property
    def mirror(self) -> ClusterMirror:
        return self.index.mirror

    def choose(self, event: PodQueued) -> tuple[Placement, ...] | Refusal:
        """Place the pod, and count the first candidate as used in the mirror."""
        if event.request.node_order.compares and not event.requeue_number:
            self.index.fragmentation.workload.learn(event.request)
        restricted = self.index.repelled_pods.restricted
        result = self.quotas.place_within(
            event, lambda request: self._place(restricted(event, request))
        )
        if not isinstance(result, Refusal):
            request = event.request
            self.index.mirror.reserve(
                event.pod, result[0], request.resources, request.anti_affinity_groups
            )
        return result

    def _place(self, request: PodRequest) -> tuple[Placement, ...] | Refusal:
        candidates = self.candidates.next()
        decision = place(request, self.index, self.rng, candidates, contested=candidates > 1)
        if isinstance(decision, NoFit) and self.mirror.claimed:
            ends_by = will_end_by(request.term, self.now())
            before = ends_by is not None and place_before(request, self.index, ends_by)
            decision = before or decision
        return self._explain(request, decision) if isinstance(decision, NoFit) else decision

    def _explain(self, request: PodRequest, no_fit: NoFit) -> Refusal:
        """Put into words why a pod fits nowhere, with what earlier pods of the batch use."""
        refusal = explain(request, self.index, no_fit)
        if self.mirror.claimed and not refusal.permanent:
            return with_run_time(refusal, request, self.index, self.now())
        return refusal


@dataclass(slots=True)
class RoundDecisions:
    chosen: list[ChosenPod] = field(default_factory=list)
    refused: list[RefusedPod] = field(default_factory=list)
    deferred: list[PodQueued] = field(default_factory=list)
    """The capacity that these chose is being offered to waiting pods that come first."""
    gone: list[PodQueued] = field(default_factory=list)
    """These have terminated or were deleted: nothing more is decided for them."""
    ledger_disagreed: bool = False
    """The ledger did not grant every first candidate: refusals may be based on failed choices."""


def decide(pods: Sequence[PodQueued], context: DecisionContext) -> RoundDecisions:
    decisions = RoundDecisions()
    for event in pods:
        result = context.choose(event)
        if isinstance(result, Refusal):
            decisions.refused.append((event, result))
        else:
            decisions.chosen.append((event, result))
    return decisions


def pods_on_empty_nodes(
    request: PodRequest, index: NodeIndex, most: int, *, as_is: bool = False
) -> int:
    """Return how many such pods fit side by side if no other ran, `most` at most.

    Nodes count as healthy, untainted and with any labels unless they are taken `as_is`.
    """
    inventory = index.mirror.inventory_changes.end
    key = (placement_key(request), most, as_is)
    cached = index.pods_on_empty.get(key)
    if cached is not None and cached[0] == inventory:
        return cached[1]
    if len(index.pods_on_empty) >= CACHED_COUNTS:
        index.pods_on_empty.clear()
    count = 0
    for node in index.sets.nodes_in(possible_nodes(request, index)):
        count += _pods_on(request, node, most - count, as_is=as_is)
        if count >= most:
            break
    index.pods_on_empty[key] = inventory, count
    return count


def _pods_on(request: PodRequest, node: MirroredNode, most: int, *, as_is: bool) -> int:
    empty = idle_copy(node, healthy=not as_is)
    if as_is and not fits(request, empty):
        return 0
    devices = {device.uuid: device for device in empty.devices}
    for count in range(most):
        picks = None
        if not has_too_little(empty.free_resources, request.resources):
            picks = choose_devices(request, empty)
        if picks is None:
            return count
        shares = build_shares(picks)
        groups = request.anti_affinity_groups
        TentativeReservation.add(empty, devices, shares, request.resources, groups)
    return most


@dataclass(frozen=True, slots=True)
class GangDecision:
    """Places for as many pods of a gang as needed; or for none, and why the next does not fit."""

    chosen: list[ChosenPod]
    fitting: int
    """How many pods fit before one did not."""
    refusal: Refusal | None = None
    lacking: tuple[int, int] | None = None
    """How many of how many equal pods would fit if no other pod ran; None if all may."""
    waits: bool = False
    """The pod that does not fit would fit once other pods have ended."""
    differs: bool = False
    """Its pods differ: whether they fit beside each other on empty nodes is not known."""


def decide_gang(
    members: Sequence[PodQueued], needed: int, context: DecisionContext
) -> GangDecision:
    """Place `needed` of the members, counting each as used in the mirror, or none of them.

    The largest pods go first, since small ones fit between them. If that fails and there are more
    members than needed, the smallest go first.
    """
    size = attrgetter("request.size")
    decision = _place_in_order(sorted(members, key=size, reverse=True), needed, context)
    if decision.refusal is not None and len(members) > needed:
        second = _place_in_order(sorted(members, key=size), needed, context)
        decision = second if second.fitting > decision.fitting else decision
    if decision.refusal is None or decision.refusal.permanent or decision.refusal.quota:
        return decision
    lacking = _lacking(members, needed, context)
    if lacking is None:
        waits = decision.waits and _lacking(members, needed, context, as_is=True) is None
        keys = {placement_key(event.request) for event in members}
        return replace(decision, waits=waits, differs=len(keys) > 1)
    return replace(decision, lacking=lacking)


def _lacking(
    members: Sequence[PodQueued], needed: int, context: DecisionContext, *, as_is: bool = False
) -> tuple[int, int] | None:
    """Return how many of how many equal pods would fit if no other pod ran, or None if all would.

    Pods that differ are not counted beside each other.
    """
    alike: dict[Hashable, list[PodRequest]] = {}
    for event in members:
        alike.setdefault(placement_key(event.request), []).append(event.request)
    for requests in alike.values():
        least = len(requests) - (len(members) - needed)
        if least > 0:
            most = pods_on_empty_nodes(requests[0], context.index, least, as_is=as_is)
            if most < least:
                return most, least
    return None


def choose_offer_recipients(members: Iterable[PodQueued]) -> set[PodUid]:
    """Choose which pods of a gang freed capacity is offered to: one for each different request.

    A gang that does not fit can fit only once one of its pods fits where capacity was freed.
    """
    recipients: dict[tuple[GpuRequest, ...], PodUid] = {}
    for event in members:
        recipients.setdefault(event.request.containers, event.pod)
    return set(recipients.values())


def changed_verdicts(
    members: Iterable[PodQueued],
    enrollment: GangEnrollment,
    refusal: Refusal,
    included: Collection[PodUid],
) -> list[PodQueued]:
    """Return members whose stored verdict differs, and those to be `included` in any case.

    So a gang of a thousand pods that still does not fit does not cost a thousand writes.
    """
    stored = {
        waiting.queued.pod: (waiting.refusal.reason, waiting.queued.request)
        for waiting in enrollment.waiting
        if not waiting.receives_offers
    }
    return [
        event
        for event in members
        if event.pod in included or stored.get(event.pod) != (refusal.reason, event.request)
    ]


def _place_in_order(
    members: Iterable[PodQueued], needed: int, context: DecisionContext
) -> GangDecision:
    chosen: list[ChosenPod] = []
    refused: list[tuple[PodRequest, Refusal]] = []
    for event in members:
        request = event.request
        if refused and request == refused[-1][0]:
            refused.append(refused[-1])
            continue
        result = context.choose(event)
        if isinstance(result, Refusal):
            refused.append((request, result))
            continue
        chosen.append((event, result))
        if len(chosen) == needed:
            return GangDecision(chosen, needed)
    for event, _ in chosen:
        context.mirror.drop(event.pod)
    may_fit = len(chosen) + sum(not refusal.permanent for _, refusal in refused)
    refusal = structs.replace(refused[0][1], permanent=may_fit < needed)
    explanation = context.index.explanations.get(placement_key(refused[0][0]))
    waits = explanation is not None and bool(explanation.advice.waiting)
    return GangDecision([], len(chosen), refusal, waits=waits)

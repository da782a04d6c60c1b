"""Decisions for a batch of pods: each counts the choices for earlier ones as used; pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec import structs

from shared.model.events.pod_events import PodQueued
from shared.model.leases.lease import will_end_by
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import Gang, PodRequest, Within
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import NodeIndex
from shared.placing.index.ranked_nodes import CANDIDATES
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.placement import Rng, place, place_before, where_placed
from shared.placing.refusal.quota_refusals import QuotaRefusals
from shared.placing.refusal.refusals import explain, with_run_time

ChosenPod = tuple[PodQueued, tuple[Placement, ...]]
"""A pod, and its candidates, best first."""
RefusedPod = tuple[PodQueued, Refusal]
Choose = Callable[[PodQueued], tuple[Placement, ...] | Refusal]
"""Places a pod, and counts the first candidate as used in the mirror."""

CONTESTED_PODS = 4096
"""For so many pods, choices are contested after one that the ledger did not grant."""


@dataclass(frozen=True, slots=True)
class PlacementUnit:
    gang: Gang | None
    pods: list[PodQueued]


def split_into_units(events: Iterable[PodQueued]) -> list[PlacementUnit]:
    """The highest priority comes first; a gang comes where its highest pod comes."""
    units: list[PlacementUnit] = []
    gangs: dict[str, PlacementUnit] = {}
    for event in sorted(events, key=lambda event: -event.request.priority):
        gang = event.request.gang
        if gang is None or not gang.decided_as_one:
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
    """A pod gets more than one candidate while other placers take first choices."""

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
    index: NodeIndex
    rng: Rng
    now: Callable[[], float] = lambda: inf
    quotas: QuotaRefusals = field(default_factory=QuotaRefusals)
    candidates: CandidateCount = field(default_factory=CandidateCount)

    @property
    def mirror(self) -> ClusterMirror:
        return self.index.mirror

    def choose(self, event: PodQueued, within: Within = ()) -> tuple[Placement, ...] | Refusal:
        """Place the pod, and count the first candidate as used in the mirror."""
        if event.request.node_order.compares and not event.requeue_number:
            self.index.fragmentation.workload.learn(event.request)
        restricted = self.index.restricted

        def choice_for(request: PodRequest) -> tuple[Placement, ...] | Refusal:
            return self._place(_with_within(restricted(event, request), within))

        if self.quotas.has_refused(event):
            result = self.quotas.place_within(event, choice_for, self.index, where_placed)
        else:
            result = choice_for(event.request)
        if not isinstance(result, Refusal):
            request = event.request
            self.index.mirror.reserve(
                event.pod, result[0], request.node_resources, request.anti_affinity_groups
            )
            if request.pod_rules is not None and request.pod_rules.repels:
                self.index.repelled_pods.add_tentative(
                    event.pod, request.pod_rules.repels, result[0].node
                )
        return result

    def _place(self, request: PodRequest) -> tuple[Placement, ...] | Refusal:
        candidates = self.candidates.next() if request.pod_rules is None else 1
        decision = place(request, self.index, self.rng, candidates, contested=candidates > 1)
        if isinstance(decision, NoFit) and self.mirror.claimed:
            ends_by = will_end_by(request.term, self.now())
            before = ends_by is not None and place_before(request, self.index, ends_by)
            decision = before or decision
        return self._explain(request, decision) if isinstance(decision, NoFit) else decision

    def _explain(self, request: PodRequest, no_fit: NoFit) -> Refusal:
        """Earlier pods of the batch count."""
        refusal = explain(request, self.index, no_fit)
        if self.mirror.claimed and not refusal.permanent:
            return with_run_time(refusal, request, self.index, self.now())
        return refusal


@dataclass(slots=True)
class RoundDecisions:
    chosen: list[ChosenPod] = field(default_factory=list)
    refused: list[RefusedPod] = field(default_factory=list)
    deferred: list[PodQueued] = field(default_factory=list)
    """Their capacity is being offered to waiting pods that come first."""
    gone: list[PodQueued] = field(default_factory=list)
    """They have terminated or were deleted."""
    ledger_disagreed: bool = False
    """Refusals may be based on choices that the ledger did not grant."""


def _with_within(request: PodRequest, within: Within) -> PodRequest:
    if not within:
        return request
    requirements = structs.replace(request.node_requirements, within=within)
    return structs.replace(request, node_requirements=requirements)


def decide(
    pods: Sequence[PodQueued], context: DecisionContext, choose: Choose | None = None
) -> RoundDecisions:
    choose = choose or context.choose
    decisions = RoundDecisions()
    for event in pods:
        result = choose(event)
        if isinstance(result, Refusal):
            decisions.refused.append((event, result))
        else:
            decisions.chosen.append((event, result))
    return decisions

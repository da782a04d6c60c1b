"""Decisions for a batch of pods; each counts the choices for earlier pods as used; pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shared.model.events.pod_events import PodQueued
from shared.model.placement import Placement, Refusal
from shared.model.request import Gang, NodeOrder, PodRequest
from shared.placing.index.node_index import NodeIndex
from shared.placing.index.ranked_nodes import CANDIDATES
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.placement import Rng, place
from shared.placing.refusal.quota_refusals import QuotaRefusals

ChosenPod = tuple[PodQueued, tuple[Placement, ...]]
"""A pod, and its candidates, best first."""
RefusedPod = tuple[PodQueued, Refusal]

CONTESTED_PODS = 4096
"""After a first choice that the ledger did not grant, choices are contested for so many pods."""

DEFERRED = Refusal(reason="the capacity it needs is being offered to a pod that comes first")


def too_large_refusal(reason: str) -> Refusal:
    """Return the refusal of a pod whose lease the ledger cannot store."""
    return Refusal(
        reason=f"the pod's lease cannot be stored: {reason}",
        counts=(("RecordTooLarge", 1),),
        hint="use fewer containers that request GPUs, and shorter names and groups",
        permanent=True,
    )


@dataclass(frozen=True, slots=True)
class PlacementUnit:
    """Pods of a batch that are decided together: those of one gang, or of none."""

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
        """Note that the ledger did not grant a first choice."""
        self._contested_pods = CONTESTED_PODS

    @property
    def contested(self) -> bool:
        """Whether other placers have taken first choices lately."""
        return self._contested_pods > 0

    def next(self) -> int:
        """Return the number for the next pod."""
        if not self._contested_pods:
            return 1
        self._contested_pods -= 1
        return CANDIDATES


@dataclass(frozen=True, slots=True)
class DecisionContext:
    """Input of decisions: the mirror, its index, refusals by quotas, and a random source."""

    mirror: ClusterMirror
    index: NodeIndex
    quotas: QuotaRefusals
    rng: Rng
    candidates: CandidateCount = field(default_factory=CandidateCount)
    read_changes: Callable[[], None] = lambda: None
    """Called before another round: the mirror shall follow the ledger now."""

    def choose(self, event: PodQueued) -> tuple[Placement, ...] | Refusal:
        """Place the pod, and count the first candidate as used in the mirror."""
        if event.request.node_order is NodeOrder.FRAGMENTATION and not event.requeue_number:
            self.index.fragmentation.workload.learn(event.request)
        restricted = self.index.repelled_pods.restricted
        result = self.quotas.place_within(
            event,
            lambda request: self._place(restricted(event, request)),
        )
        if not isinstance(result, Refusal):
            request = event.request
            self.mirror.reserve(
                event.pod, result[0], request.resources, request.anti_affinity_groups
            )
        return result

    def _place(self, request: PodRequest) -> tuple[Placement, ...] | Refusal:
        candidates = self.candidates.next()
        return place(request, self.index, self.rng, candidates, contested=candidates > 1)


@dataclass(slots=True)
class RoundDecisions:
    """Decisions of one round, updated by the ledger's reply."""

    chosen: list[ChosenPod] = field(default_factory=list)
    refused: list[RefusedPod] = field(default_factory=list)
    deferred: list[PodQueued] = field(default_factory=list)
    """The capacity that these chose is being offered to waiting pods that come first."""
    gone: list[PodQueued] = field(default_factory=list)
    """These have terminated or were deleted: nothing more is decided for them."""
    ledger_disagreed: bool = False
    """The ledger did not grant every first candidate: refusals may be based on failed choices."""


def decide(pods: Sequence[PodQueued], context: DecisionContext) -> RoundDecisions:
    """Place every pod."""
    decisions = RoundDecisions()
    for event in pods:
        result = context.choose(event)
        if isinstance(result, Refusal):
            decisions.refused.append((event, result))
        else:
            decisions.chosen.append((event, result))
    return decisions

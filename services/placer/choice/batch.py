"""Deciding for a batch of pods at once: each sees what was chosen for those before it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from services.placer.choice.placement import place
from services.placer.index.node_index import Index
from services.placer.mirror.cluster_mirror import Mirror
from services.placer.refusal.quotas import QuotasMet
from shared.model.events.pod_events import PodQueued
from shared.model.ledger import Reservation, WaitingPod
from shared.model.placement import Placement, Refusal

Chosen = tuple[PodQueued, tuple[Placement, ...]]
"""A pod, and where it may go, best first."""


KEPT = Refusal(reason="what it would take is being offered to a pod whose turn comes first")


@dataclass(slots=True)
class Decided:
    """What one round decided, before the ledger has spoken."""

    chosen: list[Chosen] = field(default_factory=list)
    refused: list[tuple[PodQueued, Refusal]] = field(default_factory=list)
    kept_back: list[PodQueued] = field(default_factory=list)
    """What these would have taken is being offered to waiting pods whose turn comes first."""
    is_disturbed: bool = False
    """The ledger decided otherwise somewhere: refusals may rest on choices that came to nothing."""


def decide(
    pods: Sequence[PodQueued],
    mirror: Mirror,
    index: Index,
    draw: Callable[[], float],
    quotas: QuotasMet,
) -> Decided:
    """Place every pod, counting each first choice as taken in the mirror."""
    decided = Decided()
    for event in pods:
        request = event.request
        answer = quotas.answer(event, lambda allowed: place(allowed, index, draw))
        if isinstance(answer, Refusal):
            decided.refused.append((event, answer))
        else:
            mirror.hold(event.pod, answer[0], request.resources, request.anti_affinity_groups)
            decided.chosen.append((event, answer))
    return decided


def verdict_of(
    event: PodQueued,
    refusal: Refusal,
    capacity: int,
    now: float,
    *,
    leads: bool,
    fewer_than: int = 0,
) -> WaitingPod:
    """Return what the ledger is to write of a pod that waits."""
    return WaitingPod(
        queued=replace(event, unexplained=False),
        refusal=refusal,
        capacity=capacity,
        waiting_since=now,
        receives_offers=leads,
        min_members=fewer_than,
    )


def reservation_of(event: PodQueued, candidates: tuple[Placement, ...]) -> Reservation:
    """Return the wish for a lease on the first of the candidates that fits."""
    request = event.request
    return Reservation(
        pod=event.pod,
        namespace=event.namespace,
        name=event.name,
        candidates=candidates,
        dialect=request.dialect,
        resources=request.resources,
        anti_affinity_groups=request.anti_affinity_groups,
        gang=request.gang.name if request.gang else "",
        priority=request.priority,
        memo=request.memo,
        trace=event.trace,
    )

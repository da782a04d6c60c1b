"""Ends leases whose pods are no longer there, whoever forgot to say so; reports what is odd."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from services.binder.bind.binding import ObservedPod
from services.binder.ledger_sync.ledger_mismatch import LedgerMismatch, compare
from services.binder.ports.ledger import Ledger, Staging
from services.binder.ports.metrics import Tally
from services.binder.report.explanations import summarize
from shared.model.events.pod_events import BoundPod, PlacementChosen, PodsListed, PodTerminated
from shared.model.lease import Lease, LeaseState

logger = logging.getLogger(__name__)

LOOKS_MAX = 16


class Looking(Protocol):
    """Pods at the API server."""

    async def look(self, namespace: str, name: str) -> ObservedPod | None:
        """Return the pod as it is now, or None if there is none."""
        ...


class Reconciler:
    """Compares complete listings with the ledger; the pod itself has the last word."""

    def __init__(self, ledger: Ledger, staging: Staging, pods: Looking, tally: Tally) -> None:
        self.ledger = ledger
        self.staging = staging
        self.pods = pods
        self.tally = tally
        self._gate = asyncio.Semaphore(LOOKS_MAX)

    async def hear(self, events: Sequence[PodsListed]) -> list[PodTerminated | PlacementChosen]:
        """Take in pieces of listings; compare with those that are complete now."""
        answers: list[PodTerminated | PlacementChosen] = []
        ready = await self.ledger.generation() is not None
        for piece in events:
            pods = await self.staging.save_chunk(_slim(piece) if ready else piece)
            if pods is not None and ready:
                answers += await self.compare(pods, listed_at=piece.listed_at)
        return answers

    async def compare(
        self, pods: Sequence[BoundPod], *, listed_at: float
    ) -> list[PodTerminated | PlacementChosen]:
        """Return what has to be said about leases without pods; report pods without leases."""
        leases = [lease async for page in self.ledger.load_all() for lease in page]
        found = compare(leases, pods, listed_at=listed_at)
        self._report(found)
        suspects = [*found.orphans, *(lease for lease, _ in found.moved)]
        judged = await asyncio.gather(*(self._look_after(lease, listed_at) for lease in suspects))
        return [event for event in judged if event is not None]

    async def _look_after(
        self, lease: Lease, listed_at: float
    ) -> PodTerminated | PlacementChosen | None:
        async with self._gate:
            seen = await self.pods.look(lease.namespace, lease.name)
        return answer_to(lease, seen, listed_at=listed_at)

    def _report(self, found: LedgerMismatch) -> None:
        texts = [
            f"pod {pod.namespace}/{pod.name} ({pod.pod}) on {pod.node} carries a lease that the "
            "ledger does not have"
            for pod in found.unleased
        ]
        texts += [
            f"the lease of pod {lease.namespace}/{lease.name} ({lease.pod}) is for {lease.node}, "
            f"and the pod is on {pod.node}"
            for lease, pod in found.moved
        ]
        self.tally.count("pods_without_lease", len(found.unleased))
        self.tally.count("leases_elsewhere", len(found.moved))
        if texts:
            logger.error("%s", summarize(texts))


def _slim(piece: PodsListed) -> PodsListed:
    """Leave out the leases' texts, which only a rebuild reads."""
    pods = tuple(replace(pod, lease=pod.lease and "yes") for pod in piece.pods)
    return replace(piece, pods=pods)


def answer_to(
    lease: Lease, seen: ObservedPod | None, *, listed_at: float
) -> PodTerminated | PlacementChosen | None:
    """Say what a lease needs whose pod was missing from the listing, given the pod as it is now.

    A committed lease whose pod is still unbound has lost its Binding: it is sent for again.
    """
    if seen is not None and seen.uid == lease.pod and not seen.over:
        if seen.node == lease.node:
            return None
        if not seen.node:
            unsent = lease.state is LeaseState.BOUND and not seen.ending
            return PlacementChosen(lease=lease, trace=lease.trace) if unsent else None
    over = seen is not None and seen.uid == lease.pod and seen.over
    return PodTerminated(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        node=lease.node,
        phase="Failed" if over else "",
        trace=lease.trace,
        noticed_at=listed_at,
    )

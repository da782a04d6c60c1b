"""Ends leases whose pods are gone, although no event said so; reports ledger mismatches."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from services.binder.ledger_sync.ledger_mismatch import LedgerMismatch, compare
from services.binder.ports.kubernetes import PodReader
from services.binder.ports.ledger import LeaseLedger, ListingStaging
from services.binder.ports.observations import PodSnapshot
from services.binder.ports.reports import BinderMetrics
from services.binder.report.explanations import summarize
from shared.model.events.pod_events import BoundPod, PlacementChosen, PodsListed, PodTerminated
from shared.model.lease import Lease, LeaseState

logger = logging.getLogger(__name__)

MAX_READS = 16
"""Pods read from the API server at once."""


class Reconciler:
    """Compares complete listings with the ledger; a read of the pod itself decides."""

    def __init__(
        self,
        ledger: LeaseLedger,
        staging: ListingStaging,
        pods: PodReader,
        metrics: BinderMetrics,
    ) -> None:
        self.ledger = ledger
        self.staging = staging
        self.pods = pods
        self.metrics = metrics
        self._reads = asyncio.Semaphore(MAX_READS)

    async def reconcile(
        self, chunks: Sequence[PodsListed]
    ) -> list[PodTerminated | PlacementChosen]:
        """Stage chunks of listings, and compare the ledger with listings that are complete now."""
        corrections: list[PodTerminated | PlacementChosen] = []
        ready = await self.ledger.generation() is not None
        for chunk in chunks:
            pods = await self.staging.save_chunk(_without_leases(chunk) if ready else chunk)
            if pods is not None and ready:
                corrections += await self.compare(pods, listed_at=chunk.listed_at)
        return corrections

    async def compare(
        self, pods: Sequence[BoundPod], *, listed_at: float
    ) -> list[PodTerminated | PlacementChosen]:
        """Return events for leases without pods; report pods without leases."""
        leases = [lease async for page in self.ledger.load_all() for lease in page]
        mismatch = compare(leases, pods, listed_at=listed_at)
        self._report(mismatch)
        suspects = [*mismatch.orphans, *(lease for lease, _ in mismatch.moved)]
        events = await asyncio.gather(*(self._check(lease, listed_at) for lease in suspects))
        return [event for event in events if event is not None]

    async def _check(
        self, lease: Lease, listed_at: float
    ) -> PodTerminated | PlacementChosen | None:
        async with self._reads:
            pod = await self.pods.get(lease.namespace, lease.name)
        return correction_for(lease, pod, listed_at=listed_at)

    def _report(self, mismatch: LedgerMismatch) -> None:
        texts = [
            f"pod {pod.namespace}/{pod.name} ({pod.pod}) on {pod.node} carries a lease that the "
            "ledger does not have"
            for pod in mismatch.unleased
        ]
        texts += [
            f"the lease of pod {lease.namespace}/{lease.name} ({lease.pod}) is for {lease.node}, "
            f"and the pod is on {pod.node}"
            for lease, pod in mismatch.moved
        ]
        self.metrics.count_anomaly("pods_without_lease", len(mismatch.unleased))
        self.metrics.count_anomaly("leases_elsewhere", len(mismatch.moved))
        if texts:
            logger.error("ledger mismatch: %s", summarize(texts))


def _without_leases(chunk: PodsListed) -> PodsListed:
    """Drop the leases' texts, which only a rebuild reads."""
    pods = tuple(replace(pod, lease=pod.lease and "yes") for pod in chunk.pods)
    return replace(chunk, pods=pods)


def correction_for(
    lease: Lease, pod: PodSnapshot | None, *, listed_at: float
) -> PodTerminated | PlacementChosen | None:
    """Return the event for a lease whose pod was not listed, given the pod as it is now.

    A committed lease whose pod is not bound has lost its Binding, which must be sent again.
    """
    same_pod = pod is not None and pod.uid == lease.pod
    if pod is not None and same_pod and not pod.terminal:
        if pod.node == lease.node:
            return None
        if not pod.node:
            unsent = lease.state is LeaseState.BOUND and not pod.deleting
            return PlacementChosen(lease=lease, trace=lease.trace) if unsent else None
    terminal = pod is not None and same_pod and pod.terminal
    return PodTerminated(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        node=lease.node,
        phase="Failed" if terminal else "",
        trace=lease.trace,
        noticed_at=listed_at,
    )

"""Restores leases that the ledger has lost while their pods run.

A node agent reports its allocations. If the ledger has no lease for such a pod, and Kubernetes
shows the pod bound to that node, a write of the ledger was lost: an older file was loaded, or a
rebuild missed a Binding in flight.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from msgspec import structs

from services.binder.ledger_sync.lease_holders import LeaseHolders
from services.binder.metrics import PrometheusMetrics
from services.binder.ports.ledger import LeaseRestorer
from services.binder.report.explanations import summarize
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError
from shared.model.events.node_events import Allocation
from shared.model.lease import Lease, LeaseState
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

MAX_READS = 16
"""Pods read from the API server at once."""


class LostLeases:
    """Compares allocations without a lease with Kubernetes."""

    def __init__(
        self,
        ledger: LeaseRestorer,
        holders: LeaseHolders,
        *,
        metrics: PrometheusMetrics,
        clock: Clock,
    ) -> None:
        self.ledger = ledger
        self.holders = holders
        self.metrics = metrics
        self.clock = clock
        self._reads = asyncio.Semaphore(MAX_READS)

    async def restore(self, allocations: Iterable[Allocation]) -> set[PodUid]:
        """Restore the leases of those pods that run; return the pods to be tried again.

        A lease that does not fit beside others stays out until one of these has ended: the node
        agent gives out nothing more of the device meanwhile.
        """
        leases: dict[PodUid, Lease] = {}
        for allocation in allocations:
            known = leases.get(allocation.pod)
            if known is None or known.version < allocation.lease.version:
                leases[allocation.pod] = allocation.lease
        found = await asyncio.gather(*(self._is_running(lease) for lease in leases.values()))
        running = dict(zip(leases, found, strict=True))
        lost = [lease for lease in leases.values() if running[lease.pod]]
        unknown = {pod for pod, runs in running.items() if runs is None}
        return unknown | await self._restore(lost)

    async def _restore(self, lost: Sequence[Lease]) -> set[PodUid]:
        if not lost:
            return set()
        active = [structs.replace(lease, state=LeaseState.ACTIVE, expires_at=0.0) for lease in lost]
        misfits = await self.ledger.restore(active, now=self.clock.now())
        self.metrics.count_anomaly("lost_leases", len(lost))
        texts = [f"{each.namespace}/{each.name} on {each.node}" for each in lost]
        logger.error("the ledger had lost the leases of running pods: %s", summarize(texts))
        if misfits:
            texts = [f"{each.namespace}/{each.name}: {reason}" for each, reason in misfits]
            logger.error("they do not fit beside other leases yet: %s", summarize(texts))
        return {lease.pod for lease, _ in misfits}

    async def _is_running(self, lease: Lease) -> bool | None:
        """Return whether the lease's pod is bound to its node and not terminated; None: unknown."""
        async with self._reads:
            try:
                pod = await self.holders.get(lease)
            except LeaseholdError as error:
                logger.warning("pod %s/%s is not known: %s", lease.namespace, lease.name, error)
                return None
        return (
            pod is not None and pod.uid == lease.pod and pod.node == lease.node and not pod.terminal
        )

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
from services.binder.ports.ledger import LostLeaseLedger
from services.binder.ports.nats import Terminations
from services.binder.report.explanations import summarize
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.events.node_events import Allocation
from shared.model.lease import Lease, LeaseState
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

SHARE_IN_USE = "its claim is not prepared, and a pod whose lease was lost uses the device"
BOUND_BEFORE = "the pod runs with an earlier lease, which was lost"
MAX_READS = 16
"""Pods read from the API server at once."""


class LostLeases:
    """Compares allocations without a lease with Kubernetes."""

    def __init__(
        self,
        ledger: LostLeaseLedger,
        holders: LeaseHolders,
        agents: Terminations,
        *,
        metrics: PrometheusMetrics,
        clock: Clock,
    ) -> None:
        self.ledger = ledger
        self.holders = holders
        self.agents = agents
        self.metrics = metrics
        self.clock = clock
        self._reads = asyncio.Semaphore(MAX_READS)

    async def restore(self, allocations: Iterable[Allocation]) -> set[PodUid]:
        """Restore the leases of those pods that run; return the pods to be tried again.

        Their reservations, and leases of claims that are not prepared, make room. A lease that does
        not fit beside others then stays out until one of these has ended: the node agent gives out
        nothing more of the device meanwhile.
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
        again = [lease for lease, _ in misfits]
        if again and [*await self._end_reserved(again), *await self._end_unprepared(again)]:
            misfits = await self.ledger.restore(again, now=self.clock.now())
        self.metrics.count_anomaly("lost_leases", len(lost))
        texts = [f"{each.namespace}/{each.name} on {each.node}" for each in lost]
        logger.error("the ledger had lost the leases of running pods: %s", summarize(texts))
        if misfits:
            texts = [f"{each.namespace}/{each.name}: {reason}" for each, reason in misfits]
            logger.error("they do not fit beside other leases yet: %s", summarize(texts))
        return {lease.pod for lease, _ in misfits}

    async def _end_reserved(self, misfits: Sequence[Lease]) -> list[Lease]:
        """End reservations of these pods, which run: a rollback brought them back; return them."""
        ended: list[Lease] = []
        for held in await self.ledger.load([lease.pod for lease in misfits]):
            if held is not None and held.state is LeaseState.RESERVED:
                ended += await self.ledger.release(
                    [held.pod], reason=BOUND_BEFORE, version=held.version
                )
        return ended

    async def _end_unprepared(self, misfits: Sequence[Lease]) -> list[Lease]:
        """End leases of claims on the same devices that no container uses; return them."""
        devices = {share.device for lease in misfits for share in lease.shares}
        ended: list[Lease] = []
        for node in {lease.node for lease in misfits}:
            claims = {
                lease.pod: lease
                for lease in await self.ledger.load_node(node)
                if lease.claim and devices & {share.device for share in lease.shares}
            }
            try:
                unprepared = await self.agents.list_terminated(node, list(claims)) if claims else ()
            except UnavailableError:
                continue
            for pod in unprepared:
                ended += await self.ledger.release(
                    [pod], reason=SHARE_IN_USE, version=claims[pod].version
                )
        return ended

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

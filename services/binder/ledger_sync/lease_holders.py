"""Reads the holder of a lease as it is now: a pod, or a ResourceClaim."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from services.binder.clients import PodClient
from services.binder.report.explanations import summarize
from shared.kubernetes.claim_reads import AllocationReader
from shared.model.errors import LeaseholdError
from shared.model.events.claim_events import ClaimDeallocated
from shared.model.events.pod_events import BoundPod, ListedPods, PodGated, PodQueued, PodTerminated
from shared.model.leases.lease import Lease
from shared.model.leases.lease_copy import ANNOTATION
from shared.model.names import Namespace, NodeName, PodUid
from shared.pods.carried_leases import bound_claim
from shared.pods.pod_snapshot import PodSnapshot, generation_of

logger = logging.getLogger(__name__)

MAX_READS = 32
MANY = 16
"""So many pods of a namespace are listed."""

HolderGone = PodTerminated | ClaimDeallocated
R = TypeVar("R", bound=Lease | PodGated | PodQueued)


@dataclass(eq=False)
class LeaseHolders:
    """An allocated claim is on its node as a bound pod is; any other claim is gone."""

    pods: PodClient
    claims: AllocationReader

    def __post_init__(self) -> None:
        self._reads = asyncio.Semaphore(MAX_READS)

    async def find(
        self, namespace: Namespace, name: str, *, claim: bool, generation: str = ""
    ) -> PodSnapshot | None:
        """Raises a LeaseholdError if the pod or claim cannot be read."""
        async with self._reads:
            if not claim:
                return await self.pods.get(namespace, name)
            allocation = await self.claims.get_allocation(namespace, name)
        if allocation is None or generation not in {"", allocation.generation}:
            return None
        return PodSnapshot(
            allocation.claim, allocation.node, annotations={ANNOTATION: allocation.lease}
        )

    async def read(self, leases: Iterable[Lease]) -> list[PodSnapshot | LeaseholdError | None]:
        """Return what has each holder's name now, or why it cannot be read."""
        named = list(leases)
        holders = await asyncio.gather(*map(self._read, named))
        errors = [
            f"{lease.namespace}/{lease.name}: {holder}"
            for lease, holder in zip(named, holders, strict=True)
            if isinstance(holder, LeaseholdError)
        ]
        if errors:
            logger.warning("holders of leases cannot be read: %s", summarize(errors))
        return holders

    async def _read(self, lease: Lease) -> PodSnapshot | LeaseholdError | None:
        is_claim = lease.claim is not None
        generation = generation_of(lease)
        try:
            return await self.find(
                lease.namespace, lease.name, claim=is_claim, generation=generation
            )
        except LeaseholdError as error:
            return error

    async def read_pods(self, records: Sequence[R]) -> list[tuple[R, PodSnapshot | None]]:
        """Return each record with its pod, or None if that is gone.

        Many are listed at once: each read costs the API server as much as a Binding. Raises
        UnavailableError while the API server does not respond.
        """
        listed: dict[PodUid, PodSnapshot] = {}
        for namespace, count in Counter(record.namespace for record in records).items():
            if count >= MANY:
                listed |= await self.pods.list_unbound(namespace, 2 * count)
        left = [record for record in records if record.pod not in listed]
        pods = await asyncio.gather(
            *(self.find(record.namespace, record.name, claim=False) for record in left)
        )
        listed |= {
            record.pod: pod
            for record, pod in zip(left, pods, strict=True)
            if pod is not None and pod.pod == record.pod
        }
        return [(record, listed.get(record.pod)) for record in records]

    async def read_gone(self, leases: Sequence[Lease]) -> list[PodTerminated]:
        """Return events for pods that are gone, or end.

        Raises UnavailableError while the API server does not respond.
        """
        return [
            pod_gone(lease)
            for lease, pod in await self.read_pods(leases)
            if pod is None or pod.terminal or pod.deleting
        ]


def holders_in(listing: ListedPods) -> tuple[BoundPod, ...]:
    return (*listing.bound, *(bound_claim(claim) for claim in listing.claims if claim.devices))


def gone_event(lease: Lease, *, phase: str = "") -> HolderGone:
    if lease.claim is None:
        return pod_gone(lease, node=lease.node, phase=phase)
    return ClaimDeallocated(
        claim=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        node=lease.node,
        generation=lease.claim.generation,
        trace=lease.trace,
    )


def pod_gone(
    record: Lease | PodGated | PodQueued, *, node: NodeName | None = None, phase: str = ""
) -> PodTerminated:
    trace = "" if isinstance(record, PodGated) else record.trace
    return PodTerminated(
        pod=record.pod,
        namespace=record.namespace,
        name=record.name,
        node=node,
        phase=phase,
        trace=trace,
    )

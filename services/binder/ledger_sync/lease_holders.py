"""Reads the holder of a lease from the API server as it is now: a pod, or a ResourceClaim."""

from services.binder.claim_client import ClaimClient
from services.binder.observations import PodSnapshot
from services.binder.pod_client import PodClient
from shared.model.events.claim_events import AllocatedClaim, ClaimDeallocated
from shared.model.events.pod_events import BoundPod, ListedPods, PodTerminated
from shared.model.lease import Lease
from shared.model.names import Namespace

HolderGone = PodTerminated | ClaimDeallocated


class LeaseHolders:
    """An allocated claim is on its node as a bound pod is; any other claim is gone."""

    def __init__(self, pods: PodClient, claims: ClaimClient) -> None:
        self.pods = pods
        self.claims = claims

    async def get(self, lease: Lease) -> PodSnapshot | None:
        """Return the holder, or what has its name now; None: there is none.

        Raises a LeaseholdError if it cannot be read.
        """
        if lease.claim is None:
            return await self.pods.get(lease.namespace, lease.name)
        claim = await self.claims.get_allocation(lease.namespace, lease.name)
        if claim is None or claim.generation != lease.claim.generation:
            return None
        return _snapshot_of(claim)

    async def find(self, namespace: Namespace, name: str, *, claim: bool) -> PodSnapshot | None:
        """Return the pod, or the allocated ResourceClaim, of this name; None: there is none."""
        if not claim:
            return await self.pods.get(namespace, name)
        found = await self.claims.get_allocation(namespace, name)
        return _snapshot_of(found) if found is not None else None


def _snapshot_of(claim: AllocatedClaim) -> PodSnapshot:
    return PodSnapshot(claim.claim, claim.node, lease=claim.lease)


def holders_in(listing: ListedPods) -> tuple[BoundPod, ...]:
    """Return the bound pods, and the claims that need a lease, of a complete listing."""
    claims = (
        BoundPod(
            pod=claim.claim,
            namespace=claim.namespace,
            name=claim.name,
            node=claim.node,
            lease=claim.lease,
            generation=claim.generation,
        )
        for claim in listing.claims
        if claim.devices
    )
    return (*listing.bound, *claims)


def gone_event(lease: Lease, *, phase: str = "") -> HolderGone:
    """Return the event for a lease whose holder is gone; its own event was missed."""
    if lease.claim is not None:
        return ClaimDeallocated(
            claim=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            node=lease.node,
            generation=lease.claim.generation,
            trace=lease.trace,
        )
    return PodTerminated(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        node=lease.node,
        phase=phase,
        trace=lease.trace,
    )

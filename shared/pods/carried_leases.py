"""The copies of leases that pods carry in an annotation and claims in their status; pure."""

from shared.model.errors import RequestError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.pod_events import BoundPod
from shared.model.leases.lease import Lease
from shared.model.leases.lease_copy import load_lease
from shared.pods.pod_snapshot import generation_of


def carried_lease(holder: BoundPod) -> Lease:
    """Raise RequestError if the holder carries no copy of its own lease."""
    lease = load_lease(holder.lease, namespace=holder.namespace, name=holder.name)
    of = (lease.pod, lease.node, generation_of(lease))
    if of != (holder.pod, holder.node, holder.generation):
        raise RequestError(f"the copy is of a lease of pod {lease.pod} on node {lease.node}")
    return lease


def copy_in(holder: BoundPod) -> Lease | None:
    """Return None if the holder carries no copy of its own lease."""
    try:
        return carried_lease(holder) if holder.lease else None
    except RequestError:
        return None


def bound_claim(claim: AllocatedClaim) -> BoundPod:
    return BoundPod(
        pod=claim.claim,
        namespace=claim.namespace,
        name=claim.name,
        node=claim.node,
        lease=claim.lease,
        generation=claim.generation,
    )

"""The copies of leases that pods carry in an annotation and claims in their status; pure."""

from shared.model.errors import RequestError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.pod_events import BoundPod
from shared.model.leases.lease import Lease
from shared.model.leases.lease_copy import load_lease
from shared.pods.pod_snapshot import generation_of


def carried_lease(holder: BoundPod) -> Lease:
    """Return the lease whose copy a holder carries. Raises RequestError if it is no such copy."""
    lease = load_lease(holder.lease, namespace=holder.namespace, name=holder.name)
    of = (lease.pod, lease.node, generation_of(lease))
    if of != (holder.pod, holder.node, holder.generation):
        raise RequestError(f"the copy is of a lease of pod {lease.pod} on node {lease.node}")
    return lease


def copy_in(holder: BoundPod) -> Lease | None:
    """Return the lease whose copy a holder carries, or None if it carries none."""
    try:
        return carried_lease(holder) if holder.lease else None
    except RequestError:
        return None


def bound_claim(claim: AllocatedClaim) -> BoundPod:
    """Return an allocated claim as what holds a lease on its node."""
    return BoundPod(
        pod=claim.claim,
        namespace=claim.namespace,
        name=claim.name,
        node=claim.node,
        lease=claim.lease,
        generation=claim.generation,
    )

"""Which devices of this node a ResourceClaim was allocated."""

from services.node_agent.dra.slices import HeldAllocation
from services.node_agent.node import Node
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.resource_claims import (
    ApiResourceClaim,
    DeviceRequestAllocationResult,
    allocated_claim,
    claim_path,
)
from shared.model.errors import RequestError
from shared.model.events.node_events import LeaseHolder
from shared.model.names import Namespace, NodeName
from shared.model.requests.claim import DRIVER


def results_on(
    claim: ApiResourceClaim, node: NodeName
) -> tuple[DeviceRequestAllocationResult, ...]:
    allocation = claim.status.allocation
    return tuple(
        result
        for result in (allocation.devices.results if allocation else ())
        if result.driver == DRIVER and result.pool == node
    )


def generation_of_claim(claim: ApiResourceClaim) -> str:
    allocated = allocated_claim(claim)
    return allocated.generation if allocated and allocated.devices else ""


async def read_claim(node: Node, claim: LeaseHolder) -> ApiResourceClaim:
    """Raises RequestError for a claim that was deleted, is another one, or has no device here."""
    stored = await _find(node, claim.namespace, claim.name)
    if stored is None or stored.metadata.uid != claim.pod:
        there = f"has uid {stored.metadata.uid} now" if stored else "does not exist"
        raise RequestError(
            f"ResourceClaim {claim} with uid {claim.pod} was deleted: the one of that name {there}"
        )
    if not results_on(stored, node.name):
        raise RequestError(
            f"ResourceClaim {claim} has no device of {DRIVER} on node {node.name} allocated"
        )
    return stored


async def list_deallocated(node: Node) -> frozenset[HeldAllocation]:
    """Reads every claim with a lease: call it only before a claim is refused."""
    gone: set[HeldAllocation] = set()
    for lease in tuple(node.leases.leases.values()):
        if lease.claim is None:
            continue
        stored = await _find(node, lease.namespace, lease.name)
        held = lease.claim.generation
        if stored is None or (stored.metadata.uid, generation_of_claim(stored)) != (
            lease.pod,
            held,
        ):
            gone.add((lease.pod, held))
    return frozenset(gone)


async def _find(node: Node, namespace: Namespace, name: str) -> ApiResourceClaim | None:
    try:
        return await node.kubernetes.read(claim_path(namespace, name), ApiResourceClaim)
    except NotFoundError:
        return None

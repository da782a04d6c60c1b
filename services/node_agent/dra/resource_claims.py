"""Reads ResourceClaims: which devices of this node one was allocated."""

from urllib.parse import quote

from msgspec import Struct, field

from services.node_agent.dra.slices import HeldAllocation
from services.node_agent.kubelet.claim_plugin import ClaimReference
from services.node_agent.records.known_leases import KnownLeases
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.types import ObjectMeta
from shared.model.claim import DRIVER, generation_of
from shared.model.errors import RequestError
from shared.model.names import NodeName


class ClaimResult(Struct, frozen=True, rename="camel"):
    """One device of an allocation."""

    request: str = ""
    driver: str = ""
    pool: str = ""
    device: str = ""
    share_id: str = field(name="shareID", default="")
    admin_access: bool | None = None

    @property
    def request_name(self) -> str:
        """The name of its request in the claim, without the choice of a prioritized list."""
        return self.request.partition("/")[0]


class _Results(Struct, frozen=True):
    results: tuple[ClaimResult, ...] | None = ()


class _ClaimAllocation(Struct, frozen=True, rename="camel"):
    devices: _Results = _Results()
    allocation_timestamp: str = ""


class _ClaimStatus(Struct, frozen=True):
    allocation: _ClaimAllocation | None = None


class StoredClaim(Struct, frozen=True):
    """The parts of a ResourceClaim that a node needs."""

    metadata: ObjectMeta = ObjectMeta()
    status: _ClaimStatus = _ClaimStatus()

    def results(self, node: NodeName) -> tuple[ClaimResult, ...]:
        """Return the devices of our driver on a node."""
        return tuple(
            result for result in self._results() if result.driver == DRIVER and result.pool == node
        )

    @property
    def generation(self) -> str:
        """Which allocation it has; empty: none of our driver."""
        allocation = self.status.allocation
        results = [
            (result.request, result.device, result.share_id)
            for result in self._results()
            if result.driver == DRIVER and not result.admin_access
        ]
        if allocation is None or not results:
            return ""
        return generation_of(allocation.allocation_timestamp, results)

    def _results(self) -> tuple[ClaimResult, ...]:
        allocation = self.status.allocation
        return (allocation.devices.results if allocation else None) or ()


class ClaimReader:
    """Reads claims of one node from the API server."""

    def __init__(self, client: KubernetesClient, node: NodeName, leases: KnownLeases) -> None:
        self.client = client
        self.node = node
        self.leases = leases

    async def read(self, claim: ClaimReference) -> StoredClaim:
        """Return a claim with devices of this node.

        Raises RequestError if it was deleted, is another one of the same name, or has no such
        device.
        """
        found = await self._find(claim)
        if found is None or found.metadata.uid != claim.uid:
            there = f"has uid {found.metadata.uid} now" if found else "does not exist"
            raise RequestError(
                f"ResourceClaim {claim} with uid {claim.uid} was deleted: the one of that name "
                f"{there}"
            )
        if not found.results(self.node):
            raise RequestError(
                f"ResourceClaim {claim} has no device of {DRIVER} on node {self.node} allocated"
            )
        return found

    async def list_deallocated(self) -> frozenset[HeldAllocation]:
        """Return the allocations that leases on the node are for, and that claims no longer have.

        Reads every claim with a lease, so it is called only before a claim is refused.
        """
        gone: set[HeldAllocation] = set()
        for lease in tuple(self.leases.leases.values()):
            if lease.claim is None:
                continue
            claim = ClaimReference(uid=lease.pod, namespace=lease.namespace, name=lease.name)
            found = await self._find(claim)
            if (
                found is None
                or found.metadata.uid != lease.pod
                or found.generation != lease.claim.generation
            ):
                gone.add((lease.pod, lease.claim.generation))
        return frozenset(gone)

    async def _find(self, claim: ClaimReference) -> StoredClaim | None:
        namespace, name = quote(claim.namespace, safe=""), quote(claim.name, safe="")
        path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}"
        try:
            return await self.client.read(path, StoredClaim)
        except NotFoundError:
            return None

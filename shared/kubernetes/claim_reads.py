"""Reads ResourceClaims one by one."""

from dataclasses import dataclass

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.resource_claims import ApiResourceClaim, allocated_claim, claim_path
from shared.model.events.claim_events import AllocatedClaim


@dataclass(eq=False)
class AllocationReader:
    client: KubernetesClient

    async def get_allocation(self, namespace: str, name: str) -> AllocatedClaim | None:
        """Return None if it has none of our devices."""
        try:
            claim = await self.client.read(claim_path(namespace, name), ApiResourceClaim)
        except NotFoundError:
            return None
        return allocated_claim(claim)

"""ResourceClaims at the API server, as the binder reads and answers them."""

from collections.abc import Sequence

from services.binder.claims.device_statuses import device_statuses
from services.binder.claims.pod_uses import ClaimingPod, uses_of
from services.binder.ports.claims import ClaimAnswer, RequestUse
from shared.kubernetes.client import KubernetesClient, pod_path
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.resource_claims import ApiResourceClaim, allocated_claim, claim_path
from shared.model.clock import Clock
from shared.model.events.claim_events import AllocatedClaim
from shared.model.names import PodUid

FIELD_MANAGER = "leasehold"


class ClaimClient:
    """Translates between the API server's objects and the binder's values."""

    def __init__(self, client: KubernetesClient, clock: Clock) -> None:
        self.client = client
        self.clock = clock

    async def get_allocation(self, namespace: str, name: str) -> AllocatedClaim | None:
        """Return a claim's allocation of our devices as it is now; None: it has none."""
        try:
            claim = await self.client.read(claim_path(namespace, name), ApiResourceClaim)
        except NotFoundError:
            return None
        return allocated_claim(claim)

    async def list_uses(self, namespace: str, pod: str, uid: PodUid) -> Sequence[RequestUse]:
        """Return what the containers of a pod use; nothing if it is gone."""
        try:
            found = await self.client.read(pod_path(namespace, pod), ClaimingPod)
        except NotFoundError:
            return ()
        return uses_of(found) if found.metadata.uid == uid else ()

    async def answer(self, claim: AllocatedClaim, answer: ClaimAnswer) -> None:
        """Write the conditions of all devices in one server-side apply.

        Only the entries of our driver are ours: those of others stay. Raises ConflictError if the
        claim has changed since it was read, RequestError if it is gone.
        """
        await self.client.apply(
            f"{claim_path(claim.namespace, claim.name)}/status",
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {
                    "name": claim.name,
                    "namespace": claim.namespace,
                    "uid": claim.claim,
                    "resourceVersion": claim.resource_version,
                },
                "status": {"devices": device_statuses(claim, answer, now=self.clock.now())},
            },
            manager=FIELD_MANAGER,
        )

"""ResourceClaims at the API server, as the binder reads and answers them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.binder.observations import stamp
from shared.dialects import GPU_RESOURCES
from shared.kubernetes.client import KubernetesClient, pod_path
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.resource_claims import ApiResourceClaim, allocated_claim, claim_path
from shared.kubernetes.types import ApiPod
from shared.model.bounds import cut
from shared.model.claim import DRIVER
from shared.model.clock import Clock
from shared.model.events.claim_events import AllocatedClaim
from shared.model.names import PodUid
from shared.model.quantity import parse_count


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAnswer:
    """The conditions of all devices of a claim: leased, or refused."""

    condition: str
    """`shared.model.claim.LEASED` or `REFUSED`, which becomes True."""
    reason: str
    """In CamelCase."""
    message: str
    lease: Mapping[str, Any] | None = None
    """The copy of the lease, from which a lost ledger is rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUse:
    """A container that uses requests of a ResourceClaim, or requests GPUs otherwise."""

    container: str
    claim: str
    """Name of the claim, or empty if the container requests an extended resource of ours."""
    request: str
    """Name of the request, empty for all of them; or of the extended resource."""


def uses_of(pod: ApiPod) -> tuple[RequestUse, ...]:
    """Return what containers use: requests of claims, and extended resources of ours."""
    return tuple(_uses(pod))


def _uses(pod: ApiPod) -> Iterator[RequestUse]:
    entries = (*pod.status.resource_claim_statuses, *pod.spec.resource_claims)
    names = {each.name: each.resource_claim_name for each in entries if each.resource_claim_name}
    for container in (*pod.spec.init_containers, *pod.spec.containers):
        for used in container.resources.claims:
            claim = names.get(used.name)
            if claim:
                yield RequestUse(container=container.name, claim=claim, request=used.request)
        limits = container.resources.limits
        for resource in sorted(limits.keys() & GPU_RESOURCES):
            if parse_count(limits[resource]):
                yield RequestUse(container=container.name, claim="", request=resource)
    extended = pod.status.extended_resource_claim_status
    for each in extended.request_mappings if extended else ():
        yield RequestUse(
            container=each.container_name,
            claim=extended.resource_claim_name if extended else "",
            request=each.request_name,
        )


FIELD_MANAGER = "leasehold"


@dataclass(eq=False)
class ClaimClient:
    """Translates between the API server's objects and the binder's values."""

    client: KubernetesClient
    clock: Clock

    async def get_allocation(self, namespace: str, name: str) -> AllocatedClaim | None:
        """Return a claim's allocation of our devices as it is now, or None if it has none."""
        try:
            claim = await self.client.read(claim_path(namespace, name), ApiResourceClaim)
        except NotFoundError:
            return None
        return allocated_claim(claim)

    async def list_uses(self, namespace: str, pod: str, uid: PodUid) -> Sequence[RequestUse]:
        """Return what the containers of a pod use; nothing if it is gone."""
        try:
            found = await self.client.read(pod_path(namespace, pod), ApiPod)
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


def device_statuses(
    claim: AllocatedClaim, answer: ClaimAnswer, *, now: float
) -> list[dict[str, Any]]:
    """Return the entries of `status.devices` that answer a claim: one for each of its devices.

    The first has the copy of the lease.
    """
    condition = {
        "type": answer.condition,
        "status": "True",
        "reason": answer.reason,
        "message": cut(answer.message),
        "lastTransitionTime": stamp(now),
    }
    return [
        {
            "driver": DRIVER,
            "pool": claim.node,
            "device": device.device,
            **({"shareID": device.share_id} if device.share_id else {}),
            "conditions": [condition],
            **({"data": answer.lease} if answer.lease and number == 0 else {}),
        }
        for number, device in enumerate((*claim.devices, *claim.admin_devices))
    ]

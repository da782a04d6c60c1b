"""Clients of the leases of claims: ResourceClaims at the API server, and node agents."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.dialects import GPU_RESOURCES
from shared.kubernetes.claim_reads import AllocationReader
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.paths import pod_path
from shared.kubernetes.resource_claims import claim_path
from shared.kubernetes.types import ApiPod
from shared.model.bounds import cut
from shared.model.clock import Clock
from shared.model.events.claim_events import AllocatedClaim
from shared.model.names import NodeName, PodUid
from shared.model.quantity import parse_count, timestamp
from shared.model.requests.claim import DRIVER
from shared.nats.bus import Bus
from shared.nats.slices_requests import request_slices
from shared.nats.termination_requests import list_terminated

FIELD_MANAGER = "leasehold"


class ClaimAgentClient:
    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def list_terminated(self, node: NodeName, pods: Sequence[PodUid]) -> set[PodUid]:
        """Return the claims that are not prepared; none while NATS is away.

        Raises UnavailableError if the node agent does not reply.
        """
        return await list_terminated(self.bus, node, pods)

    async def write_slices(self, node: NodeName) -> str:
        """Return why the node's slices do not follow the ledger, or an empty text."""
        return await request_slices(self.bus, node)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAnswer:
    condition: str
    """`LEASED` or `REFUSED` of `shared.model.requests.claim`, which becomes True."""
    reason: str
    message: str
    lease: Mapping[str, Any] | None = None
    """A lost ledger is rebuilt from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUse:
    container: str
    claim: str
    """Empty for an extended resource of ours."""
    request: str
    """Empty for all requests of the claim."""


def uses_of(pod: ApiPod) -> Iterator[RequestUse]:
    entries = (*pod.status.resource_claim_statuses, *pod.spec.resource_claims)
    names = {
        entry.name: entry.resource_claim_name for entry in entries if entry.resource_claim_name
    }
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
    for mapping in extended.request_mappings if extended else ():
        yield RequestUse(
            container=mapping.container_name,
            claim=extended.resource_claim_name if extended else "",
            request=mapping.request_name,
        )


@dataclass(eq=False)
class ClaimClient(AllocationReader):
    clock: Clock

    async def list_uses(self, namespace: str, pod: str, uid: PodUid) -> Sequence[RequestUse]:
        """Return nothing if the pod is gone."""
        try:
            stored = await self.client.read(pod_path(namespace, pod), ApiPod)
        except NotFoundError:
            return ()
        return tuple(uses_of(stored)) if stored.metadata.uid == uid else ()

    async def answer(self, claim: AllocatedClaim, answer: ClaimAnswer) -> None:
        """Write the conditions of all devices in one server-side apply.

        Raises ConflictError if the claim has changed since it was read, RequestError if it is gone.
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
    condition = {
        "type": answer.condition,
        "status": "True",
        "reason": answer.reason,
        "message": cut(answer.message),
        "lastTransitionTime": timestamp(now),
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

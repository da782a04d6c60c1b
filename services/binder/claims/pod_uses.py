"""Which requests of ResourceClaims the containers of a pod use, as the API server has it.

https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/
"""

from collections.abc import Iterator

from msgspec import Struct

from services.binder.ports.claims import RequestUse
from shared.dialects import GPU_RESOURCES
from shared.kubernetes.types import ObjectMeta, Quantities
from shared.model.quantity import parse_count


class _UsedClaim(Struct, frozen=True):
    name: str = ""
    request: str = ""


class _ClaimingResources(Struct, frozen=True):
    limits: Quantities = {}
    claims: tuple[_UsedClaim, ...] = ()


class _ClaimingContainer(Struct, frozen=True):
    name: str = ""
    resources: _ClaimingResources = _ClaimingResources()


class _PodClaim(Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_claim_name: str | None = None
    """In the status: that of the claim made of a template, if it needed one."""


class _ClaimingSpec(Struct, frozen=True, rename="camel"):
    containers: tuple[_ClaimingContainer, ...] = ()
    init_containers: tuple[_ClaimingContainer, ...] = ()
    resource_claims: tuple[_PodClaim, ...] = ()


class _RequestMapping(Struct, frozen=True, rename="camel"):
    container_name: str = ""
    request_name: str = ""


class _ExtendedResourceClaim(Struct, frozen=True, rename="camel"):
    request_mappings: tuple[_RequestMapping, ...] = ()
    resource_claim_name: str = ""


class _ClaimingStatus(Struct, frozen=True, rename="camel"):
    resource_claim_statuses: tuple[_PodClaim, ...] = ()
    extended_resource_claim_status: _ExtendedResourceClaim | None = None


class ClaimingPod(Struct, frozen=True):
    """A pod, the fields about claims."""

    metadata: ObjectMeta = ObjectMeta()
    spec: _ClaimingSpec = _ClaimingSpec()
    status: _ClaimingStatus = _ClaimingStatus()


def uses_of(pod: ClaimingPod) -> tuple[RequestUse, ...]:
    """Return what containers use: requests of claims, and extended resources of ours."""
    return tuple(_uses(pod))


def _uses(pod: ClaimingPod) -> Iterator[RequestUse]:
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

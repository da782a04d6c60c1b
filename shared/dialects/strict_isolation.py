"""Strict isolation: a pod that takes MIG instances or whole devices only, in whatever words.

HAMi-core is loaded into the tenants' own processes and holds only those that let it. A pod, or all
pods of a namespace, may want nothing of that: neither to be held by it, nor to share a device with
others that are.
"""

from dataclasses import replace

from shared.dialects.dialect import PodManifest, Rules
from shared.model.errors import RequestError
from shared.model.request import GpuRequest, PodRequest, SharingPolicy

ISOLATION = "leasehold.dev/isolation"
"""Annotation of a pod, by its author."""
STRICT = "strict"
ALL_NAMESPACES = "*"


def is_strict(asks: PodManifest, rules: Rules) -> bool:
    """Say whether the pod's isolation is strict.

    Raises RequestError for an annotation that says something else: it could only be meant to
    loosen what there is.
    """
    said = asks.annotations.get(ISOLATION)
    if said not in {None, STRICT}:
        raise RequestError(f"annotation {ISOLATION} must be {STRICT}, or be left out, got {said!r}")
    return said == STRICT or not {asks.namespace, ALL_NAMESPACES}.isdisjoint(
        rules.strict_namespaces
    )


def strict_request(request: PodRequest) -> PodRequest:
    """Return the request as strict isolation has it: all of a device's memory is all of the device.

    Raises RequestError for a part of a device that can be no MIG instance.
    """
    containers = tuple(_strict_container(container) for container in request.containers)
    parts = [one for one in containers if one.sharing is not SharingPolicy.EXCLUSIVE]
    instances = all(one.mig_allowed and not one.whole for one in containers)
    if parts and not (instances and request.selection.mode in {None, "mig"}):
        raise RequestError(
            f"container {parts[0].container} asks for a part of a GPU, and the pod's isolation is "
            f"{STRICT}: ask for whole GPUs, or for memory in words that MIG instances are given "
            "for, in all containers and without demanding another mode"
        )
    return replace(request, containers=containers)


def _strict_container(container: GpuRequest) -> GpuRequest:
    alone = container.wants_all_memory or container.sharing is SharingPolicy.EXCLUSIVE
    return replace(
        container, strict=True, sharing=SharingPolicy.EXCLUSIVE if alone else container.sharing
    )

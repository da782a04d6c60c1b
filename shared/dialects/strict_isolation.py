"""Strict isolation: a pod gets MIG instances or whole devices only, in any dialect; pure.

HAMi-core runs in the tenants' own processes and limits only those that load it. A pod, or all pods
of a namespace, can require hardware isolation instead: they are not limited by HAMi-core, and do
not share a device with pods that are.
"""

from msgspec import structs

from shared.dialects.dialect import PodManifest, Rules
from shared.model.errors import RequestError
from shared.model.request import GpuRequest, PodRequest, SharingPolicy

ISOLATION = "leasehold.dev/isolation"
"""Annotation of a pod, written by its author."""
STRICT = "strict"
ALL_NAMESPACES = "*"


def is_strict(pod: PodManifest, rules: Rules) -> bool:
    """Return whether the pod's isolation is strict.

    Raises RequestError for any other value of the annotation.
    """
    value = pod.annotations.get(ISOLATION)
    if value not in {None, STRICT}:
        raise RequestError(f"annotation {ISOLATION} must be {STRICT}, or be absent, got {value!r}")
    return value == STRICT or not {pod.namespace, ALL_NAMESPACES}.isdisjoint(
        rules.strict_namespaces
    )


def strict_request(request: PodRequest) -> PodRequest:
    """Return the request with strict isolation: all memory of a device is the whole device.

    Raises RequestError for a part of a device that cannot be a MIG instance.
    """
    containers = tuple(_strict_container(container) for container in request.containers)
    parts = [one for one in containers if one.sharing is not SharingPolicy.EXCLUSIVE]
    instances = all(one.mig_allowed and not one.whole for one in containers)
    if parts and not (instances and request.selection.mode in {None, "mig"}):
        raise RequestError(
            f"container {parts[0].container} requests a part of a GPU, and the pod's isolation "
            f"is {STRICT}: request whole GPUs, or memory by resource names for which MIG instances "
            "are possible, in all containers and without another mode"
        )
    return structs.replace(request, containers=containers)


def _strict_container(container: GpuRequest) -> GpuRequest:
    alone = container.wants_all_memory or container.sharing is SharingPolicy.EXCLUSIVE
    return structs.replace(
        container, strict=True, sharing=SharingPolicy.EXCLUSIVE if alone else container.sharing
    )

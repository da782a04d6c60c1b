"""Requests of pods that demand an isolation; pure."""

from msgspec import structs

from shared.dialects import DIALECTS
from shared.dialects.volcano import gpushare, vgpu
from shared.model.change import Change, Place, limit, words
from shared.model.devices.enforcers import NO_DEMAND, HeldBy
from shared.model.errors import RequestError
from shared.model.names import ISOLATION
from shared.model.requests.request import GpuRequest, PodRequest


def whole_gpus(request: PodRequest, container: GpuRequest) -> tuple[Change, ...]:
    """Return how a container requests whole GPUs, or () if it cannot."""
    dialect = DIALECTS[request.dialect]
    whole = structs.replace(
        container,
        whole=True,
        memory_units=None,
        memory_bytes=None,
        memory_percent=None,
        cores_percent=0,
    )
    before = dialect.limits(container, request)
    after = dialect.limits(whole, request)
    if request.dialect in {vgpu.NAME, gpushare.NAME}:  # only the number is that of whole GPUs
        after = {gpushare.NUMBER: container.gpus}
    if not any(after.values()):
        return ()
    names = [*after, *(name for name in before if name not in after)]
    return tuple(
        limit(container.container, name, after.get(name, ""))
        for name in names
        if before.get(name) != after.get(name)
    )


def demanding(request: PodRequest, demand: HeldBy) -> PodRequest:
    """Return the request with what its pod demands; whole GPUs satisfy any demand but `mig`.

    Raises RequestError for a request to which the demanded enforcer cannot apply.
    """
    if demand == NO_DEMAND:
        return request
    for container in request.containers:
        if demand.memory == "exclusive" and not container.whole:
            whole = whole_gpus(request, container)
            instead = f": {words(whole)}" if whole else ""
            raise RequestError(
                f"container {container.container} requests a part of a GPU, and the annotation "
                f"{ISOLATION} is exclusive: request whole GPUs{instead}",
                *whole,
            )
        if demand.memory == "mig" and (container.whole or not container.mig_allowed):
            raise RequestError(
                f"container {container.container} cannot get a MIG instance, and the annotation "
                f"{ISOLATION} is mig: request memory by resource names for which MIG instances are "
                "possible, nvidia.com/gpumem or volcano.sh/vgpu-memory, or leave the annotation "
                "out",
                Change(Place.ANNOTATION, ISOLATION),
            )
        if demand.by_shared_server and container.gpus > 1 and not container.whole:
            own = str(demand).replace("mps-shared", "mps")
            raise RequestError(
                f"container {container.container} requests shares of {container.gpus} GPUs, and "
                f"the annotation {ISOLATION} is {demand}: each GPU has a server of MPS of its own, "
                f"and a program connects to one server: write {own}, by which the container has "
                "its own server for all its GPUs, or request one GPU for each container",
                Change(Place.ANNOTATION, ISOLATION, own),
            )
    containers = tuple(
        structs.replace(container, held_by=demand) for container in request.containers
    )
    return structs.replace(request, containers=containers)

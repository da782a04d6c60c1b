"""Requests of so little memory that no CUDA program could start; pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import structs

from shared.dialects import DIALECTS
from shared.model.device import MIB
from shared.model.request import GpuRequest, PodRequest
from shared.placing.advice import changes_between

GIB = 1024
"""MiB."""
LARGEST_GIB = 256
"""A device may have so much where the cluster's largest is not known."""


@dataclass(frozen=True, slots=True)
class DeviceUnits:
    """The units in which the cluster's largest device is divided."""

    unit_mib: int = 1
    memory_mib: int = LARGEST_GIB * GIB


def small_requests(pod: PodRequest, least_mib: int, largest: DeviceUnits) -> Iterator[str]:
    """Yield a warning for each container with less memory, and what was probably meant."""
    for request in pod.containers:
        mib = _requested_mib(request, largest.unit_mib)
        if mib is not None and 0 < mib < least_mib:
            yield (
                f"container {request.container} gets {mib} MiB of a GPU, and a CUDA program needs "
                f"about {least_mib} MiB before it allocates anything{_meant(pod, request, largest)}"
            )


def _requested_mib(request: GpuRequest, unit_mib: int) -> int | None:
    if request.whole or request.memory_percent is not None:
        return None
    if request.memory_bytes is not None:
        return -(-request.memory_bytes // MIB)
    return None if request.memory_units is None else request.memory_units * unit_mib


def _meant(pod: PodRequest, request: GpuRequest, largest: DeviceUnits) -> str:
    """Return the amount for as many GiB as the number that is written, if a device has so much."""
    step = DIALECTS[pod.dialect].memory_step
    if request.memory_units is not None:
        written = request.memory_units
        field = "memory_units"
        amount = written * GIB // largest.unit_mib
    else:
        written = (request.memory_bytes or 0) // step
        field = "memory_bytes"
        amount = written * GIB * MIB
    if not 0 < written * GIB <= largest.memory_mib:
        return ""
    meant = structs.replace(request, **{field: amount})
    containers = tuple(meant if each is request else each for each in pod.containers)
    changes = changes_between(pod, structs.replace(pod, containers=containers))
    amounts = ", ".join(f"{each.name}: {each.value}" for each in changes if each.value)
    return f": for {written} GiB write {amounts}" if amounts else ""

"""Requests for more memory than any device has, or for too little for a CUDA program; pure."""

from collections.abc import Iterable, Iterator, Mapping

from msgspec import structs

from services.webhook.pod_admission import BAD_REQUEST, DeviceMaximum
from shared.dialects import DIALECTS, GPU_RESOURCES
from shared.model.change import Change, Hint
from shared.model.denial import Denial
from shared.model.devices.device import MIB
from shared.model.requests.request import LEAST_SHARE_MIB, GpuRequest, PodRequest
from shared.placing.advice import changes_between
from shared.pods.pod_view import PodContainer

GIB = 1024
"""MiB."""
ASSUMED_LARGEST = DeviceMaximum(memory_mib=256 * GIB, memory_units=256 * GIB)
"""More than any GPU has."""


def too_large(
    pod: PodRequest, containers: Iterable[PodContainer], largest: DeviceMaximum | None
) -> Denial | None:
    if largest is None:
        return None
    amounts = {container.name: container.amounts for container in containers}
    for request in pod.containers:
        excess = _excess(request, largest)
        if excess:
            written = _written(amounts.get(request.container, {}))
            most = _most(pod, request, largest)
            instead = _in_blocks(pod, request, largest)
            advice = f"set {_listed(most)}" if most else "request at most as much"
            if instead is not None:
                most = instead.changes
                advice = instead.text
            text = (
                f'container "{request.container}" ({written}) requests {excess}; {advice}, or '
                "request a whole GPU"
            )
            return Denial(BAD_REQUEST, text, most)
    return None


def _most(pod: PodRequest, request: GpuRequest, largest: DeviceMaximum) -> tuple[Change, ...]:
    if request.memory_bytes is None:
        return _changes(pod, request, memory_units=largest.memory_units)
    step = DIALECTS[pod.dialect].memory_step
    return _changes(pod, request, memory_bytes=largest.memory_mib * MIB // step * step)


def _in_blocks(pod: PodRequest, request: GpuRequest, largest: DeviceMaximum) -> Hint | None:
    step = DIALECTS[pod.dialect].memory_step
    if step == MIB or request.memory_bytes is None:
        return None
    mib = request.memory_bytes // step
    if not LEAST_SHARE_MIB <= mib <= largest.memory_mib:
        return None
    changes = _changes(pod, request, memory_bytes=-(-mib * MIB // step) * step)
    return Hint(f"for {mib} MiB set {_listed(changes)}", changes)


def _changes(pod: PodRequest, request: GpuRequest, **amount: int) -> tuple[Change, ...]:
    changed = structs.replace(request, **amount)
    containers = [changed if container is request else container for container in pod.containers]
    return changes_between(pod, structs.replace(pod, containers=tuple(containers)))


def _listed(changes: Iterable[Change]) -> str:
    return ", ".join(f"{change.name}: {change.value}" for change in changes)


def _excess(request: GpuRequest, largest: DeviceMaximum) -> str:
    """Compare MiB and units apart, as the largest of each may be of different devices."""
    if request.whole or request.memory_percent is not None:
        return ""
    if request.memory_bytes is not None:
        mib = -(-request.memory_bytes // MIB)
        if mib > largest.memory_mib:
            return (
                f"{mib} MiB of one GPU, and the largest GPU of the cluster has "
                f"{largest.memory_mib} MiB"
            )
    elif request.memory_units is not None and request.memory_units > largest.memory_units:
        unit = "MiB"
        size = ""
        if largest.memory_units != largest.memory_mib:
            unit = "units of memory"
            size = f" ({largest.memory_mib} MiB)"
        return (
            f"{request.memory_units} {unit} of one GPU, and the largest GPU of the cluster has "
            f"{largest.memory_units} {unit}{size}"
        )
    return ""


def _written(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={amounts[name]}" for name in sorted(amounts) if name in GPU_RESOURCES)


def too_small(pod: PodRequest, least_mib: int, largest: DeviceMaximum | None) -> Iterator[Hint]:
    if largest is None or not largest.memory_units:
        largest = ASSUMED_LARGEST
    unit_mib = largest.memory_mib // largest.memory_units
    for request in pod.containers:
        mib = _requested_mib(request, unit_mib)
        if mib is not None and 0 < mib < least_mib:
            meant = _meant(pod, request, unit_mib, largest.memory_mib) or _least(
                pod, request, unit_mib, least_mib
            )
            text = (
                f"container {request.container} gets {mib} MiB of a GPU, and a CUDA program needs "
                f"about {least_mib} MiB before it allocates anything"
            )
            yield Hint(f"{text}: {meant.text}", meant.changes)


def _least(pod: PodRequest, request: GpuRequest, unit_mib: int, least_mib: int) -> Hint:
    if request.memory_units is not None:
        changes = _changes(pod, request, memory_units=-(-least_mib // unit_mib))
    else:
        step = DIALECTS[pod.dialect].memory_step
        changes = _changes(pod, request, memory_bytes=-(-least_mib * MIB // step) * step)
    return Hint(f"write {_listed(changes)} or more", changes)


def _requested_mib(request: GpuRequest, unit_mib: int) -> int | None:
    if request.whole or request.memory_percent is not None:
        return None
    if request.memory_bytes is not None:
        return -(-request.memory_bytes // MIB)
    return None if request.memory_units is None else request.memory_units * unit_mib


def _meant(pod: PodRequest, request: GpuRequest, unit_mib: int, largest_mib: int) -> Hint | None:
    if request.memory_units is not None:
        gib = request.memory_units
        changes = _changes(pod, request, memory_units=gib * GIB // unit_mib)
    else:
        gib = (request.memory_bytes or 0) // DIALECTS[pod.dialect].memory_step
        changes = _changes(pod, request, memory_bytes=gib * GIB * MIB)
    written = tuple(change for change in changes if change.value)
    if not written or not 0 < gib * GIB <= largest_mib:
        return None
    return Hint(f"for {gib} GiB write {_listed(written)}", changes)

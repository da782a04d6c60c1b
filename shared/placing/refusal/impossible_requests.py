"""Advice for a pod that would not fit on a node even if no other pod ran there; pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from shared.model.device import IDLE_BEFORE, required_cores_percent, slot_limit
from shared.model.quantity import amount_text, peak
from shared.model.request import GpuRequest, PodRequest, TopologyScope
from shared.placing.choice.container_choice import share_mib
from shared.placing.choice.device_choice import allowed_devices, choose_devices
from shared.placing.choice.device_refusals import SCOPES, explain_no_devices
from shared.placing.mirror.node_mirror import MirroredDevice, MirroredNode


def impossible_hint(request: PodRequest, node: MirroredNode, empty: MirroredNode) -> str:
    """Return why the pod would not fit on the node if it were `empty`, and what to change.

    Empty: it would, or other advice is as true for an empty node.
    """
    text = next(_reasons(request, node, empty), "")
    return text and f"waiting does not help: {text}"


def _reasons(request: PodRequest, node: MirroredNode, empty: MirroredNode) -> Iterator[str]:
    for name, amount in request.resources.items():
        there = empty.free_resources.get(name, 0)
        if amount > there:
            wanted, most = amount_text(name, amount), amount_text(name, there)
            yield f"node {node.name} has {most} of {name} in all, and {wanted} are requested"
    if not empty.devices or choose_devices(request, empty) is not None:
        return
    code = explain_no_devices(request, empty).code
    allowed = allowed_devices(request.selection, empty)
    if code in _REASONS and allowed:
        yield _REASONS[code](request, node, allowed)


def _must_share(request: PodRequest, devices: Sequence[MirroredDevice]) -> bool:
    """Return whether all containers of the pod have to be on one device."""
    return len(request.containers) > 1 and (request.same_device or len(devices) == 1)


def _largest(devices: Sequence[MirroredDevice]) -> MirroredDevice:
    return max(devices, key=lambda device: device.total_mib)


def _for_memory(request: PodRequest, node: MirroredNode, devices: Sequence[MirroredDevice]) -> str:
    device = _largest(devices)
    where = f"device {device.index} of node {node.name}"
    if _must_share(request, devices):
        together = _together(request, lambda container: share_mib(container, device))
        return (
            f"the pod's containers together need {together} of the {device.total_mib} MiB of "
            f"{where}: request less memory"
        )
    wanted = max(share_mib(container, device) for container in request.containers)
    if wanted > device.total_mib:
        return f"request at most {device.total_mib} MiB, all the memory of {where}"
    return _for_number(request, node, devices)


def _for_cores(request: PodRequest, node: MirroredNode, devices: Sequence[MirroredDevice]) -> str:
    if not _must_share(request, devices):
        return _for_number(request, node, devices)
    where = f"device {_largest(devices).index} of node {node.name}"
    together = _together(request, required_cores_percent)
    return f"the pod's containers together need {together} % of the cores of {where}: request less"


def _for_slots(request: PodRequest, node: MirroredNode, devices: Sequence[MirroredDevice]) -> str:
    if not _must_share(request, devices):
        return _for_number(request, node, devices)
    device = _largest(devices)
    together = _together(request, lambda container: int(container.slotted))
    slots = min(slot_limit(container, device.device) for container in request.containers)
    return (
        f"the pod's containers need {together} share slots, and device {device.index} of node "
        f"{node.name} has {slots}: raise --device-split-count of its node agent, or request GPUs "
        "in fewer containers"
    )


def _for_number(request: PodRequest, node: MirroredNode, devices: Sequence[MirroredDevice]) -> str:
    scope = SCOPES.get(request.topology_scope)
    on_one = f" on one {scope}" if request.topology_scope is not TopologyScope.NODE else ""
    alone = any(container.sharing in IDLE_BEFORE for container in request.containers)
    needs = "GPUs that they share with no other container" if alone else "these GPUs at once"
    count = f"{len(devices)} GPU{'s' * (len(devices) > 1)}"
    return (
        f"the pod's containers need {needs}{on_one}, and node {node.name} has {count} that the pod "
        "may use: request fewer GPUs or less of them"
    )


def _together(request: PodRequest, amount: Callable[[GpuRequest], int]) -> int:
    return peak(((amount(container), container.init) for container in request.containers), 0)


_REASONS: Mapping[str, Callable[[PodRequest, MirroredNode, Sequence[MirroredDevice]], str]] = {
    "InsufficientGpuMemory": _for_memory,
    "InsufficientGpuCores": _for_cores,
    "GpuSlotsTaken": _for_slots,
    "GpuNotIdle": _for_number,
    "GpuInExclusiveUse": _for_number,
    "GpuInstancesTaken": _for_number,
    "GpusDoNotFitTogether": _for_number,
}
"""By the reason that excludes the empty node; with any other, waiting is not advised anyway."""

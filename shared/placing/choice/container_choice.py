"""The choice of devices on one node for a container: shares, or MIG instances; pure."""

from collections.abc import Callable, Sequence

from shared.model.device import IDLE_BEFORE, DeviceMode, isolation_allows, required_memory_mib
from shared.model.request import GpuRequest, PodRequest, SharingPolicy, TopologyScope
from shared.placing.choice.device_order import ordered_devices
from shared.placing.choice.device_topology import (
    best_linked_set,
    topology_location,
    topology_matters,
)
from shared.placing.choice.picks import NO_POD_USE, DevicePick, PodDeviceUses
from shared.placing.mig_instances import find_instance, instance_mib
from shared.placing.mirror.node_mirror import MirroredDevice

ContainerChooser = Callable[
    [GpuRequest, PodRequest, Sequence[MirroredDevice], PodDeviceUses], list[DevicePick] | None
]
"""Returns a device for every share of one container, or None if too few devices fit."""


def choose_shared_devices(
    container: GpuRequest,
    request: PodRequest,
    devices: Sequence[MirroredDevice],
    pod_uses: PodDeviceUses,
) -> list[DevicePick] | None:
    """Choose devices on which HAMi-core enforces shares."""
    wanted, chosen = container.gpus, list[DevicePick]()
    if wanted > len(devices):
        return None
    free_cores, takes_slot = required_free_cores(container), _takes_slot(container)
    constrained = _is_constrained(container, request)
    devices = _candidates(request, devices, pod_uses)
    enough = _enough(container, request, devices)
    for device in ordered_devices(request, devices, pod_uses):
        if (device.free_slot_cores if takes_slot else device.free_cores) < free_cores:
            continue
        memory_mib = share_mib(container, device)
        if device.used_mib + memory_mib > device.total_mib:
            continue
        if (
            not (constrained or device.isolation_restricted)
            or _meets_constraints(container, request, device)
        ) and _fits_beside(container, device, memory_mib, pod_uses):
            chosen.append((container, device, memory_mib, None))
            if len(chosen) == enough:
                break
    return _best_together(container, request, chosen)


def _takes_slot(container: GpuRequest) -> bool:
    """Return whether the container takes one of the slots that the device itself offers."""
    return container.slotted and not container.slots


def _is_constrained(container: GpuRequest, request: PodRequest) -> bool:
    """Return whether free memory and cores alone do not decide about a device."""
    return (
        container.sharing in IDLE_BEFORE
        or bool(request.anti_affinity_groups)
        or container.slots > 0
        or container.strict
    )


def _meets_constraints(container: GpuRequest, request: PodRequest, device: MirroredDevice) -> bool:
    if container.sharing in IDLE_BEFORE and device.shares:
        return False
    if not device.anti_affinity_groups.isdisjoint(request.anti_affinity_groups):
        return False
    if container.slots and container.slotted and device.shares >= container.slots:
        return False
    if container.strict or device.isolation_restricted:
        return isolation_allows(container, device.device)
    return True


def _fits_beside(
    container: GpuRequest, device: MirroredDevice, memory_mib: int, pod_uses: PodDeviceUses
) -> bool:
    """Return whether a share fits on the device beside those of the pod's other containers."""
    pod_use = pod_uses.get(device)
    if pod_use is None:
        return True
    shares = device.shares + pod_use.shares
    return (
        not pod_use.exclusive
        and device.used_mib + pod_use.memory_mib + memory_mib <= device.total_mib
        and device.used_cores + pod_use.cores_percent + required_free_cores(container) <= 100
        and not (container.sharing in IDLE_BEFORE and pod_use.shares)
        and (not container.slotted or shares < (container.slots or device.slots))
    )


def choose_mig_instances(
    container: GpuRequest,
    request: PodRequest,
    devices: Sequence[MirroredDevice],
    pod_uses: PodDeviceUses,
) -> list[DevicePick] | None:
    """Choose MIG instances. Each has cores of its own and is used by one container only."""
    groups, chosen = request.anti_affinity_groups, list[DevicePick]()
    devices = _candidates(request, devices, pod_uses)
    enough = _enough(container, request, devices)
    for device in ordered_devices(request, devices, pod_uses):
        need_mib = instance_mib(container, device.device, device.largest_instance_mib)
        free_mib = device.free_instance_mib
        if (
            not free_mib
            or free_mib < need_mib
            or not device.anti_affinity_groups.isdisjoint(groups)
        ):
            continue
        layout, taken, free_mib = instance_availability(device, container, request, pod_uses)
        found = find_instance(
            device.layout_shapes, layout, taken, need_mib=need_mib, free_mib=free_mib
        )
        if found is not None:
            chosen.append((container, device, found[1], found[0]))
            if len(chosen) == enough:
                break
    return _best_together(container, request, chosen)


CONTAINER_CHOOSERS = {
    DeviceMode.HAMI_CORE: choose_shared_devices,
    DeviceMode.MIG: choose_mig_instances,
}


def instance_availability(
    device: MirroredDevice,
    container: GpuRequest,
    request: PodRequest,
    pod_uses: PodDeviceUses,
) -> tuple[str, int, int]:
    """Return, for a container, the pinned layout, the taken positions and the free MiB.

    The pod's containers that run beside it count too. Of two containers that do not run at the same
    time, one may use the instance of the other, and all share one layout.
    """
    pod_use, free_mib = pod_uses.get(device, NO_POD_USE), device.total_mib - device.used_mib
    positions, beside_mib = pod_use.instances_beside(container, request.containers)
    layout = device.layout or pod_use.layout
    return layout, device.taken_positions | positions, free_mib - beside_mib


def _candidates(
    request: PodRequest, devices: Sequence[MirroredDevice], pod_uses: PodDeviceUses
) -> Sequence[MirroredDevice]:
    """Leave out devices that the pod uses already, or whose required location is not known."""
    if request.distinct_devices and pod_uses:
        devices = [device for device in devices if not pod_uses.get(device, NO_POD_USE).shares]
    scope = request.topology_scope
    if scope is not TopologyScope.NODE:
        devices = [device for device in devices if topology_location(device, scope) is not None]
    return devices


def _enough(container: GpuRequest, request: PodRequest, devices: Sequence[MirroredDevice]) -> int:
    """Return how many fitting devices to collect: all of them where the topology decides."""
    if container.gpus > 1 and topology_matters(container, request, devices):
        return len(devices)
    return container.gpus


def _best_together(
    container: GpuRequest, request: PodRequest, fitting: list[DevicePick]
) -> list[DevicePick] | None:
    """Choose those of the fitting devices, given in order of trying, that are linked best."""
    wanted = container.gpus
    if len(fitting) < wanted:
        return None
    if wanted < 2:
        return fitting[:wanted]
    chosen = fitting[:wanted]
    if topology_matters(container, request, [fitting[0][1]]):
        positions = best_linked_set(request, [pick[1] for pick in fitting], wanted)
        if positions is None:
            return None
        chosen = [fitting[position] for position in positions]
    if container.whole:
        chosen.sort(key=lambda pick: pick[1].index)
    return chosen


def required_free_cores(container: GpuRequest) -> int:
    """Return the percent of a device's cores that must be free for the container's share.

    A share without cores is still not placed where all of them are reserved, unless its sharing
    policy is best effort.
    """
    if container.whole:
        return 100
    return container.cores_percent or int(container.sharing is not SharingPolicy.BEST_EFFORT)


def required_units(container: GpuRequest) -> int:
    """Return the requested units of memory, 0 if memory is not requested in units."""
    return container.memory_units or 0


def share_mib(container: GpuRequest, device: MirroredDevice) -> int:
    """Return the MiB of a share: `shared.model.device.required_memory_mib` on the mirror."""
    units = container.memory_units
    if units is None or container.memory_percent is not None or container.memory_bytes is not None:
        return required_memory_mib(container, device.device)
    return device.whole_units_mib if container.whole else units * device.unit_mib

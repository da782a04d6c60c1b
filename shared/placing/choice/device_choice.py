"""The choice of devices on one node for a pod; pure.

All devices of a pod are in one mode. `PodRequest.prefer_mig` decides whether shares or instances
are tried first. `container_choice` chooses for each container.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Literal

from msgspec import structs

from shared.model.denial import Denial
from shared.model.devices.device import (
    IDLE_BEFORE,
    Device,
    DeviceMode,
    holding_of,
    model_label,
    numa_cpus_name,
    required_cores_percent,
    required_memory_mib,
)
from shared.model.devices.enforcers import INSTANCE, NO_DEMAND, UNHELD, SharingMode
from shared.model.leases.lease import MigPlacement, RequestedUnits, Share
from shared.model.quantity import peak
from shared.model.requests.request import (
    DeviceOrder,
    DeviceSelection,
    GpuRequest,
    PodRequest,
    SharingPolicy,
    TopologyScope,
)
from shared.placing.choice.container_choice import (
    CONTAINER_CHOOSERS,
    NO_POD_USES,
    ContainerChooser,
    DevicePick,
    PodDeviceUse,
    add_pod_uses,
    choose_mig_instances,
    choose_shared_devices,
    ordered_devices,
    required_free_cores,
)
from shared.placing.mig_instances import largest_first
from shared.placing.mirror.node_mirror import MirroredDevice, MirroredNode
from shared.placing.node_filters import check_all, has_too_little

UNCOUNTED = 1 << 60
"""More CPUs than any NUMA node has. An integer, as compiled code has no other type there."""
CACHED_MODELS = 4096
TYPE_PREFIX = "NVIDIA-"
"""Types in annotations match the model with this prefix, as Volcano registers it."""


def is_selective(selection: DeviceSelection) -> bool:
    return bool(
        selection.types
        or selection.not_types
        or selection.models
        or selection.not_models
        or selection.uuids
        or selection.not_uuids
        or selection.mode is not None
    )


def device_excluded(selection: DeviceSelection, device: Device) -> Denial | None:
    """A UUID both allowed and denied is denied."""
    if not is_selective(selection):
        return None
    if selection.mode is not None and device.mode.value != selection.mode:
        return Denial("GpuModeMismatch", f"it is in {device.mode} mode")
    if selection.uuids and device.uuid not in selection.uuids:
        return Denial("GpuUuidExcluded", "its UUID is not among those the pod allows")
    if device.uuid in selection.not_uuids:
        return Denial("GpuUuidExcluded", "the pod denies its UUID")
    return model_excluded(selection, device.model)


def selects_only_models(selection: DeviceSelection) -> bool:
    return not (selection.uuids or selection.not_uuids or selection.mode is not None)


def _type_text(text: str) -> str:
    """Labels of nodes have dashes for spaces."""
    return text.lower().replace(" ", "-")


@lru_cache(CACHED_MODELS)
def model_excluded(selection: DeviceSelection, model: str) -> Denial | None:
    kind = _type_text(f"{TYPE_PREFIX}{model}")
    label = model_label(model)
    type_allowed = not selection.types or any(_type_text(part) in kind for part in selection.types)
    if not type_allowed or (selection.models and label not in selection.models):
        allowed = ", ".join(selection.types + selection.models)
        return Denial("GpuTypeExcluded", f"{model} is none of {allowed}")
    denied = [part for part in selection.not_types if _type_text(part) in kind]
    denied += [name for name in selection.not_models if name == label]
    if denied:
        return Denial("GpuTypeExcluded", f"the pod denies {denied[0]}: {model}")
    return None


DeviceChooser = Callable[[MirroredNode], list[DevicePick] | None]


def choose_devices(request: PodRequest, node: MirroredNode) -> list[DevicePick] | None:
    """Return a device for every share of the pod, or None.

    Shares of one container are on different devices; shares of two may be on one.
    """
    if not request.containers:
        return []
    devices = allowed_devices(request.selection, node)
    if not node.aligns_numa:
        return _choose_in_modes(request, node, devices)
    request = with_numa_scope(request, node)
    devices = [device for device in devices if not cpus_refusal(request, device)]
    picks = _choose_in_modes(request, node, _tightest_first(request, devices))
    # The containers' CPUs may be too many together.
    return picks if picks and not has_too_little(node.free_resources, numa_cpus(picks)) else None


def _choose_in_modes(
    request: PodRequest, node: MirroredNode, devices: Sequence[MirroredDevice]
) -> list[DevicePick] | None:
    modes = allowed_modes(request)
    if not node.has_divided and DeviceMode.HAMI_CORE in modes:
        return _choose(request, devices, choose_shared_devices)
    for mode in modes:
        picks = _choose(request, devices_in_mode(devices, mode), CONTAINER_CHOOSERS[mode])
        if picks is not None:
            return picks
    return None


def with_numa_scope(request: PodRequest, node: MirroredNode) -> PodRequest:
    if (
        request.topology_scope is TopologyScope.NODE
        and any(container.gpus > 1 for container in request.containers)
        and any(device.device.one_numa for device in node.devices)
    ):
        return structs.replace(request, topology_scope=TopologyScope.NUMA)
    return request


def numa_cpus(picks: Sequence[DevicePick]) -> dict[str, int]:
    """Return CPUs by `numa_cpus_name`.

    The kubelet may choose any NUMA node of a container's devices, so its CPUs are taken on each.
    """
    taken: dict[str, dict[str, tuple[int, bool]]] = {}
    for container, device, _, _ in picks:
        numa = device.device.numa
        if container.exclusive_cpus and numa is not None:
            name = numa_cpus_name(numa)
            if name in device.node.free_resources:
                of_containers = taken.setdefault(name, {})
                of_containers[container.container] = container.exclusive_cpus, container.init
    return {name: peak(cpus.values(), 0) for name, cpus in taken.items()}


def cpus_refusal(request: PodRequest, device: MirroredDevice) -> Denial | None:
    """Return why the kubelet would reject the pod: too few CPUs beside the device."""
    wanted = max([container.exclusive_cpus for container in request.containers])
    free = _free_cpus(device)
    if not wanted or wanted <= free:
        return None
    text = f"{wanted} CPUs are requested exclusively, {free} are free on its NUMA node"
    return Denial("InsufficientNumaCpus", text)


def _free_cpus(device: MirroredDevice) -> int:
    numa = device.device.numa
    if numa is None:
        return UNCOUNTED
    return device.node.free_resources.get(numa_cpus_name(numa), UNCOUNTED)


def _tightest_first(request: PodRequest, devices: list[MirroredDevice]) -> Sequence[MirroredDevice]:
    """Of equal devices, those with the fewest CPUs beside them come first."""
    wanted = peak(
        [(container.exclusive_cpus, container.init) for container in request.containers], 0
    )
    if not wanted:
        return devices
    return sorted(
        devices,
        key=lambda device: ((free := _free_cpus(device)) < wanted, free),
        reverse=request.device_order is DeviceOrder.LAST,
    )


def devices_on(request: PodRequest, node: MirroredNode) -> list[DevicePick] | None:
    if check_all(request, node.facts, node.free_resources, node.serving) is not None:
        return None
    return choose_devices(request, node)


def fits(request: PodRequest, node: MirroredNode) -> bool:
    return devices_on(request, node) is not None


def allowed_devices(selection: DeviceSelection, node: MirroredNode) -> Sequence[MirroredDevice]:
    if not is_selective(selection):
        return node.devices
    if node.model and selects_only_models(selection):
        return () if model_excluded(selection, node.model) else node.devices
    return [device for device in node.devices if not device_excluded(selection, device.device)]


def device_chooser(request: PodRequest) -> DeviceChooser:
    if is_simple(request):
        return _simple_device_chooser(request)
    return lambda node: choose_devices(request, node)


def _simple_device_chooser(request: PodRequest) -> DeviceChooser:
    """Choose the first devices, in the pod's order, that have the units and the cores free."""
    [container] = request.containers
    gpus = container.gpus
    free_cores = required_free_cores(container)
    units = container.memory_units or 0
    slotted = container.slotted
    in_order = _SIMPLE_ORDERS[request.device_order]
    by_links = gpus > 1 and request.prefer_links
    selection = request.selection
    selective = is_selective(request.selection)

    def choose(node: MirroredNode) -> list[DevicePick] | None:
        if (
            node.has_divided
            or node.isolation_restricted
            or node.aligns_numa
            or (by_links and node.has_topology)
        ):
            return choose_devices(request, node)
        picks = list[DevicePick]()
        devices = allowed_devices(selection, node) if selective else node.devices
        for device in in_order(devices):
            if device.free_units < units:
                continue
            if (device.free_slot_cores if slotted else device.free_cores) >= free_cores:
                picks.append((container, device, units * device.unit_mib, None))
                if len(picks) == gpus:
                    return picks
        return None

    return choose


_SIMPLE_ORDERS: Mapping[
    DeviceOrder, Callable[[Sequence[MirroredDevice]], Iterable[MirroredDevice]]
] = {
    DeviceOrder.LAST: reversed,
    DeviceOrder.FIRST: iter,
    DeviceOrder.BINPACK: lambda devices: sorted(devices, key=attrgetter("used_mib"), reverse=True),
}


def is_simple(request: PodRequest) -> bool:
    return (
        len(request.containers) == 1
        and request.device_order in _SIMPLE_ORDERS
        and not request.anti_affinity_groups
        and request.topology_scope is TopologyScope.NODE
        and _has_simple_amounts(request.containers[0])
    )


def _has_simple_amounts(container: GpuRequest) -> bool:
    return (
        bool(container.memory_units)
        and container.memory_percent is None
        and container.memory_bytes is None
        and not container.slots
        and container.sharing not in IDLE_BEFORE
        and not container.strict
        and container.held_by == NO_DEMAND
    )


def build_shares(picks: Sequence[DevicePick]) -> tuple[Share, ...]:
    return tuple(
        [
            share_of(container, device.device, memory_mib, instance, device.mode)
            for container, device, memory_mib, instance in picks
        ]
    )


def share_of(
    container: GpuRequest,
    device: Device,
    memory_mib: int,
    place: MigPlacement | None = None,
    mode: SharingMode | Literal[""] = "",
) -> Share:
    holding = INSTANCE if place is not None else holding_of(container, device, mode) or UNHELD
    requested: RequestedUnits | None = None
    if place is not None:
        requested = _terms(container, required_memory_mib(container, device))
    elif container.records_requested_units:
        requested = _terms(container, memory_mib)
    return Share(
        container=container.container,
        device=device.uuid,
        index=device.index,
        device_mib=device.memory_mib,
        device_model=device.model,
        memory_mib=memory_mib,
        cores_percent=required_cores_percent(container),
        unit_mib=device.unit_mib,
        whole=container.whole,
        slotted=container.slotted,
        init=container.init,
        sharing=container.sharing if place is None else SharingPolicy.SHARED,
        slots=container.slots,
        mig=place,
        memory=holding.memory,
        compute=holding.compute,
        mode=holding.mode,
        requested_units=requested,
    )


def _terms(container: GpuRequest, memory_mib: int) -> RequestedUnits:
    return RequestedUnits(
        memory_mib=memory_mib,
        memory_bytes=None if container.whole else container.memory_bytes,
        memory_percent=None if container.whole else container.memory_percent,
    )


def device_key(request: PodRequest) -> Hashable:
    """Requests that fit the same devices have equal keys."""
    return (
        request.containers,
        request.same_device,
        request.selection,
        request.distinct_devices,
        request.anti_affinity_groups,
        request.topology_scope,
        request.prefer_links,
        request.prefer_mig,
        request.allocation_weights,
        request.device_order,
    )


_SHARES_ONLY = (DeviceMode.HAMI_CORE,)
_INSTANCES_ONLY = (DeviceMode.MIG,)
_SHARES_FIRST = (DeviceMode.HAMI_CORE, DeviceMode.MIG)
_INSTANCES_FIRST = (DeviceMode.MIG, DeviceMode.HAMI_CORE)
_REPLICAS_ONLY = (DeviceMode.REPLICAS,)
_WHOLE_FIRST = (DeviceMode.HAMI_CORE, DeviceMode.REPLICAS)


def allowed_modes(request: PodRequest) -> tuple[DeviceMode, ...]:
    if any(container.replica_only for container in request.containers):
        return _REPLICAS_ONLY
    if allows_replicas(request):
        return _WHOLE_FIRST
    if not allows_instances(request):
        return _SHARES_ONLY
    demands = {container.held_by.memory for container in request.containers}
    if "mig" in demands or any(
        container.strict and container.sharing is not SharingPolicy.EXCLUSIVE
        for container in request.containers
    ):
        return _INSTANCES_ONLY
    if demands != {None}:
        return _SHARES_ONLY
    return _INSTANCES_FIRST if request.prefer_mig else _SHARES_FIRST


def allows_instances(request: PodRequest) -> bool:
    return bool(request.containers) and all(
        container.mig_allowed and not container.whole for container in request.containers
    )


def allows_replicas(request: PodRequest) -> bool:
    return bool(request.containers) and all(
        container.number_of and not container.strict and container.held_by == NO_DEMAND
        for container in request.containers
    )


def devices_in_mode(devices: Sequence[MirroredDevice], mode: DeviceMode) -> list[MirroredDevice]:
    return [device for device in devices if device.device.mode is mode]


def _choose(
    request: PodRequest, devices: Sequence[MirroredDevice], chooser: ContainerChooser
) -> list[DevicePick] | None:
    if len(request.containers) == 1:
        return chooser(request.containers[0], request, devices, NO_POD_USES)
    if not request.same_device:
        return _choose_for_all(request, devices, chooser)
    for device in ordered_devices(request, devices, NO_POD_USES):
        picks = _choose_for_all(request, (device,), chooser)
        if picks is not None:
            return picks
    return None


def _choose_for_all(
    request: PodRequest, devices: Sequence[MirroredDevice], chooser: ContainerChooser
) -> list[DevicePick] | None:
    """Choose for the containers in order; if that fails with MIG, for the largest need first.

    The first instance decides on the layout, which may have none for a larger need.
    """
    containers = request.containers
    picks = _choose_in_order(containers, request, devices, chooser)
    if picks is None and chooser is choose_mig_instances:
        picks = _choose_in_order(largest_first(containers), request, devices, chooser)
        if picks is not None:
            picks.sort(key=lambda pick: containers.index(pick[0]))
    return picks


def _choose_in_order(
    containers: Iterable[GpuRequest],
    request: PodRequest,
    devices: Sequence[MirroredDevice],
    chooser: ContainerChooser,
) -> list[DevicePick] | None:
    picks: list[DevicePick] = []
    pod_uses: dict[MirroredDevice, PodDeviceUse] = {}
    for container in containers:
        chosen = chooser(container, request, devices, pod_uses)
        if chosen is None:
            return None
        picks += chosen
        add_pod_uses(chosen, pod_uses)
    return picks

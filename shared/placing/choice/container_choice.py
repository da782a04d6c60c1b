"""The choice of devices on one node for a container; pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from shared.model.devices.device import (
    IDLE_BEFORE,
    DeviceMode,
    isolation_allows,
    required_cores_percent,
    required_memory_mib,
)
from shared.model.devices.enforcers import NO_DEMAND
from shared.model.leases.lease import MigPlacement
from shared.model.requests.request import (
    DeviceOrder,
    GpuRequest,
    PodRequest,
    SharingPolicy,
    TopologyScope,
)
from shared.placing.mig_instances import find_instance, instance_mib
from shared.placing.mirror.node_mirror import MirroredDevice

DevicePick = tuple[GpuRequest, MirroredDevice, int, MigPlacement | None]
"""Container, device, MiB of the share, and the MIG instance if it is one."""


@dataclass(slots=True)
class PodDeviceUse:
    memory_mib: int = 0
    cores_percent: int = 0
    shares: int = 0
    exclusive: bool = False
    layout: str = ""
    """Instances of init containers pin the layout, too."""
    instances: list[tuple[GpuRequest, int, int]] = field(default_factory=list)
    """Containers with the MiB and the position of their instances; init containers, too."""

    def instances_beside(self, container: GpuRequest, pod: Sequence[GpuRequest]) -> tuple[int, int]:
        """Return the positions, as bits, and the MiB beside a container."""
        positions = 0
        memory_mib = 0
        place = pod.index(container) if self.instances else 0
        for other, taken_mib, position in self.instances:
            earlier = other if pod.index(other) < place else container
            if not earlier.init:
                positions |= 1 << position
                memory_mib += taken_mib
        return positions, memory_mib


PodDeviceUses = Mapping[MirroredDevice, PodDeviceUse]

NO_POD_USES: PodDeviceUses = {}
NO_POD_USE = PodDeviceUse()


def add_pod_uses(picks: Sequence[DevicePick], pod_uses: dict[MirroredDevice, PodDeviceUse]) -> None:
    """Of an init container, only instances stay."""
    for container, device, memory_mib, instance in picks:
        if container.init and instance is None:
            continue
        pod_use = pod_uses.setdefault(device, PodDeviceUse())
        if instance is not None:
            pod_use.layout = instance.layout
            pod_use.instances.append((container, memory_mib, instance.position))
        if container.init:
            continue
        pod_use.memory_mib += memory_mib
        pod_use.shares += 1
        if instance is None:
            pod_use.cores_percent += required_cores_percent(container)
            pod_use.exclusive |= container.sharing is SharingPolicy.EXCLUSIVE


ContainerChooser = Callable[
    [GpuRequest, PodRequest, Sequence[MirroredDevice], PodDeviceUses], list[DevicePick] | None
]
"""Returns a device for every share, or None if too few fit."""


def choose_shared_devices(
    container: GpuRequest,
    request: PodRequest,
    devices: Sequence[MirroredDevice],
    pod_uses: PodDeviceUses,
) -> list[DevicePick] | None:
    wanted = container.gpus
    chosen = list[DevicePick]()
    if wanted > len(devices):
        return None
    free_cores = required_free_cores(container)
    takes_slot = _takes_slot(container)
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
    return container.slotted and not container.slots


def _is_constrained(container: GpuRequest, request: PodRequest) -> bool:
    return (
        container.sharing in IDLE_BEFORE
        or bool(request.anti_affinity_groups)
        or container.slots > 0
        or container.strict
        or container.held_by != NO_DEMAND
    )


def _meets_constraints(container: GpuRequest, request: PodRequest, device: MirroredDevice) -> bool:
    if container.sharing in IDLE_BEFORE and device.shares:
        return False
    if not device.anti_affinity_groups.isdisjoint(request.anti_affinity_groups):
        return False
    if container.slots and container.slotted and device.shares >= container.slots:
        return False
    if container.strict or container.held_by != NO_DEMAND or device.isolation_restricted:
        return isolation_allows(container, device.device, device.mode)
    return True


def _fits_beside(
    container: GpuRequest, device: MirroredDevice, memory_mib: int, pod_uses: PodDeviceUses
) -> bool:
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
    groups = request.anti_affinity_groups
    chosen = list[DevicePick]()
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
        instance = find_instance(
            device.layout_shapes, layout, taken, need_mib=need_mib, free_mib=free_mib
        )
        if instance is not None:
            chosen.append((container, device, instance[1], instance[0]))
            if len(chosen) == enough:
                break
    return _best_together(container, request, chosen)


def choose_replicas(
    container: GpuRequest,
    request: PodRequest,
    devices: Sequence[MirroredDevice],
    pod_uses: PodDeviceUses,
) -> list[DevicePick] | None:
    chosen = list[DevicePick]()
    devices = _candidates(request, devices, pod_uses)
    enough = _enough(container, request, devices)
    for device in ordered_devices(request, devices, pod_uses):
        replicas = device.replicas
        if (
            replicas is None
            or not device.free_replicas
            or replicas.refusal(container) is not None
            or not device.anti_affinity_groups.isdisjoint(request.anti_affinity_groups)
        ):
            continue
        replica = replicas.request_of(container, device.total_mib)
        memory_mib = replicas.memory_mib(device.total_mib)
        if isolation_allows(replica, device.device, device.mode) and _fits_beside(
            replica, device, memory_mib, pod_uses
        ):
            chosen.append((replica, device, memory_mib, None))
            if len(chosen) == enough:
                break
    return _best_together(container, request, chosen)


CONTAINER_CHOOSERS = {
    DeviceMode.HAMI_CORE: choose_shared_devices,
    DeviceMode.MIG: choose_mig_instances,
    DeviceMode.REPLICAS: choose_replicas,
}


def instance_availability(
    device: MirroredDevice,
    container: GpuRequest,
    request: PodRequest,
    pod_uses: PodDeviceUses,
) -> tuple[str, int, int]:
    """Return the pinned layout, the taken positions and the free MiB for a container.

    Containers that do not run at the same time may use one instance, but all share one layout.
    """
    pod_use = pod_uses.get(device, NO_POD_USE)
    free_mib = device.total_mib - device.used_mib
    positions, beside_mib = pod_use.instances_beside(container, request.containers)
    layout = device.layout or pod_use.layout
    return layout, device.taken_positions | positions, free_mib - beside_mib


def _candidates(
    request: PodRequest, devices: Sequence[MirroredDevice], pod_uses: PodDeviceUses
) -> Sequence[MirroredDevice]:
    if request.distinct_devices and pod_uses:
        devices = [device for device in devices if not pod_uses.get(device, NO_POD_USE).shares]
    scope = request.topology_scope
    if scope is not TopologyScope.NODE:
        devices = [device for device in devices if topology_location(device, scope) is not None]
    return devices


def _enough(container: GpuRequest, request: PodRequest, devices: Sequence[MirroredDevice]) -> int:
    """Where the topology decides, all fitting devices are collected."""
    if container.gpus > 1 and topology_matters(container, request, devices):
        return len(devices)
    return container.gpus


def _best_together(
    container: GpuRequest, request: PodRequest, fitting: list[DevicePick]
) -> list[DevicePick] | None:
    """Choose those of `fitting`, in order of trying, that are linked best."""
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
    """Return the percent of a device's cores that must be free.

    A share without cores is not placed where all are reserved, unless it is best effort.
    """
    if container.whole:
        return 100
    return container.cores_percent or int(container.sharing is not SharingPolicy.BEST_EFFORT)


def share_mib(container: GpuRequest, device: MirroredDevice) -> int:
    """`required_memory_mib`, without reading the device where possible."""
    units = container.memory_units
    if device.replicas is not None:
        return device.replicas.memory_mib(device.total_mib)
    if units is None or container.memory_percent is not None or container.memory_bytes is not None:
        return required_memory_mib(container, device.device)
    return device.whole_units_mib if container.whole else units * device.unit_mib


AllocationWeights = tuple[int, int, int]


def ordered_devices(
    request: PodRequest, devices: Sequence[MirroredDevice], pod_uses: PodDeviceUses
) -> Sequence[MirroredDevice]:
    order = request.device_order
    if order is DeviceOrder.LAST:
        return devices[::-1]
    if order is DeviceOrder.FIRST:
        return devices
    if not pod_uses:
        key = _KEYS_WITHOUT_POD_USE.get(order)
        if key is not None:
            return sorted(devices, key=key)
    key_of = _KEYS[order]
    return sorted(
        devices,
        key=lambda device: key_of(
            device, pod_uses.get(device, NO_POD_USE), request.allocation_weights
        ),
    )


_KEYS_WITHOUT_POD_USE: Mapping[DeviceOrder, Callable[[MirroredDevice], int]] = {
    DeviceOrder.BINPACK: lambda device: -device.used_mib,
    DeviceOrder.SPREAD: lambda device: device.shares,
}
"""Orders that need no weights, while the pod uses no device."""


def _allocated(device: MirroredDevice, pod_use: PodDeviceUse, weights: AllocationWeights) -> int:
    slots, cores, memory = weights
    return (
        slots * 1_000_000 * (device.shares + pod_use.shares) // max(device.slots, 1)
        + cores * 10_000 * (device.used_cores + pod_use.cores_percent)
        + memory * 1_000_000 * (device.used_mib + pod_use.memory_mib) // max(device.total_mib, 1)
    )


_KEYS: Mapping[
    DeviceOrder, Callable[[MirroredDevice, PodDeviceUse, AllocationWeights], tuple[int, int]]
] = {
    DeviceOrder.BINPACK: lambda device, pod_use, _: (0, -device.used_mib - pod_use.memory_mib),
    DeviceOrder.SPREAD: lambda device, pod_use, _: (0, device.shares + pod_use.shares),
    DeviceOrder.TIGHTEST: lambda device, pod_use, _: (
        -device.used_cores - pod_use.cores_percent,
        -device.used_mib - pod_use.memory_mib,
    ),
    DeviceOrder.MOST_ALLOCATED: lambda *facts: (0, -_allocated(*facts)),
    DeviceOrder.LEAST_ALLOCATED: lambda *facts: (0, _allocated(*facts)),
    DeviceOrder.LEAST_LINKED: lambda device, *_: (0, sum(device.device.links.values())),
}


EXHAUSTIVE_DEVICES = 8
"""With more devices, sets grow greedily from each: 4 of 8 devices are 70 sets."""
COMPARED_DEVICES = 32
"""More than any node has: of a node whose agent reports so many, only the first are compared."""
CACHED_SETS = 64

Positions = tuple[int, ...]


def topology_location(device: MirroredDevice, scope: TopologyScope) -> str | int | None:
    if scope is TopologyScope.NUMA:
        return device.device.numa
    return device.device.pcie or None


def topology_matters(
    container: GpuRequest, request: PodRequest, devices: Sequence[MirroredDevice]
) -> bool:
    if container.gpus < 2:
        return False
    by_links = request.prefer_links and bool(devices) and devices[0].node.has_topology
    return by_links or request.topology_scope is not TopologyScope.NODE


def best_linked_set(
    request: PodRequest, devices: Sequence[MirroredDevice], wanted: int
) -> Positions | None:
    """Return which `wanted` devices are linked best, or None if no set is within the scope.

    HAMi's pair scores decide, then the pairs on one NUMA node, then the order.
    """
    best: tuple[int, Positions] | None = None
    for group in _groups(request.topology_scope, devices):
        if len(group) < wanted:
            continue
        score = 0
        positions = tuple(range(wanted))
        if request.prefer_links:
            score, positions = _best_linked([devices[at] for at in group], wanted)
        if best is None or score > best[0]:
            best = score, tuple(group[at] for at in positions)
    return best[1] if best else None


def _groups(scope: TopologyScope, devices: Sequence[MirroredDevice]) -> list[list[int]]:
    if scope is TopologyScope.NODE:
        return [list(range(len(devices)))]
    groups: dict[str | int | None, list[int]] = {}
    for position, device in enumerate(devices):
        groups.setdefault(topology_location(device, scope), []).append(position)
    groups.pop(None, None)
    return list(groups.values())


def _best_linked(devices: Sequence[MirroredDevice], wanted: int) -> tuple[int, Positions]:
    if wanted >= COMPARED_DEVICES:
        return 0, tuple(range(wanted))
    devices = devices[:COMPARED_DEVICES]
    cache = devices[0].node.linked_sets
    key = (wanted, *[device.uuid for device in devices])
    best = cache.get(key)
    if best is None:
        if len(cache) >= CACHED_SETS:
            cache.clear()
        search = _best_of_all if len(devices) <= EXHAUSTIVE_DEVICES else _best_grown
        best = cache[key] = search(_pair_scores(devices), wanted)
    return best


PairScores = list[list[int]]


def _pair_scores(devices: Sequence[MirroredDevice]) -> PairScores:
    return [[_pair_score(device, other) for other in devices] for device in devices]


_LINK_WEIGHT = 1 << 10
"""Links come before NUMA nodes: no set has so many pairs on one NUMA node."""


def _pair_score(device: MirroredDevice, other: MirroredDevice) -> int:
    link = device.device.links.get(other.uuid, 0)
    if link != other.device.links.get(device.uuid, 0):
        link = 0
    same_numa = device.device.numa is not None and device.device.numa == other.device.numa
    return link * _LINK_WEIGHT + same_numa


def _best_of_all(scores: PairScores, wanted: int) -> tuple[int, Positions]:
    sets = combinations(range(len(scores)), wanted)
    return max(
        ((_set_score(scores, positions), positions) for positions in sets),
        key=lambda scored: scored[0],
    )


def _set_score(scores: PairScores, positions: Positions) -> int:
    return sum(scores[position][other] for position, other in combinations(positions, 2))


def _best_grown(scores: PairScores, wanted: int) -> tuple[int, Positions]:
    """Grow a set from every device by the best linked one."""
    best: tuple[int, Positions] = (-1, ())
    for seed in range(len(scores)):
        positions = [seed]
        gains = list(scores[seed])
        while len(positions) < wanted:
            left = (position for position in range(len(scores)) if position not in positions)
            added = max(left, key=gains.__getitem__)
            positions.append(added)
            gains = [gain + more for gain, more in zip(gains, scores[added], strict=True)]
        ordered = tuple(sorted(positions))
        score = _set_score(scores, ordered)
        if score > best[0]:
            best = score, ordered
    return best

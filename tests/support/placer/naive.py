"""Placing by looking at every node and device: slow, plain, and the judge of the placer's index.

Whether a share fits is what the text of a refusal says; devices are tried in order, and of several
all sets are compared.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import inf

from msgspec import structs

from shared.model.devices.device import (
    Device,
    DeviceMode,
    DeviceUse,
    device_refusal,
    numa_cpus_name,
    request_on,
    required_memory_mib,
)
from shared.model.devices.enforcers import NO_DEMAND
from shared.model.leases.lease import MigPlacement, Share
from shared.model.leases.ledger import LedgerNode
from shared.model.quantity import peak
from shared.model.requests.request import (
    DeviceOrder,
    GpuRequest,
    PodRequest,
    SharingPolicy,
    TopologyScope,
)
from shared.placing.choice.device_choice import device_excluded, share_of
from shared.placing.mig_instances import largest_first
from shared.placing.node_filters import check_all, free_resources

DeviceState = tuple[Device, DeviceUse]
Given = tuple[Share, ...]
"""Shares of the pod's earlier containers."""


def fits_somewhere(request: PodRequest, nodes: Iterable[LedgerNode]) -> bool:
    return any(fit_on_node(request, node) is not None for node in nodes)


def fit_on_node(request: PodRequest, node: LedgerNode) -> Given | None:
    """Return the shares that the pod would get on this node, or None if it does not fit."""
    free = free_resources(node.facts, node.used)
    if check_all(request, node.facts, free, node.serving) is not None:
        return None
    if not request.containers:
        return ()
    several = any(container.gpus > 1 for container in request.containers)
    one_numa = several and any(device.one_numa for device, _ in node.devices)
    if one_numa and request.topology_scope is TopologyScope.NODE:
        request = structs.replace(request, topology_scope=TopologyScope.NUMA)
    for mode in _modes(request):
        for devices in _device_groups(request, node, mode):
            shares = _fit_containers(request.containers, request, devices)
            if shares is None and mode is DeviceMode.MIG:
                shares = _fit_containers(largest_first(request.containers), request, devices)
            if shares is not None:
                if not _has_all_cpus(request, node, shares):
                    return None
                names = [container.container for container in request.containers]
                return tuple(sorted(shares, key=lambda share: names.index(share.container)))
    return None


def _modes(request: PodRequest) -> list[DeviceMode]:
    """Return the modes of devices in the order of trying: whole devices come before replicas."""
    if all(
        container.number_of and not container.strict and container.held_by == NO_DEMAND
        for container in request.containers
    ):
        return [DeviceMode.HAMI_CORE, DeviceMode.REPLICAS]
    modes = [DeviceMode.HAMI_CORE, DeviceMode.MIG]
    return modes[::-1] if request.prefer_mig else modes


def _has_cpus(node: LedgerNode, device: Device, amounts: Iterable[int]) -> bool:
    return all(amount == 0 or amount <= _free_cpus(node, device) for amount in amounts)


def _free_cpus(node: LedgerNode, device: Device) -> float:
    if device.numa_cpus is None or device.numa is None:
        return inf
    return device.numa_cpus - node.used.get(numa_cpus_name(device.numa), 0)


def _has_all_cpus(request: PodRequest, node: LedgerNode, shares: Given) -> bool:
    """Return whether a NUMA node has CPUs for all containers that get one of its devices."""
    for device, _ in node.devices:
        on_numa = [d.uuid for d, _ in node.devices if d.numa == device.numa]
        there = {share.container for share in shares if share.device in on_numa}
        containers = [container for container in request.containers if container.container in there]
        together = peak(((container.exclusive_cpus, container.init) for container in containers), 0)
        if not _has_cpus(node, device, [together]):
            return False
    return True


def _device_groups(
    request: PodRequest, node: LedgerNode, mode: DeviceMode
) -> list[list[DeviceState]]:
    """Return the sets of devices to try in turn: all of the mode, or each of them alone."""
    allowed = [
        (device, use)
        for device, use in node.devices
        if device.mode is mode
        and device_excluded(request.selection, device) is None
        and device.index not in node.facts.excluded_devices
        and _has_cpus(node, device, (container.exclusive_cpus for container in request.containers))
    ]
    together = peak(
        ((container.exclusive_cpus, container.init) for container in request.containers), 0
    )
    if together:
        allowed.sort(
            key=lambda state: ((free := _free_cpus(node, state[0])) < together, free),
            reverse=request.device_order is DeviceOrder.LAST,
        )
    if request.same_device:
        return [[state] for state in _ordered(request, allowed, ())]
    return [allowed]


def _fit_containers(
    containers: Iterable[GpuRequest], request: PodRequest, devices: Sequence[DeviceState]
) -> Given | None:
    given: Given = ()
    for container in containers:
        fitting = _fitting_devices(container, request, devices, given)
        chosen = _best_linked(container.gpus, request, fitting)
        if chosen is None:
            return None
        if container.whole:
            chosen.sort(key=lambda share: share.index)
        given += tuple(chosen)
    return given


def _fitting_devices(
    container: GpuRequest, request: PodRequest, devices: Sequence[DeviceState], given: Given
) -> list[tuple[Device, Share]]:
    fitting = []
    for device, use in _ordered(request, devices, given):
        in_use = any(share.device == device.uuid and not share.init for share in given)
        if (request.distinct_devices and in_use) or _location(request, device) is None:
            continue
        fit = _fit_instance if device.mode is DeviceMode.MIG else _fit_share
        share = fit(container, request, device, use, given)
        if share is not None:
            fitting.append((device, share))
    return fitting


def _fit_share(
    container: GpuRequest, request: PodRequest, device: Device, use: DeviceUse, given: Given
) -> Share | None:
    memory_mib = required_memory_mib(container, device)
    taken = request_on(container, device)
    refusal = device_refusal(
        container,
        device,
        use,
        own=_use_of(device, given),
        memory_mib=memory_mib,
        anti_affinity_groups=request.anti_affinity_groups,
    )
    return share_of(taken, device, memory_mib) if refusal is None else None


def _fit_instance(
    container: GpuRequest, request: PodRequest, device: Device, use: DeviceUse, given: Given
) -> Share | None:
    """Return the smallest free instance that is large enough, of the first layout that has one."""
    allowed = all(container.mig_allowed and not container.whole for container in request.containers)
    separate = not use.anti_affinity_groups.intersection(request.anti_affinity_groups)
    shared = use.shares > 0 and not use.layout
    if not (allowed and device.healthy and separate) or use.exclusive or shared:
        return None
    beside = _instances_beside(container, request, device, given)
    own = (share.mig.layout for share in given if share.device == device.uuid and share.mig)
    pinned = use.layout or next(own, "")
    taken = {n for n, mark in enumerate(use.slots_taken) if mark == "1" and use.layout}
    taken |= {share.mig.position for share in beside if share.mig}
    free_mib = device.memory_mib - use.memory_mib - sum(share.memory_mib for share in beside)
    needed_mib = _needed_instance_mib(container, device)
    for layout in device.layouts:
        free = [
            (profile.memory_mib, position, profile.name)
            for position, profile in enumerate(layout.positions)
            if position not in taken and needed_mib <= profile.memory_mib <= free_mib
        ]
        if free and pinned in {"", layout.name}:
            memory_mib, position, profile = min(free)
            place = MigPlacement(layout=layout.name, position=position, profile=profile)
            return share_of(container, device, memory_mib, place)
    return None


def _instances_beside(
    container: GpuRequest, request: PodRequest, device: Device, given: Given
) -> list[Share]:
    """Return the pod's instances on a device that are in use beside a container.

    The instance of an earlier container is, unless that is an init container.
    """
    names = [other.container for other in request.containers]
    earlier = names[: names.index(container.container)]
    return [
        share
        for share in given
        if share.device == device.uuid
        and not (share.init if share.container in earlier else container.init)
    ]


def _needed_instance_mib(container: GpuRequest, device: Device) -> int:
    """Return the least size of an instance; a request for all memory gets the largest one."""
    no_amount = container.memory_units is None and container.memory_bytes is None
    percent = container.memory_percent
    if (percent or 100) >= 100 and (no_amount or percent):
        return max((p.memory_mib for layout in device.layouts for p in layout.profiles), default=0)
    return required_memory_mib(container, device)


def _best_linked(
    count: int, request: PodRequest, fitting: list[tuple[Device, Share]]
) -> list[Share] | None:
    """Return the first of the sets that have the best links, then the most of one NUMA node."""
    # Groups in order of their first device, as the sets of the first come first among equals.
    locations = list(dict.fromkeys(_location(request, device) for device, _ in fitting))
    sets = [
        chosen
        for location in locations
        for chosen in combinations(
            [candidate for candidate in fitting if _location(request, candidate[0]) == location],
            count,
        )
    ]
    if not sets:
        return None
    if request.prefer_links:
        best = max(sets, key=lambda chosen: _link_score([device for device, _ in chosen]))
        return [share for _, share in best]
    return [share for _, share in sets[0]]


def _link_score(devices: Sequence[Device]) -> tuple[int, int]:
    """Return the sum of mutual link scores, and the number of pairs on one NUMA node."""
    pairs = list(combinations(devices, 2))
    links = [(a.links.get(b.uuid, 0), b.links.get(a.uuid, 0)) for a, b in pairs]
    near = sum(a.numa is not None and a.numa == b.numa for a, b in pairs)
    return sum(score for score, other in links if score == other), near


def _location(request: PodRequest, device: Device) -> str | int | None:
    return {
        TopologyScope.NODE: "",
        TopologyScope.NUMA: device.numa,
        TopologyScope.PCIE: device.pcie or None,
    }[request.topology_scope]


def _use_of(device: Device, given: Given) -> DeviceUse:
    own = [share for share in given if share.device == device.uuid and not share.init]
    return DeviceUse(
        memory_mib=sum(share.memory_mib for share in own),
        cores_percent=sum(share.booked_cores for share in own),
        shares=len(own),
        exclusive=any(share.sharing is SharingPolicy.EXCLUSIVE for share in own),
    )


def _ordered(
    request: PodRequest, devices: Iterable[DeviceState], given: Given
) -> list[DeviceState]:
    order = request.device_order

    def key(entry: tuple[int, DeviceState]) -> tuple[int, int, int]:
        position, (device, use) = entry
        own = _use_of(device, given)
        memory_mib = use.memory_mib + own.memory_mib
        shares = use.shares + own.shares
        cores_percent = use.cores_percent + own.cores_percent
        allocated = sum(
            weight * 1_000_000 * used // max(there, 1)
            for weight, used, there in zip(
                request.allocation_weights,
                (shares, cores_percent, memory_mib),
                (device.slots, 100, device.memory_mib),
                strict=True,
            )
        )
        return {
            DeviceOrder.FIRST: (0, 0, position),
            DeviceOrder.LAST: (0, 0, -position),
            DeviceOrder.BINPACK: (0, -memory_mib, position),
            DeviceOrder.SPREAD: (0, shares, position),
            DeviceOrder.MOST_ALLOCATED: (0, -allocated, position),
            DeviceOrder.LEAST_ALLOCATED: (0, allocated, position),
            DeviceOrder.TIGHTEST: (-cores_percent, -memory_mib, position),
            DeviceOrder.LEAST_LINKED: (0, sum(device.links.values()), position),
        }[order]

    return [state for _, state in sorted(enumerate(devices), key=key)]

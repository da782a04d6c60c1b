"""Whether and how a pod fits one node: every device of it is tried; pure."""

from collections.abc import Iterable, Sequence
from itertools import combinations

from shared.model.device import Device, DeviceMode, DeviceUse, fits, required_memory_mib
from shared.model.lease import MigPlacement, Share
from shared.model.ledger import LedgerNode
from shared.model.request import DeviceOrder, GpuRequest, PodRequest, SharingPolicy, TopologyScope
from shared.placing.device_filters import device_excluded
from shared.placing.mig_instances import largest_first
from shared.placing.node_filters import check_all, free_resources
from shared.placing.shares import enforced_share, instance_share

DeviceState = tuple[Device, DeviceUse]


def fit_on_node(request: PodRequest, node: LedgerNode) -> tuple[Share, ...] | None:
    """Return the shares that the pod would get on this node, or None if it does not fit."""
    free = free_resources(node.facts, node.used)
    if check_all(request, node.facts, free, node.serving) is not None:
        return None
    if not request.containers:
        return ()
    allowed = [
        (device, use)
        for device, use in node.devices
        if device_excluded(request.selection, device) is None
        and device.index not in node.facts.excluded_devices
    ]
    modes = [DeviceMode.HAMI_CORE, DeviceMode.MIG]
    for mode in reversed(modes) if request.prefer_mig else modes:
        of_mode = [(device, use) for device, use in allowed if device.mode is mode]
        groups = [of_mode]
        if request.same_device:
            groups = [[held] for held in _ordered(request, of_mode, ())]
        for devices in groups:
            shares = _in_turn(request.containers, request, devices)
            if shares is None and mode is DeviceMode.MIG:
                shares = _in_turn(largest_first(request.containers), request, devices)
            if shares is not None:
                names = [container.container for container in request.containers]
                return tuple(sorted(shares, key=lambda share: names.index(share.container)))
    return None


def _in_turn(
    containers: Iterable[GpuRequest], request: PodRequest, devices: Sequence[DeviceState]
) -> tuple[Share, ...] | None:
    given: tuple[Share, ...] = ()
    for container in containers:
        fitting = []
        for device, use in _ordered(request, devices, given):
            beside = any(share.device == device.uuid and not share.init for share in given)
            if (request.distinct_devices and beside) or _where(
                request.topology_scope, device
            ) is None:
                continue
            share = (_instance if device.mode is DeviceMode.MIG else _held)(
                container, request, device, use, given
            )
            if share is not None:
                fitting.append((device, share))
        chosen = _together(container.gpus, request, fitting)
        if chosen is None:
            return None
        if container.whole:
            chosen.sort(key=lambda share: share.index)
        given += tuple(chosen)
    return given


def _held(
    container: GpuRequest,
    request: PodRequest,
    device: Device,
    use: DeviceUse,
    given: tuple[Share, ...],
) -> Share | None:
    seen = use if container.init else _with_own(device, use, given)
    memory_mib = required_memory_mib(container, device)
    if not fits(container, device, seen, memory_mib=memory_mib, tags=request.anti_affinity_groups):
        return None
    return enforced_share(container, device, memory_mib)


def _instance(
    container: GpuRequest,
    request: PodRequest,
    device: Device,
    use: DeviceUse,
    given: tuple[Share, ...],
) -> Share | None:
    """Return the smallest free instance that is large enough, of the first layout that has one."""
    wanted = all(asked.mig_allowed and not asked.whole for asked in request.containers)
    if (
        not (wanted and device.healthy)
        or use.exclusive
        or use.anti_affinity_groups.intersection(request.anti_affinity_groups)
    ):
        return None
    if use.shares and not use.layout:
        return None
    own = [share for share in given if share.device == device.uuid]
    pinned = use.layout or next((share.mig.layout for share in own if share.mig), "")
    taken = {place for place, mark in enumerate(use.slots_taken) if mark == "1" and use.layout}
    if not container.init:
        taken |= {share.mig.position for share in own if share.mig and not share.init}
        use = _with_own(device, use, given)
    left = device.memory_mib - use.memory_mib
    need = required_memory_mib(container, device)
    nothing_said = container.memory_units is None and container.memory_bytes is None
    if (container.memory_percent or 100) >= 100 and (nothing_said or container.memory_percent):
        need = max((p.memory_mib for a in device.layouts for p in a.profiles), default=0)
    for layout in device.layouts:
        free = [
            (profile.memory_mib, position, profile.name)
            for position, profile in enumerate(layout.positions)
            if position not in taken and need <= profile.memory_mib <= left
        ]
        if free and pinned in {"", layout.name}:
            memory_mib, position, profile_name = min(free)
            place = MigPlacement(layout=layout.name, position=position, profile=profile_name)
            return instance_share(container, device, memory_mib, place)
    return None


def _together(
    wanted: int, request: PodRequest, fitting: list[tuple[Device, Share]]
) -> list[Share] | None:
    """Return the first of the sets that have the best links, then the most of one NUMA node."""

    def score(chosen: tuple[tuple[Device, Share], ...]) -> tuple[int, int]:
        pairs = [(one, other) for (one, _), (other, _) in combinations(chosen, 2)]
        links = [(a.links.get(b.uuid, 0), b.links.get(a.uuid, 0)) for a, b in pairs]
        near = sum(a.numa is not None and a.numa == b.numa for a, b in pairs)
        return (
            (sum(one for one, other in links if one == other), near)
            if request.prefer_links
            else (0, 0)
        )

    # Groups in order of their first device, as the sets of the first come first among equals.
    places = list(dict.fromkeys(_where(request.topology_scope, device) for device, _ in fitting))
    sets = [
        chosen
        for place in places
        for chosen in combinations(
            [f for f in fitting if _where(request.topology_scope, f[0]) == place], wanted
        )
    ]
    return [share for _, share in max(sets, key=score)] if sets else None


def _where(scope: TopologyScope, device: Device) -> str | int | None:
    return {
        TopologyScope.NODE: "",
        TopologyScope.NUMA: device.numa,
        TopologyScope.PCIE: device.pcie or None,
    }[scope]


def _with_own(device: Device, use: DeviceUse, given: tuple[Share, ...]) -> DeviceUse:
    own = [share for share in given if share.device == device.uuid and not share.init]
    return DeviceUse(
        memory_mib=use.memory_mib + sum(share.memory_mib for share in own),
        cores_percent=use.cores_percent + sum(share.booked_cores for share in own),
        shares=use.shares + len(own),
        fence=use.fence,
        anti_affinity_groups=use.anti_affinity_groups,
        exclusive=use.exclusive or any(share.sharing is SharingPolicy.EXCLUSIVE for share in own),
        layout=use.layout,
    )


def _ordered(
    request: PodRequest, devices: Iterable[DeviceState], given: tuple[Share, ...]
) -> list[DeviceState]:
    order = request.device_order

    def key(entry: DeviceState) -> tuple[int, int, int]:
        device, use = entry
        use = _with_own(device, use, given)
        allocated = sum(
            weight * 1_000_000 * used // max(there, 1)
            for weight, used, there in zip(
                request.allocation_weights,
                (use.shares, use.cores_percent, use.memory_mib),
                (device.slots, 100, device.memory_mib),
                strict=True,
            )
        )
        return {
            DeviceOrder.FIRST: (0, 0, device.index),
            DeviceOrder.LAST: (0, 0, -device.index),
            DeviceOrder.BINPACK: (0, -use.memory_mib, device.index),
            DeviceOrder.SPREAD: (0, use.shares, device.index),
            DeviceOrder.MOST_ALLOCATED: (0, -allocated, device.index),
            DeviceOrder.LEAST_ALLOCATED: (0, allocated, device.index),
            DeviceOrder.TIGHTEST: (-use.cores_percent, -use.memory_mib, device.index),
            DeviceOrder.LEAST_LINKED: (0, sum(device.links.values()), device.index),
        }[order]

    return sorted(devices, key=key)

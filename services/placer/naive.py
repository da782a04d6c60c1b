"""Placing by looking at every device of every node: slow, plain, and the judge of the index.

It says whether and how a pod fits a node by the same rules, written a second time for clarity.
"""

from collections.abc import Iterable, Sequence

from services.placer.device_choice import terms_of
from services.placer.device_filters import device_excluded
from services.placer.node_filters import free_resources, node_blocked
from shared.model.device import Device, DeviceUse, fits, needed_cores, needed_mib
from shared.model.lease import Share
from shared.model.ledger import LedgerNode
from shared.model.placement import Placement
from shared.model.request import Company, DeviceOrder, GpuRequest, NodeOrder, PodRequest


def place_naive(request: PodRequest, nodes: Iterable[LedgerNode]) -> Placement | None:
    """Return the best node that fits with the devices on it, or None if none fits.

    BINPACK prefers the node with the least free device memory, SPREAD the one with the least used;
    ties go to the first name.
    """
    options = []
    for node in nodes:
        shares = fit_on_node(request, node)
        if shares is not None:
            options.append((_rank(request.node_order, node), node.facts.name, node, shares))
    if not options:
        return None
    _, name, node, shares = min(options, key=lambda option: option[:2])
    return Placement(node=name, shares=shares, node_version=node.version)


def fit_on_node(request: PodRequest, node: LedgerNode) -> tuple[Share, ...] | None:
    """Return the shares that the pod would get on this node, or None if it does not fit."""
    free = free_resources(node.facts, node.used)
    if node_blocked(request, node.facts, free, node.serving) is not None:
        return None
    if not request.containers:
        return ()
    allowed = [
        (device, use)
        for device, use in node.devices
        if device_excluded(request.selection, device) is None
        and device.index not in node.facts.closed_devices
    ]
    if request.same_device:
        for device, use in _ordered(request, allowed, ()):
            shares = _in_turn(request, [(device, use)])
            if shares is not None:
                return shares
        return None
    return _in_turn(request, allowed)


def _in_turn(
    request: PodRequest, devices: Sequence[tuple[Device, DeviceUse]]
) -> tuple[Share, ...] | None:
    given: tuple[Share, ...] = ()
    for container in request.containers:
        chosen = []
        for device, use in _ordered(request, devices, given):
            beside = any(share.device == device.uuid and not share.init for share in given)
            if request.distinct and beside:
                continue
            seen = use if container.init else _with_own(device, use, given)
            memory_mib = needed_mib(container, device)
            if fits(container, device, seen, memory_mib=memory_mib, tags=request.tags):
                chosen.append(_share(container, device, memory_mib))
        if len(chosen) < container.gpus:
            return None
        chosen = chosen[: container.gpus]
        if container.whole:
            chosen.sort(key=lambda share: share.index)
        given += tuple(chosen)
    return given


def _share(container: GpuRequest, device: Device, memory_mib: int) -> Share:
    return Share(
        container=container.container,
        device=device.uuid,
        index=device.index,
        memory_mib=memory_mib,
        cores_percent=needed_cores(container),
        unit_mib=device.unit_mib,
        whole=container.whole,
        slotted=container.slotted,
        init=container.init,
        company=container.company,
        slots=container.slots,
        terms=terms_of(container, device, memory_mib) if container.keeps_terms else None,
    )


def _with_own(device: Device, use: DeviceUse, given: tuple[Share, ...]) -> DeviceUse:
    own = [share for share in given if share.device == device.uuid and not share.init]
    return DeviceUse(
        memory_mib=use.memory_mib + sum(share.memory_mib for share in own),
        cores_percent=use.cores_percent + sum(share.cores_percent for share in own),
        shares=use.shares + len(own),
        fence=use.fence,
        tags=use.tags,
        alone=use.alone or any(share.company is Company.ALONE for share in own),
    )


def _ordered(
    request: PodRequest, devices: Iterable[tuple[Device, DeviceUse]], given: tuple[Share, ...]
) -> list[tuple[Device, DeviceUse]]:
    order = request.device_order

    def key(entry: tuple[Device, DeviceUse]) -> tuple[int, int, int]:
        device, use = entry
        use = _with_own(device, use, given)
        allocated = sum(
            weight * 1_000_000 * used // max(there, 1)
            for weight, used, there in zip(
                request.weights,
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
        }[order]

    return sorted(devices, key=key)


def _rank(order: NodeOrder, node: LedgerNode) -> int:
    used_mib = sum(use.memory_mib for _, use in node.devices)
    total_mib = sum(device.memory_mib for device, _ in node.devices)
    return total_mib - used_mib if order is NodeOrder.BINPACK else used_mib

"""Which other nodes have room for a share like that of a pod now, and what others lack; pure."""

from collections.abc import Iterator, Sequence

from services.cli.formats import size_text
from shared.model.devices.device import DeviceMode
from shared.model.leases.lease import ShareSize
from shared.model.quantity import peaks
from shared.model.views.gpus import DeviceView, NodeDevices
from shared.model.views.leases import LeaseView

NAMED_NODES = 3
CLOSED = 1 << 40
"""Orders closed devices after those that have too little."""


def other_nodes_lines(lease: LeaseView, nodes: Sequence[NodeDevices]) -> Iterator[str]:
    """What pods request besides GPUs does not count."""
    others = [node for node in nodes if node.node != lease.node]
    shares = lease.shares
    if not (others and shares) or any(share.mig for share in shares):
        return
    memory_mib = peaks((share.device, share.memory_mib, share.init) for share in shares)
    cores_percent = peaks((share.device, share.cores_percent, share.init) for share in shares)
    needed = len(memory_mib)
    size = ShareSize(memory_mib=max(memory_mib.values()), cores_percent=max(cores_percent.values()))
    lacks = {node.node: _lack_of(node, size, needed) for node in others}
    roomy = [name for name, lack in lacks.items() if not lack]
    share = f"{needed} GPU{'s' * (needed > 1)} with {size_text(size)}"
    yield f"others      {len(roomy)} of {len(others)} have room for {share} now"
    if roomy:
        more = f" and {len(roomy) - NAMED_NODES} more" if len(roomy) > NAMED_NODES else ""
        free = {node.node: _free_mib(node) for node in nodes}
        named = (f"{name} ({free[name]} MiB free)" for name in roomy[:NAMED_NODES])
        yield f"            room: {', '.join(named)}{more}"
        if lease.node in free and not lease.weighed:
            yield (
                f"            here: {free[lease.node]} MiB of its GPUs are free; policy binpack "
                "prefers nodes with less, spread those with more"
            )
    lacking = [(name, lack) for name, lack in lacks.items() if lack]
    yield from (f"            {name}: {lack}" for name, lack in lacking[:NAMED_NODES])
    if len(lacking) > NAMED_NODES:
        yield f"            nodes without room that are not listed: {len(lacking) - NAMED_NODES}"


def _free_mib(node: NodeDevices) -> int:
    """Return what binpack and spread compare."""
    return sum(
        max(device.memory_mib - device.used_memory_mib, 0)
        for device in node.devices
        if not _closed(device)
    )


def _lack_of(node: NodeDevices, size: ShareSize, needed: int) -> str:
    if node.cordoned or node.unschedulable:
        return f"it gets no pods: {node.cordoned or 'it is unschedulable'}"
    lacks = sorted(_lack_of_device(device, size) for device in node.devices)
    reasons = [reason for _, reason in lacks if reason]
    room = len(lacks) - len(reasons)
    if room >= needed:
        return ""
    if not reasons:
        return f"it has {len(lacks)} GPUs"
    return f"{room} of its {len(lacks)} GPUs have room; {reasons[0]}" if room else reasons[0]


def _lack_of_device(device: DeviceView, size: ShareSize) -> tuple[int, str]:
    free_mib = device.memory_mib - device.used_memory_mib
    free_cores = 100 - device.used_cores_percent
    name = f"GPU {device.index}"
    if closed := _closed(device):
        return CLOSED, f"{name} {closed}"
    if free_mib < size.memory_mib:
        return size.memory_mib - free_mib, f"{name} has {free_mib} of {size.memory_mib} MiB free"
    if free_cores < size.cores_percent:
        return 0, f"{name} has {free_cores} of {size.cores_percent} % of its cores free"
    if device.used_shares >= device.slots:
        return 0, f"all {device.slots} shares of {name} are used"
    return -1, ""


def _closed(device: DeviceView) -> str:
    if not device.healthy:
        return "is not healthy"
    if device.excluded:
        return f"is closed to new pods: {device.excluded}"
    if device.replicas is not None:
        return f"is offered as replicas, as {device.replicas.resource}"
    return "is in MIG mode" if device.mode == DeviceMode.MIG else ""

"""Amounts and kinds of a node's devices that decide whether pods fit; pure."""

from collections.abc import Callable, Hashable

from shared.placing.mirror.node_mirror import MirroredNode

Amount = Callable[[MirroredNode], int]


def is_plain(node: MirroredNode) -> int:
    """Return 1 if free memory, cores and slots decide about the node's devices, else 0."""
    return int(
        not (node.has_mig or node.isolation_restricted or node.facts.excluded_devices)
        and not [device for device in node.devices if device.layout]
    )


def largest_free_mib(node: MirroredNode) -> int:
    """Return the most memory that a healthy device has free."""
    free = [
        device.free_instance_mib if device.in_mig_mode else device.total_mib - device.used_mib
        for device in node.devices
        if device.healthy
    ]
    return max(free) if free else 0


def count_of_devices(*, slotted: bool) -> Amount:
    """Return how many devices are healthy and, for slotted shares, have a free slot."""
    if slotted:
        return lambda node: len([d for d in node.devices if d.healthy and d.shares < d.slots])
    return lambda node: len([d for d in node.devices if d.healthy])


def units_free_at_once(gpus: int, slotted: bool, cores: int, unclaimed: bool) -> Amount:
    """Return the units that `gpus` devices have free at once, of those with a slot and cores."""
    most_cores = 100 - cores

    def units_of(node: MirroredNode) -> int:
        free = [
            device.free_units
            for device in node.devices
            if device.used_cores <= most_cores
            and device.healthy
            and not (slotted and device.shares >= device.slots)
            and not (unclaimed and device.ledger_use.claimed_by)
        ]
        if len(free) < gpus:
            return -1
        if gpus == 1:
            return max(free)
        free.sort()
        return free[-gpus]

    return units_of


def hardware_of(node: MirroredNode, *, uuids: bool, locations: bool) -> Hashable:
    """Return what decides whether pods fit the node's devices when they are empty."""
    return tuple(
        [
            (
                device.total_mib,
                device.unit_mib,
                device.slots,
                device.device.model,
                device.device.mode,
                device.device.layouts,
                device.device.isolation,
                device.uuid if uuids else "",
                (device.device.numa, device.device.pcie) if locations else None,
            )
            for device in node.devices
        ]
    )

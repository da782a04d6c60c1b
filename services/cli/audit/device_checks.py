"""Audit checks of devices: over-commitment, exclusivity, fences; pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from services.cli.audit.snapshot import (
    Snapshot,
    device_difference,
    pod_name,
    shares_on,
)
from shared.ledger.total_checks import Difference
from shared.model.devices.device import Device
from shared.model.leases.lease import Booking, Lease, Share, allocated_shares, bookings
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.request import SharingPolicy


def over_commitment(snapshot: Snapshot) -> Iterator[Difference]:
    """S1: no device is over-committed, and no exclusive device is shared."""
    for totals in snapshot.nodes:
        booked = _by_device(
            booking for lease in totals.leases for booking in bookings(lease.shares)
        )
        for device, _ in totals.node.devices:
            shares = list(shares_on(totals, device.uuid))
            for excess in _excesses(device, booked.get(device.uuid, []), _slots(device, shares)):
                yield device_difference("S1", device, f"leases take {excess}")
            yield from _slot_conflicts(device, shares)
            yield from _exclusivity_violations(device, shares)


def allocated_totals(snapshot: Snapshot) -> Iterator[Difference]:
    """S9: no agent has given out more of a device than the device has, by its own checkpoint."""
    devices = snapshot.devices
    for node, allocations in snapshot.allocations.items():
        leases: dict[PodUid, dict[str, Lease]] = {}
        for allocation in allocations:
            leases.setdefault(allocation.pod, {})[allocation.container] = allocation.lease
        booked = _by_device(
            booking
            for allocation in leases.values()
            for booking in bookings(allocated_shares(allocation))
        )
        for uuid, held in sorted(booked.items()):
            if uuid in devices:
                yield from _over_allocated(node, devices[uuid][1], held)


def _by_device(booked: Iterable[Booking]) -> dict[DeviceUuid, list[Booking]]:
    by_device: dict[DeviceUuid, list[Booking]] = {}
    for booking in booked:
        by_device.setdefault(booking.device, []).append(booking)
    return by_device


def fences(snapshot: Snapshot) -> Iterator[Difference]:
    """S4: a device's fences are unique, and none is above the device's own."""
    for totals in snapshot.nodes:
        for device, use in totals.node.devices:
            carried = Counter(share.fence for _, share in shares_on(totals, device.uuid))
            for fence, count in sorted(carried.items()):
                if count > 1:
                    text = f"{count} shares have the same lease number {fence}"
                    yield device_difference("S4", device, text)
                if fence > use.fence:
                    text = f"a share has lease number {fence}, above the latest, {use.fence}"
                    yield device_difference("S4", device, text)


CHECKS = (over_commitment, allocated_totals, fences)


def _excesses(device: Device, booked: Sequence[Booking], slots: int | None) -> Iterator[str]:
    fault = f" ({device.fault})" if device.fault else ""
    for unit, taken, limit in (
        ("MiB", sum(booking.memory_mib for booking in booked), device.memory_mib),
        ("% of its cores", sum(booking.cores_percent for booking in booked), 100),
        ("shares", sum(booking.slots for booking in booked), slots),
    ):
        if limit is not None and taken > limit:
            yield f"{taken} {unit}, it has {limit}{fault}"


def _over_allocated(
    node: NodeName, device: Device, booked: Sequence[Booking]
) -> Iterator[Difference]:
    for excess in _excesses(device, booked, None):
        yield device_difference("S9", device, f"the agent of {node} has given out {excess}")
    exclusive = any(booking.sharing is SharingPolicy.EXCLUSIVE for booking in booked)
    if exclusive and len(booked) > 1:
        text = f"the agent of {node} has given it to {len(booked)} pods, to one exclusively"
        yield device_difference("S9", device, text)


def _slot_conflicts(device: Device, shares: list[tuple[Lease, Share]]) -> Iterator[Difference]:
    slots: dict[int, set[str]] = {}
    for lease, share in shares:
        if share.slot is not None and not share.init:
            slots.setdefault(share.slot, set()).add(f"{lease.pod}/{share.container}")
    for slot, holders in sorted(slots.items()):
        if len(holders) > 1:
            text = f"{len(holders)} containers hold share {slot}"
            yield device_difference("S1", device, text)
        if not 0 <= slot < _slots(device, shares):
            text = f"share {slot} is held, it has {_slots(device, shares)}"
            yield device_difference("S1", device, text)
    layouts = sorted({share.mig.layout if share.mig else "no MIG layout" for _, share in shares})
    if len(layouts) > 1:
        text = f"its leases have different MIG layouts: {', '.join(layouts)}"
        yield device_difference("S1", device, text)


def _slots(device: Device, shares: Sequence[tuple[Lease, Share]]) -> int:
    positions = [len(layout.positions) for layout in device.layouts]
    return max([device.slots, *positions, *(share.slots for _, share in shares)])


def _exclusivity_violations(
    device: Device, shares: Sequence[tuple[Lease, Share]]
) -> Iterator[Difference]:
    others = len({lease.pod for lease, _ in shares}) - 1
    exclusive = [lease for lease, share in shares if share.sharing is SharingPolicy.EXCLUSIVE]
    if exclusive and others:
        text = f"{pod_name(exclusive[0])} holds it exclusively, and {others} others hold it, too"
        yield device_difference("S1", device, text)

"""What containers and leases hold of the node's devices; pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.device import Device, DeviceMode
from shared.model.lease import Lease, Share, bookings
from shared.model.names import DeviceUuid

EXCEEDED = "LeasesExceedMemory"
"""Code of the fault of a device with less memory than its leases have."""


def held_slots(
    entries: Iterable[CheckpointEntry], leases: Iterable[Lease]
) -> Mapping[DeviceUuid, int]:
    """Return the devices that are held, each with how many slots it needs for its holders."""
    held: dict[DeviceUuid, int] = {}
    for lease in (*(entry.lease for entry in entries), *leases):
        for share in lease.shares:
            needed = 0 if share.slot is None else share.slot + 1
            held[share.device] = max(needed, held.get(share.device, 0))
    return held


def devices_of_records(entries: Iterable[CheckpointEntry], slots: int) -> tuple[Device, ...]:
    """Return the devices that containers were given, as they were when their shares were placed."""
    shares = {
        share.device: share
        for entry in entries
        for share in entry.lease.shares_of(entry.allocation.container)
    }
    return tuple(_device(share, slots) for share in shares.values())


def _device(share: Share, slots: int) -> Device:
    return Device(
        uuid=share.device,
        index=share.index,
        model=share.device_model,
        memory_mib=share.device_mib,
        slots=slots,
        unit_mib=share.unit_mib,
        mode=DeviceMode.MIG if share.mig else DeviceMode.HAMI_CORE,
    )


def close_exceeded(
    devices: Collection[Device], leases: Collection[Lease]
) -> tuple[tuple[Device, ...], frozenset[DeviceUuid]]:
    """Return devices as they are to be reported, and those whose leases exceed their memory.

    A device has less memory than before, for example after its ECC mode or the driver changed. Its
    containers go on; it gets no new share, not even one without memory, until its leases fit.
    """
    leased: dict[DeviceUuid, int] = {}
    for lease in leases:
        for booking in bookings(lease.shares):
            if not booking.layout:
                total = leased.get(booking.device, 0) + booking.memory_mib
                leased[booking.device] = total
    exceeded = frozenset(
        device.uuid
        for device in devices
        if device.mode is DeviceMode.HAMI_CORE and leased.get(device.uuid, 0) > device.memory_mib
    )
    reported = tuple(
        replace(device, healthy=False, fault=_exceeded(device, leased[device.uuid]))
        if device.healthy and device.uuid in exceeded
        else device
        for device in devices
    )
    return reported, exceeded


def _exceeded(device: Device, leased_mib: int) -> str:
    return (
        f"{EXCEEDED}: its leases have {leased_mib} MiB, and it has only {device.memory_mib} MiB "
        "now: it gets no new share until some of them end"
    )

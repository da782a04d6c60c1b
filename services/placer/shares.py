"""The shares that a choice of devices amounts to."""

from collections.abc import Sequence

from services.placer.mirrored import DeviceState
from shared.model.device import Device, needed_cores, needed_mib
from shared.model.lease import MigPlace, Share, Terms
from shared.model.request import Company, GpuRequest

Pick = tuple[GpuRequest, DeviceState, int, MigPlace | None]
"""A container, a device for it, the MiB that its share takes there, and which MIG instance it is;
None: HAMi-core holds it."""

KNOWN_SHARES = 16
"""Shares kept per device: a share is a value, and pods of one template ask for equal ones."""


def shares_of(picks: Sequence[Pick]) -> tuple[Share, ...]:
    """Return the shares that a choice amounts to."""
    return tuple([_share(*pick) for pick in picks])


def _share(
    container: GpuRequest, device: DeviceState, memory: int, place: MigPlace | None
) -> Share:
    if place is not None:
        return instance_share(container, device.device, memory, place)
    key = (
        memory,
        container.container,
        container.cores_percent,
        container.company is not Company.ORDINARY and container.company,
        container.whole,
        container.slotted,
        container.slots,
        container.init,
        container.keeps_terms and (container.memory_bytes, container.memory_percent),
    )
    share = device.known_shares.get(key)
    if share is None:
        if len(device.known_shares) >= KNOWN_SHARES:
            device.known_shares.clear()
        share = device.known_shares[key] = held_share(container, device.device, memory)
    return share


def held_share(container: GpuRequest, device: Device, memory_mib: int) -> Share:
    """Return a share that HAMi-core holds to."""
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
        terms=_terms(container, device, memory_mib) if container.keeps_terms else None,
    )


def instance_share(
    container: GpuRequest, device: Device, memory_mib: int, place: MigPlace
) -> Share:
    """Return a share that is a MIG instance: its cores are its own, and so is its company."""
    return Share(
        container=container.container,
        device=device.uuid,
        index=device.index,
        memory_mib=memory_mib,
        cores_percent=container.cores_percent,
        unit_mib=device.unit_mib,
        slotted=container.slotted,
        init=container.init,
        company=Company.ORDINARY,
        slots=container.slots,
        mig=place,
        terms=_terms(container, device, needed_mib(container, device)),
    )


def _terms(container: GpuRequest, device: Device, memory_mib: int) -> Terms:
    """Return in which terms a container asked, for the dialects that must repeat them."""
    return Terms(
        memory_mib=memory_mib,
        device_mib=device.memory_mib,
        memory_bytes=None if container.whole else container.memory_bytes,
        memory_percent=None if container.whole else container.memory_percent,
    )

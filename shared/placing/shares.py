"""The share of one device that a container's lease will have; pure."""

from shared.model.device import Device, needed_cores, needed_mib
from shared.model.lease import MigPlace, Share, Terms
from shared.model.request import Company, GpuRequest


def held_share(container: GpuRequest, device: Device, memory_mib: int) -> Share:
    """Return a share that HAMi-core enforces."""
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
    """Return a share that is a MIG instance, whose cores nothing else uses."""
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
    """Return the requested terms, for dialects whose annotations repeat them."""
    return Terms(
        memory_mib=memory_mib,
        device_mib=device.memory_mib,
        memory_bytes=None if container.whole else container.memory_bytes,
        memory_percent=None if container.whole else container.memory_percent,
    )

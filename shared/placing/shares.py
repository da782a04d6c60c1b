"""The share of one device that a container's lease will have; pure."""

from shared.model.device import Device, required_cores_percent, required_memory_mib
from shared.model.lease import MigPlacement, RequestedUnits, Share
from shared.model.request import GpuRequest, SharingPolicy


def enforced_share(container: GpuRequest, device: Device, memory_mib: int) -> Share:
    """Return a share that HAMi-core enforces."""
    return Share(
        container=container.container,
        device=device.uuid,
        index=device.index,
        device_mib=device.memory_mib,
        device_model=device.model,
        memory_mib=memory_mib,
        cores_percent=required_cores_percent(container),
        unit_mib=device.unit_mib,
        whole=container.whole,
        slotted=container.slotted,
        init=container.init,
        sharing=container.sharing,
        slots=container.slots,
        requested_units=_terms(container, memory_mib)
        if container.records_requested_units
        else None,
    )


def instance_share(
    container: GpuRequest, device: Device, memory_mib: int, place: MigPlacement
) -> Share:
    """Return a share that is a MIG instance, whose cores nothing else uses."""
    return Share(
        container=container.container,
        device=device.uuid,
        index=device.index,
        device_mib=device.memory_mib,
        device_model=device.model,
        memory_mib=memory_mib,
        cores_percent=container.cores_percent,
        unit_mib=device.unit_mib,
        slotted=container.slotted,
        init=container.init,
        sharing=SharingPolicy.SHARED,
        slots=container.slots,
        mig=place,
        requested_units=_terms(container, required_memory_mib(container, device)),
    )


def _terms(container: GpuRequest, memory_mib: int) -> RequestedUnits:
    """Return the requested terms, for dialects whose annotations repeat them."""
    return RequestedUnits(
        memory_mib=memory_mib,
        memory_bytes=None if container.whole else container.memory_bytes,
        memory_percent=None if container.whole else container.memory_percent,
    )

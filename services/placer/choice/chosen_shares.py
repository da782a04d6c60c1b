"""The shares that a choice of devices amounts to."""

from collections.abc import Sequence

from services.placer.mirror.node_mirror import DeviceState
from shared.model.lease import MigPlacement, Share
from shared.model.request import GpuRequest, SharingPolicy
from shared.placing.shares import enforced_share, instance_share

Pick = tuple[GpuRequest, DeviceState, int, MigPlacement | None]
"""A container, a device for it, the MiB that its share takes there, and which MIG instance it is;
None: HAMi-core holds it."""

KNOWN_SHARES = 16
"""Shares kept per device: a share is a value, and pods of one template ask for equal ones."""


def shares_of(picks: Sequence[Pick]) -> tuple[Share, ...]:
    """Return the shares that a choice amounts to."""
    return tuple([_share(*pick) for pick in picks])


def _share(
    container: GpuRequest, device: DeviceState, memory: int, place: MigPlacement | None
) -> Share:
    if place is not None:
        return instance_share(container, device.device, memory, place)
    key = (
        memory,
        container.container,
        container.cores_percent,
        container.sharing is not SharingPolicy.SHARED and container.sharing,
        container.whole,
        container.slotted,
        container.slots,
        container.init,
        container.records_requested_units and (container.memory_bytes, container.memory_percent),
    )
    share = device.known_shares.get(key)
    if share is None:
        if len(device.known_shares) >= KNOWN_SHARES:
            device.known_shares.clear()
        share = device.known_shares[key] = enforced_share(container, device.device, memory)
    return share

"""Devices, leases and shares as the API returns them; pure."""

from operator import attrgetter
from typing import Any

from shared.model.budget import IdleHolder
from shared.model.device import Device, DeviceMode, DeviceUse, MigLayout
from shared.model.lease import Lease, Share, ShareMeasurement
from shared.model.names import NodeName
from shared.model.views import DeviceView, FinishedPod, HeldShare, MeasuredView, ShareView

HOUR_S = 3600.0


def measured_view(measured: ShareMeasurement, *, is_idle: bool) -> MeasuredView:
    """Return the measured usage of a share."""
    return MeasuredView(
        memory_mib=measured.memory_mib,
        cores_percent=measured.cores_percent,
        processes=measured.processes,
        idle=is_idle,
        idle_since=measured.idle_since,
    )


def device_view(
    node: NodeName,
    device: Device,
    use: DeviceUse,
    *,
    excluded: str = "",
    shares: tuple[HeldShare, ...] = (),
) -> DeviceView:
    """Return a device of a node with its shares."""
    layout = next((one for one in device.layouts if one.name == use.layout), None)
    return DeviceView(
        uuid=device.uuid,
        node=node,
        index=device.index,
        model=device.model,
        mode=str(device.mode),
        healthy=device.healthy,
        fault=device.fault,
        excluded=excluded,
        memory_mib=device.memory_mib,
        unit_mib=device.unit_mib,
        used_memory_mib=use.memory_mib,
        used_cores_percent=use.cores_percent,
        slots=_capacity(device, layout),
        used_shares=use.shares,
        fence=use.fence,
        layout=use.layout,
        instances=" + ".join(f"{one.count} x {one.name}" for one in layout.profiles)
        if layout
        else "",
        layouts=len(device.layouts),
        numa=device.numa,
        shares=shares,
    )


def _capacity(device: Device, live: MigLayout | None) -> int:
    """Return how many shares, or instances of the live layout, fit on the device."""
    if device.mode is not DeviceMode.MIG:
        return device.slots
    layouts = (live,) if live else device.layouts
    return max((len(layout.positions) for layout in layouts), default=0)


def held_share(lease: Lease, share: Share) -> HeldShare:
    """Return a share of a device with its lease."""
    holder = dict(zip(_OF_LEASE, _get_of_lease(lease), strict=True))
    return HeldShare(**_amounts(share), **holder, claim=lease.claim is not None)


def hidden_share(share: HeldShare) -> HeldShare:
    """Return only how much of its device a share takes, and the state of its lease."""
    return HeldShare(
        device=share.device,
        index=share.index,
        device_mib=share.device_mib,
        memory_mib=share.memory_mib,
        cores_percent=share.cores_percent,
        booked_cores=share.booked_cores,
        slot=share.slot,
        mig=share.mig,
        init=share.init,
        state=share.state,
    )


def share_view(share: Share, measured: MeasuredView | None) -> ShareView:
    """Return a share of a lease."""
    return ShareView(**_amounts(share), measured=measured)


def idle_holder(share: HeldShare, now: float) -> IdleHolder:
    """Return what an idle share holds."""
    since = share.measured.idle_since if share.measured else None
    hours = max(now - (now if since is None else since), 0.0) / HOUR_S
    return IdleHolder(
        namespace=share.namespace,
        owner=f"Pod/{share.name}",
        name=share.name,
        shares=1,
        gpus=share.part_of_device,
        memory_mib=share.memory_mib,
        gpu_hours=hours * share.part_of_device,
        mib_hours=hours * share.memory_mib,
        idle_since=now if since is None else since,
    )


def finished_pod(lease: Lease, ended: float, reason: str) -> FinishedPod:
    """Return a pod whose lease has ended. Shares of init containers are left out."""
    shares = [share_view(share, None) for share in lease.shares if not share.init]
    gpus = sum(share.part_of_device for share in shares)
    return FinishedPod(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        claim=lease.claim is not None,
        node=lease.node,
        devices=tuple(dict.fromkeys(share.device for share in shares)),
        gpus=round(gpus, 4),
        memory_mib=sum(share.memory_mib for share in shares),
        cores_percent=sum(share.booked_cores for share in shares),
        started=lease.created_at,
        ended=ended,
        reason=reason,
        gpu_hours=round(gpus * max(ended - lease.created_at, 0.0) / HOUR_S, 4),
    )


def _amounts(share: Share) -> dict[str, Any]:
    return dict(zip(_OF_SHARE, _get_of_share(share), strict=True))


_OF_SHARE = tuple(name for name in ShareView.__struct_fields__ if name != "measured")
_OF_LEASE = tuple(
    name for name in HeldShare.__struct_fields__ if name not in {*_OF_SHARE, "measured", "claim"}
)
_get_of_share, _get_of_lease = attrgetter(*_OF_SHARE), attrgetter(*_OF_LEASE)

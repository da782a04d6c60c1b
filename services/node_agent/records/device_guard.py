"""What is held of the node's devices, and whether all allocations together fit on them; pure.

`check_fits` uses the agent's own records only, so no error of the ledger, a binder or a clock
affects it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.device import Device, DeviceMode
from shared.model.errors import RequestError
from shared.model.lease import Booking, Lease, Share, allocated_shares, bookings
from shared.model.names import DeviceUuid, PodUid
from shared.model.request import SharingPolicy

ALL_CORES = 100
"""Percent of a device's cores."""
EXCEEDED = "LeasesExceedMemory"
"""Code of the fault of a device with less memory than its leases have."""


class OvercommitError(RequestError):
    """A device would have been given out more than once; the message names its holders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHolder:
    """One pod's part of one device."""

    pod: str
    """Namespace and name."""
    booking: Booking
    positions: frozenset[int]
    """Of its MIG instances in the device's layout."""
    slots: frozenset[int]
    """Those that its leases name."""
    slot_limit: int
    """The most slots of the device that it accepts to be taken, or 0 for all."""


def check_fits(
    entry: CheckpointEntry,
    entries: Iterable[CheckpointEntry],
    devices: Mapping[DeviceUuid, Device],
    unrecorded: Mapping[DeviceUuid, Collection[str]],
) -> None:
    """Raise OvercommitError if a device is missing, or cannot hold `entry` beside its other pods.

    An entry for the same container is replaced. `unrecorded` are pods that hold parts of a device
    of which no record exists: nothing more is given out of such a device.
    """
    pod, container = entry.allocation.pod, entry.allocation.container
    shares = _shares_by_pod(entries, entry)
    allocations = [one.allocation for one in (*entries, entry)]
    names = {each.pod: f"{each.namespace}/{each.name}" for each in allocations}
    for uuid in {share.device for share in entry.lease.shares_of(container)}:
        device = devices.get(uuid)
        if device is None:
            raise OvercommitError(f"device {uuid} is missing: nothing more of it is given out")
        holders = {
            each: holder
            for each, of_pod in shares.items()
            if (holder := _holder(names[each], of_pod, uuid)) is not None
        }
        own = holders.pop(pod)
        others = tuple(holders.values())
        reason = _unrecorded(unrecorded.get(uuid, ()), own) or _overcommitment(device, own, others)
        if reason:
            held = [f", pod {each.pod} has {_amounts(each, device)}" for each in others]
            raise OvercommitError(
                f"device {uuid} would be over-committed: {reason}; pod {own.pod} would have "
                f"{_amounts(own, device)}{''.join(held)}"
            )


def _shares_by_pod(
    entries: Iterable[CheckpointEntry], entry: CheckpointEntry
) -> dict[PodUid, tuple[Share, ...]]:
    """Return what pods hold; a container with two resources counts once, as `entry` has it."""
    leases: dict[PodUid, dict[str, Lease]] = {}
    for each in entries:
        leases.setdefault(each.allocation.pod, {})[each.allocation.container] = each.lease
    leases.setdefault(entry.allocation.pod, {})[entry.allocation.container] = entry.lease
    return {pod: allocated_shares(of_pod) for pod, of_pod in leases.items()}


def _holder(name: str, of_pod: Iterable[Share], device: DeviceUuid) -> DeviceHolder | None:
    shares = [share for share in of_pod if share.device == device]
    if not shares:
        return None
    return DeviceHolder(
        pod=name,
        booking=bookings(shares)[0],
        positions=frozenset(share.mig.position for share in shares if share.mig),
        slots=frozenset(share.slot for share in shares if share.slot is not None),
        slot_limit=min((share.slots for share in shares if share.slots), default=0),
    )


def _unrecorded(pods: Collection[str], own: DeviceHolder) -> str:
    others = sorted(set(pods) - {own.pod})
    if not others:
        return ""
    return f"pods {', '.join(others)} hold parts of it of which the node agent has no record"


def _overcommitment(device: Device, own: DeviceHolder, others: Collection[DeviceHolder]) -> str:
    """Return which amount of the device is exceeded, or nothing if all holders fit."""
    if device.mode is DeviceMode.MIG:
        return _instance_conflict(own, others)
    booked = [each.booking for each in (own, *others)]
    if others and any(each.sharing is SharingPolicy.EXCLUSIVE for each in booked):
        return "one of its pods has it exclusively"
    given = (
        ("MiB", sum(each.memory_mib for each in booked), device.memory_mib),
        ("% of its cores", sum(each.cores_percent for each in booked), ALL_CORES),
        ("slots", _slots_given(booked, own), own.slot_limit or device.slots),
    )
    return "; ".join(
        f"it has {limit} {unit}, and {total} would be given out"
        for unit, total, limit in given
        if total > limit
    ) or _slot_conflict(own, others)


def _slots_given(booked: Iterable[Booking], own: DeviceHolder) -> int:
    return sum(each.slots for each in booked) if own.booking.slots else 0


def _slot_conflict(own: DeviceHolder, others: Iterable[DeviceHolder]) -> str:
    """Return the slot that another pod has: the ledger would restore only one of their leases."""
    shared = own.slots.intersection(slot for other in others for slot in other.slots)
    return f"its share {min(shared)} would have two pods" if shared else ""


def _instance_conflict(own: DeviceHolder, others: Iterable[DeviceHolder]) -> str:
    for other in others:
        if other.booking.layout != own.booking.layout:
            return f"it would need the MIG layouts {other.booking.layout} and {own.booking.layout}"
        if shared := own.positions & other.positions:
            return f"the MIG instance at position {min(shared)} would have two pods"
    return ""


def _amounts(holder: DeviceHolder, device: Device) -> str:
    if device.mode is DeviceMode.MIG:
        positions = ", ".join(str(position) for position in sorted(holder.positions))
        return f"position {positions} of MIG layout {holder.booking.layout}"
    return f"{holder.booking.memory_mib} MiB and {holder.booking.cores_percent} % of the cores"


def close_unrecorded(
    devices: Iterable[Device], unrecorded: Mapping[DeviceUuid, Collection[str]]
) -> tuple[Device, ...]:
    """Return devices as they are to be reported: those with `unrecorded` pods as unhealthy.

    The agent refuses every further pod on such a device, so none should be placed on it.
    """
    return _closed(
        devices,
        {
            uuid: f"pods {', '.join(sorted(pods))} use parts of it of which neither the node agent "
            "nor the ledger has a record: delete them"
            for uuid, pods in unrecorded.items()
            if pods
        },
    )


def close_exceeded(
    devices: Collection[Device], leases: Iterable[Lease]
) -> tuple[tuple[Device, ...], frozenset[DeviceUuid]]:
    """Return devices as they are to be reported, and those whose leases exceed their memory.

    A device has less memory than before, for example after its ECC mode or the driver changed. Its
    containers go on; it gets no new share, not even one without memory, until its leases fit.
    """
    leased: Counter[DeviceUuid] = Counter()
    for lease in leases:
        for booking in bookings(lease.shares):
            leased[booking.device] += 0 if booking.layout else booking.memory_mib
    faults = {
        each.uuid: f"{EXCEEDED}: its leases have {leased[each.uuid]} MiB, and it has only "
        f"{each.memory_mib} MiB now: it gets no new share until some of them end"
        for each in devices
        if each.mode is DeviceMode.HAMI_CORE and leased[each.uuid] > each.memory_mib
    }
    return _closed(devices, faults), frozenset(faults)


def _closed(devices: Iterable[Device], faults: Mapping[DeviceUuid, str]) -> tuple[Device, ...]:
    return tuple(
        replace(each, healthy=False, fault=faults[each.uuid])
        if each.healthy and each.uuid in faults
        else each
        for each in devices
    )


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
    return tuple(
        Device(
            uuid=share.device,
            index=share.index,
            model=share.device_model,
            memory_mib=share.device_mib,
            slots=slots,
            unit_mib=share.unit_mib,
            mode=DeviceMode.MIG if share.mig else DeviceMode.HAMI_CORE,
        )
        for share in shares.values()
    )

"""What is held of the node's devices, and whether all allocations together fit on them; pure.

`check_fits` uses the agent's own records only, so no error of the ledger, a binder or a clock
affects it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

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
            each: held
            for each, of_pod in shares.items()
            if (held := [share for share in of_pod if share.device == uuid])
        }
        own = holders.pop(pod)
        lost = ", ".join(sorted({*unrecorded.get(uuid, ())} - {names[pod]}))
        reason = (
            f"pods {lost} use parts of it that are missing in the node agent's records"
            if lost
            else _overcommitment(device, own, holders.values())
        )
        if reason:
            others = [
                f", pod {names[each]} has {_amounts(held, device)}"
                for each, held in holders.items()
            ]
            raise OvercommitError(
                f"device {uuid} would be over-committed: {reason}; pod {names[pod]} would have "
                f"{_amounts(own, device)}{''.join(others)}"
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


def _overcommitment(
    device: Device, own: Sequence[Share], others: Collection[Sequence[Share]]
) -> str:
    """Return which amount of the device is exceeded, or nothing if all pods fit."""
    booked = [bookings(shares)[0] for shares in (own, *others)]
    if device.mode is DeviceMode.MIG:
        return _instance_conflict(booked, own, others)
    if others and any(each.sharing is SharingPolicy.EXCLUSIVE for each in booked):
        return "one of its pods has it exclusively"
    slots = sum(each.slots for each in booked) if booked[0].slots else 0
    given = (
        ("MiB", sum(each.memory_mib for each in booked), device.memory_mib),
        ("% of its cores", sum(each.cores_percent for each in booked), ALL_CORES),
        ("shares", slots, min((share.slots for share in own if share.slots), default=device.slots)),
    )
    exceeded = [
        f"it has {limit} {unit}, and {total} would be given out"
        for unit, total, limit in given
        if total > limit
    ]
    taken = {share.slot for shares in others for share in shares}
    twice = sorted(s.slot for s in own if s.slot is not None and s.slot in taken)
    if twice and not exceeded:  # the ledger would restore only one of their leases
        return f"its share {twice[0]} would have two pods"
    return "; ".join(exceeded)


def _instance_conflict(
    booked: Sequence[Booking], own: Sequence[Share], others: Iterable[Sequence[Share]]
) -> str:
    for booking, shares in zip(booked[1:], others, strict=True):
        if booking.layout != booked[0].layout:
            return f"it would need the MIG layouts {booking.layout} and {booked[0].layout}"
        if shared := _positions(own) & _positions(shares):
            return f"the MIG instance at position {min(shared)} would have two pods"
    return ""


def _positions(shares: Iterable[Share]) -> set[int]:
    return {share.mig.position for share in shares if share.mig is not None}


def _amounts(shares: Sequence[Share], device: Device) -> str:
    (booking,) = bookings(shares)
    if device.mode is DeviceMode.MIG:
        positions = ", ".join(map(str, sorted(_positions(shares))))
        return f"position {positions} of MIG layout {booking.layout}"
    return f"{booking.memory_mib} MiB and {booking.cores_percent} % of the cores"


def close_unrecorded(
    devices: Iterable[Device], unrecorded: Mapping[DeviceUuid, Collection[str]]
) -> tuple[Device, ...]:
    """Return devices as they are to be reported: those with `unrecorded` pods as unhealthy.

    The agent refuses every further pod on such a device, so none should be placed on it.
    """
    return _closed(
        devices,
        {
            uuid: f"pods {', '.join(sorted(pods))} use parts of it that neither the node agent nor "
            "Redis has on record: delete them"
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

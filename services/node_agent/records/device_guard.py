"""What is held of the node's devices, and whether all allocations together fit on them; pure.

`check_room` is a coding of its own of what `device_refusal` defines. It uses the agent's own
records only, so no error of the ledger, a binder or a clock affects it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.devices.device import MOST_LEFTOVERS, Device, DeviceMode, Held, Leftover
from shared.model.devices.enforcers import SharingMode
from shared.model.devices.time_slices import Interval
from shared.model.errors import RequestError
from shared.model.events.node_events import Allocation
from shared.model.leases.lease import Booking, Lease, Share, allocated_shares, bookings
from shared.model.names import DeviceUuid, PodUid
from shared.model.requests.request import SharingPolicy

ALL_CORES = 100
EXCEEDED = "LeasesExceedMemory"


class OvercommitError(RequestError):
    """The message names the holders."""


def check_room(
    lease: Lease,
    containers: Collection[str],
    entries: Iterable[CheckpointEntry],
    devices: Mapping[DeviceUuid, Device],
    unrecorded: Mapping[DeviceUuid, Collection[str]],
) -> None:
    """Raise OvercommitError if a device is missing, or has no room beside its other pods.

    Entries of these containers are replaced. Nothing more is given out of a device with
    `unrecorded` pods.
    """
    pod = lease.pod
    wanted = {share.device for name in containers for share in lease.shares_of(name)}
    beside = [entry for entry in entries if entry.allocation.pod == pod or _is_on(entry, wanted)]
    shares = _shares_by_pod(beside, lease, containers)
    leases = (lease, *(entry.lease for entry in beside if entry.allocation.pod != pod))
    names = {entry.allocation.pod: _name(entry.allocation) for entry in beside} | {
        pod: _name(lease)
    }
    for uuid in wanted:
        device = devices.get(uuid)
        if device is None:
            raise OvercommitError(f"device {uuid} is missing: nothing more of it is given out")
        holders = {
            holder: held
            for holder, of_pod in shares.items()
            if (held := [share for share in of_pod if share.device == uuid])
        }
        own = holders.pop(pod)
        lost = ", ".join(sorted({*unrecorded.get(uuid, ())} - {names[pod]}))
        slices = {other.time_slices[uuid] for other in leases if uuid in other.time_slices}
        reason = (
            f"pods {lost} use parts of it that are missing in the node agent's records"
            if lost
            else _overcommitment(device, own, holders.values(), slices)
        )
        if reason:
            others = [
                f", pod {names[holder]} has {_amounts(held, device)}"
                for holder, held in holders.items()
            ]
            raise OvercommitError(
                f"device {uuid} would be over-committed: {reason}; pod {names[pod]} would have "
                f"{_amounts(own, device)}{''.join(others)}"
            )


def _is_on(entry: CheckpointEntry, devices: Collection[DeviceUuid]) -> bool:
    return any(share.device in devices for share in entry.lease.shares)


def _name(holder: Lease | Allocation) -> str:
    return f"{holder.namespace}/{holder.name}"


def _shares_by_pod(
    entries: Iterable[CheckpointEntry], lease: Lease | None = None, containers: Iterable[str] = ()
) -> dict[PodUid, tuple[Share, ...]]:
    """A container with two resources counts once; `containers` have what `lease` gives them."""
    leases: dict[PodUid, dict[str, Lease]] = {}
    for entry in entries:
        leases.setdefault(entry.allocation.pod, {})[entry.allocation.container] = entry.lease
    if lease is not None:
        leases.setdefault(lease.pod, {}).update(dict.fromkeys(containers, lease))
    return {pod: allocated_shares(of_pod) for pod, of_pod in leases.items()}


@dataclass(frozen=True, slots=True)
class DeviceExcess:
    memory_mib: int
    cores_percent: int
    shares: int
    slots: frozenset[int]
    layout: str
    mode: SharingMode
    exclusive: bool


Excess = Mapping[DeviceUuid, DeviceExcess]


def beyond_leases(
    entries: Iterable[CheckpointEntry], leases: Mapping[PodUid, Lease]
) -> dict[PodUid, Excess]:
    excesses: dict[PodUid, Excess] = {}
    for pod, given in _shares_by_pod(entries).items():
        leased = leases[pod].shares if pod in leases else ()
        excess = {
            uuid: beyond
            for uuid in {share.device for share in given}
            if (beyond := _beyond(_on(uuid, given), _on(uuid, leased))) is not None
        }
        if excess:
            excesses[pod] = excess
    return excesses


def _on(device: DeviceUuid, shares: Iterable[Share]) -> tuple[Share, ...]:
    return tuple(share for share in shares if share.device == device)


def _beyond(given: Sequence[Share], leased: Sequence[Share]) -> DeviceExcess | None:
    (has,) = bookings(given)
    leased_booking = bookings(leased)[0] if leased else None
    place = has.layout, has.mode
    if leased_booking is not None and (leased_booking.layout, leased_booking.mode) != place:
        leased_booking = None
    memory_mib = has.memory_mib - (leased_booking.memory_mib if leased_booking else 0)
    cores_percent = has.cores_percent - (leased_booking.cores_percent if leased_booking else 0)
    shares = has.shares - (leased_booking.shares if leased_booking else 0)
    slots = _slots(given) - (_slots(leased) if leased_booking else set())
    if max(memory_mib, cores_percent, shares) <= 0 and not slots:
        return None
    return DeviceExcess(
        max(0, memory_mib),
        max(0, cores_percent),
        max(0, shares),
        frozenset(slots),
        has.layout,
        has.mode,
        has.sharing is SharingPolicy.EXCLUSIVE and leased_booking is None,
    )


def _slots(shares: Iterable[Share]) -> set[int]:
    return {share.slot for share in shares if share.slot is not None}


def with_leftovers(
    devices: Iterable[Device],
    entries: Iterable[CheckpointEntry],
    beyond: Mapping[PodUid, Excess],
    *,
    since: Mapping[PodUid, float],
    vanished: Mapping[PodUid, float],
    pids: Mapping[PodUid, tuple[int, ...]],
) -> tuple[Device, ...]:
    """`vanished` are deleted pods that have their leases; times are in Unix seconds."""
    if not (beyond or vanished):
        return tuple(devices)
    holders = {entry.allocation.pod: entry.allocation for entry in entries}
    shares = _shares_by_pod(entries)

    def leftover(pod: PodUid, device: DeviceUuid) -> Leftover:
        allocation = holders[pod]
        (booking,) = bookings(_on(device, shares[pod]))
        return Leftover(
            namespace=allocation.namespace,
            name=allocation.name,
            claim=allocation.lease.claim is not None,
            memory_mib=booking.memory_mib,
            since=since[pod] if pod in since else vanished[pod],
            pids=pids.get(pod, ()),
            leased=pod not in since,
        )

    def described(device: Device) -> Device:
        excesses = [of_pod[device.uuid] for of_pod in beyond.values() if device.uuid in of_pod]
        pods = [
            pod
            for pod in sorted({*since, *vanished} & shares.keys())
            if any(share.device == device.uuid for share in shares[pod])
        ]
        if not (excesses or pods):
            return device
        leftovers = tuple(leftover(pod, device.uuid) for pod in pods[:MOST_LEFTOVERS])
        return replace(device, held=_held(device, excesses), leftovers=leftovers)

    return tuple(map(described, devices))


def _held(device: Device, excesses: Sequence[DeviceExcess]) -> Held | None:
    if not excesses:
        return None
    is_whole = any(excess.exclusive for excess in excesses)
    slots = frozenset[int]().union(*(excess.slots for excess in excesses))
    memory_mib = sum(excess.memory_mib for excess in excesses)
    return Held(
        memory_mib=device.memory_mib if is_whole else min(memory_mib, device.memory_mib),
        cores_percent=ALL_CORES
        if is_whole
        else min(sum(excess.cores_percent for excess in excesses), ALL_CORES),
        shares=sum(excess.shares for excess in excesses),
        slots="".join("1" if slot in slots else "0" for slot in range(max(slots, default=-1) + 1)),
        layout=next((excess.layout for excess in excesses if excess.layout), ""),
        mode=excesses[0].mode,
    )


def _overcommitment(
    device: Device,
    own: Sequence[Share],
    others: Collection[Sequence[Share]],
    slices: Set[Interval],
) -> str:
    booked = [bookings(shares)[0] for shares in (own, *others)]
    if device.mode is DeviceMode.MIG:
        return _instance_conflict(booked, own, others)
    if others and any(booking.sharing is SharingPolicy.EXCLUSIVE for booking in booked):
        return "one of its pods has it exclusively"
    modes = sorted({booking.mode for booking in booked})
    if len(modes) > 1:
        return f"it would be shared in the modes {' and '.join(modes)} at once"
    if len(slices) > 1:
        return f"it would have {' and '.join(sorted(slices))} time slices at once"
    slots = sum(booking.slots for booking in booked) if booked[0].slots else 0
    given = (
        ("MiB", sum(booking.memory_mib for booking in booked), device.memory_mib),
        ("% of its cores", sum(booking.cores_percent for booking in booked), ALL_CORES),
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


def check_open(
    shares: Iterable[Share], devices: Mapping[DeviceUuid, Device], closed: Mapping[DeviceUuid, str]
) -> None:
    for share in shares:
        device = devices.get(share.device)
        fault = device.fault if device is not None and not device.healthy else ""
        if fault := closed.get(share.device, fault):
            raise RequestError(f"device {share.device} gets no new share: {fault}")


def close_unrecorded(
    devices: Iterable[Device], unrecorded: Mapping[DeviceUuid, Collection[str]]
) -> tuple[Device, ...]:
    return close_devices(
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
    """A device's memory may be less than before, after the ECC mode or the driver changed."""
    leased: Counter[DeviceUuid] = Counter()
    for lease in leases:
        for booking in bookings(lease.shares):
            leased[booking.device] += 0 if booking.layout else booking.memory_mib
    faults = {
        device.uuid: f"{EXCEEDED}: its leases have {leased[device.uuid]} MiB, and it has only "
        f"{device.memory_mib} MiB now: it gets no new share until some of them end"
        for device in devices
        if device.mode is not DeviceMode.MIG and leased[device.uuid] > device.memory_mib
    }
    return close_devices(devices, faults), frozenset(faults)


def close_devices(
    devices: Iterable[Device], faults: Mapping[DeviceUuid, str]
) -> tuple[Device, ...]:
    return tuple(
        replace(device, healthy=False, fault=faults[device.uuid])
        if device.healthy and device.uuid in faults
        else device
        for device in devices
    )


def held_slots(
    entries: Iterable[CheckpointEntry], leases: Iterable[Lease]
) -> Mapping[DeviceUuid, int]:
    held: dict[DeviceUuid, int] = {}
    for lease in (*(entry.lease for entry in entries), *leases):
        for share in lease.shares:
            needed = 0 if share.slot is None else share.slot + 1
            held[share.device] = max(needed, held.get(share.device, 0))
    return held


def share_holders(entries: Iterable[CheckpointEntry], leases: Iterable[Lease]) -> set[str]:
    return {
        _name(lease)
        for lease in (*(entry.lease for entry in entries), *leases)
        if any(share.mig is None for share in lease.shares)
    }

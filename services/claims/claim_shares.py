"""The shares that a ResourceClaim's allocation needs, and why the ledger refuses them; pure.

A scheduler has chosen the devices and MIG profiles; the places are chosen here.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from msgspec import structs

from shared.model.devices.device import Device, DeviceMode, DeviceUse, MigLayout, MigProfile
from shared.model.devices.enforcers import (
    INSTANCE,
    WHOLE,
    HeldBy,
    Holding,
    MemoryEnforcer,
    SharingMode,
)
from shared.model.devices.time_slices import DEFAULT, Interval
from shared.model.events.claim_events import AllocatedClaim, AllocatedDevice
from shared.model.leases.lease import ClaimAllocation, Lease, MigPlacement, Share, bookings
from shared.model.leases.lease_copy import dump_lease
from shared.model.leases.ledger import LedgerNode, NoCapacity, NodeTotals, Reservation
from shared.model.leases.preemption import PreemptionState
from shared.model.names import DeviceUuid, Namespace, NodeName, name_in
from shared.model.quantity import timestamp
from shared.model.requests.claim import ClaimableDevice, ClaimMode, claimable
from shared.model.requests.placement import Placement
from shared.model.requests.request import ALL_PERCENT, SharingPolicy
from shared.placing.mig_instances import (
    count_free,
    find_instances,
    format_positions,
    layout_shapes,
    parse_positions,
)
from shared.placing.refusal.quota_refusals import over_quota

SHOWN_HOLDERS = 3
SHOWN_GPUS = 8
MOST_DATA = 10_240
"""Bytes of a driver's data in `status.devices` of a ResourceClaim, by the API server."""
NUMBERS_BYTES = 16
"""Of a share, in the copy of a lease; the lease itself has twice as many."""


def name_of(claim: AllocatedClaim) -> str:
    return f"ResourceClaim {claim.namespace}/{claim.name}"


def covers(lease: Lease, claim: AllocatedClaim) -> bool:
    return lease.claim is not None and lease.claim.generation == claim.generation


def reservation_of(
    claim: AllocatedClaim, node: LedgerNode | None, trace: str = ""
) -> Reservation | str:
    """Return the request for a lease on what was allocated, or why there can be none."""
    if claim.refusal:
        return claim.refusal
    shares = _shares_of(claim, node)
    if isinstance(shares, str):
        return shares
    lease = Lease(
        pod=claim.claim,
        namespace=claim.namespace,
        name=claim.name,
        node=claim.node,
        shares=tuple(shares),
        claim=ClaimAllocation(generation=claim.generation, consumers=claim.consumers),
        intervals={device.request: device.interval for device in claim.devices if device.interval},
        trace=trace,
    )
    size = len(dump_lease(lease)) + NUMBERS_BYTES * (2 + len(shares))
    if size > MOST_DATA:
        return (
            f"the copy of its lease has up to {size} bytes, and its status has room for "
            f"{MOST_DATA}: request fewer devices, or give the requests shorter names"
        )
    return Reservation(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        candidates=(Placement(node=lease.node, shares=lease.shares),),
        claim=lease.claim,
        intervals=lease.intervals,
        trace=lease.trace,
    )


def _shares_of(claim: AllocatedClaim, node: LedgerNode | None) -> list[Share] | str:
    devices = _claimable_devices(node)
    shares: list[Share] = []
    profiles: dict[DeviceUuid, list[str]] = {}
    instances: list[tuple[Device, DeviceUse]] = []
    for allocated in claim.devices:
        if allocated.device not in devices:
            return f"node {claim.node} has no device {allocated.device}"
        device, use, (profile, mode) = devices[allocated.device]
        if profile is None:
            demand = demand_of(mode, is_of_one_pod=claim.is_of_one_pod)
            holding = holding_of(allocated, device, demand, use.mode)
            if holding is None:
                return _unheld_text(claim.node, device, demand, use.mode)
            shares.append(share_of(allocated, device, holding))
        elif allocated.interval not in {None, DEFAULT}:
            return (
                f"sharing.timeSlicingConfig.interval is {allocated.interval}, and request "
                f"{allocated.request} has an instance of MIG, which has no time slices to set: "
                "leave it out"
            )
        else:
            shares.append(instance_of(allocated, device, profile))
            if device.uuid not in profiles:
                instances.append((device, use))
            profiles.setdefault(device.uuid, []).append(profile.name)
    places: dict[DeviceUuid, Iterator[MigPlacement]] = {}
    for device, use in instances:
        wanted = profiles[device.uuid]
        chosen = choose_places(device, use, wanted)
        if chosen is None:
            return (
                f"{_gpu(device, claim.node)} has no layout with {_together(wanted)}; its layouts: "
                f"{'; '.join(map(_layout_text, device.layouts))}"
            )
        places[device.uuid] = iter(chosen)
    return [
        structs.replace(share, mig=next(places[share.device])) if share.mig else share
        for share in shares
    ]


def _claimable_devices(
    node: LedgerNode | None,
) -> dict[str, tuple[Device, DeviceUse, ClaimableDevice]]:
    return {
        name: (device, use, part)
        for device, use in (node.devices if node else ())
        for name, part in claimable(device).items()
    }


def demand_of(mode: ClaimMode, *, is_of_one_pod: bool) -> HeldBy:
    """The driver limits each pod for itself: it cannot hold a claim of several pods."""
    by_container: MemoryEnforcer = "mps" if mode == "mps" else "hami-core"
    return HeldBy(memory=None if is_of_one_pod else by_container, compute=mode or None)


def holding_of(
    allocated: AllocatedDevice, device: Device, demand: HeldBy, mode: SharingMode | Literal[""]
) -> Holding | None:
    """Return None if nothing holds such a part."""
    if demand.compute is None and is_whole(allocated, device):
        return WHOLE
    return device.offer.holding(demand, mode=mode, capped=allocated.cores_percent > 0)


def is_whole(allocated: AllocatedDevice, device: Device) -> bool:
    memory_mib = device.memory_mib if allocated.memory_mib is None else allocated.memory_mib
    return memory_mib >= device.memory_mib and allocated.cores_percent in {0, ALL_PERCENT}


def share_of(allocated: AllocatedDevice, device: Device, holding: Holding) -> Share:
    """All memory of a device makes the share exclusive.

    A share without cores fits beside others that have them all, as in the scheduler's sum of
    capacities.
    """
    memory_mib = device.memory_mib if allocated.memory_mib is None else allocated.memory_mib
    whole = holding == WHOLE
    sharing = SharingPolicy.SHARED if allocated.cores_percent else SharingPolicy.BEST_EFFORT
    return structs.replace(
        _share(allocated, device, memory_mib),
        cores_percent=ALL_PERCENT if whole else allocated.cores_percent,
        whole=whole,
        sharing=SharingPolicy.EXCLUSIVE if whole else sharing,
        memory=holding.memory,
        compute=holding.compute,
        mode=holding.mode,
    )


def _unheld_text(
    node: NodeName, device: Device, demand: HeldBy, mode: SharingMode | Literal[""]
) -> str:
    where = _gpu(device, node)
    if device.offer.holding(demand, mode="", capped=True) is not None:
        return f"{where} is shared in mode {mode} until the last of its leases ends"
    missing = device.missing_text or "no limits would be enforced"
    if demand.memory == "hami-core" and device.offer.memory:
        return (
            f"{where} has no HAMi-core, which limits claims that several pods may use: {missing}. "
            "Give each pod a claim of its own, by a ResourceClaimTemplate"
        )
    return f"nothing holds a part of {where}: {missing}"


def choose_places(
    device: Device, use: DeviceUse, profiles: Sequence[str]
) -> list[MigPlacement] | None:
    """Return None if no layout has them all; the ledger refuses places that are not free."""
    shapes = layout_shapes(device.layouts)
    taken = parse_positions(use.taken.slots_taken)
    free = find_instances(shapes, use.taken.layout, taken, profiles)
    return free if free is not None else find_instances(shapes, "", 0, profiles)


def with_instances(node: LedgerNode, shares: Iterable[Share]) -> LedgerNode:
    places: dict[DeviceUuid, list[MigPlacement]] = {}
    for share in shares:
        if share.mig is not None:
            places.setdefault(share.device, []).append(share.mig)
    devices = tuple(
        (device, _with_places(use, places.get(device.uuid, ()))) for device, use in node.devices
    )
    return replace(node, devices=devices)


def _with_places(use: DeviceUse, places: Sequence[MigPlacement]) -> DeviceUse:
    taken = parse_positions(use.slots_taken)
    layout = use.taken.layout or next((place.layout for place in places), "")
    for place in places:
        if place.layout == layout:
            taken |= 1 << place.position
    return structs.replace(use, layout=layout, slots_taken=format_positions(taken))


def instance_of(allocated: AllocatedDevice, device: Device, profile: MigProfile) -> Share:
    """Its layout and position are still to be chosen."""
    return structs.replace(
        _share(allocated, device, profile.memory_mib),
        mig=MigPlacement(layout="", position=0, profile=profile.name),
        memory=INSTANCE.memory,
        compute=INSTANCE.compute,
        mode=INSTANCE.mode,
    )


def slices_refusal(wanted: Reservation, leases: Iterable[Lease]) -> str:
    """Return why these time slices cannot be set beside a node's leases, or an empty text.

    A GPU has one length for all processes.
    """
    [candidate] = wanted.candidates
    asked: dict[DeviceUuid, Interval] = {}
    others = [(lease, lease.time_slices) for lease in leases if lease.pod != wanted.pod]
    for share in candidate.shares:
        interval = wanted.intervals.get(share.container)
        if interval is None or share.mig is not None:
            continue
        where = f"{_gpu_of(share)} of {candidate.node}"
        if asked.setdefault(share.device, interval) != interval:
            return (
                f"the claim asks for time slices of two lengths on {where}: "
                f"{asked[share.device]} and {interval}"
            )
        asking = [lease for lease, of in others if of.get(share.device, interval) != interval]
        if asking:
            return (
                f"{where} has {asking[0].time_slices[share.device]} time slices, and the claim "
                f"asks for {interval}: a GPU has one length of them at a time, asked for by "
                f"{holders(asking, share.device, wanted.namespace)}"
            )
    return ""


def _gpu_of(share: Share) -> str:
    return f"GPU {share.index} ({share.device})"


def _share(allocated: AllocatedDevice, device: Device, memory_mib: int) -> Share:
    return Share(
        container=allocated.request,
        device=device.uuid,
        index=device.index,
        device_mib=device.memory_mib,
        device_model=device.model,
        memory_mib=memory_mib,
        cores_percent=0,
        share_id=allocated.share_id,
    )


def kept_shares(wanted: Reservation, totals: NodeTotals) -> list[Share]:
    [candidate] = wanted.candidates
    kept = {device.uuid for device, use in totals.node.devices if use.claimed_by}
    return [share for share in candidate.shares if share.device in kept]


def kept_text(wanted: Reservation, totals: NodeTotals, state: PreemptionState) -> str:
    viewer = wanted.namespace
    for share in kept_shares(wanted, totals):
        where = f"{_gpu_of(share)} of {totals.node.facts.name} is kept for"
        for preemption in (read.preemption for read in state.open):
            if wanted.pod not in preemption.holders and share.device in preemption.devices:
                namespace = preemption.preemptor_namespace
                pod = name_in(viewer, namespace, preemption.preemptor_name)
                return f"{where} {pod}, for which pods are evicted"
        for start in (start for start in state.starts if share.device in start.devices):
            pod = name_in(viewer, start.namespace, start.wanted[0].name)
            return f"{where} {pod}, whose start is planned for {timestamp(start.at)}"
    return ""


def refusal_text(wanted: Reservation, refused: NoCapacity, totals: NodeTotals | None) -> str:
    if refused.quotas:
        return over_quota(wanted.namespace, refused.quotas, None).reason
    [candidate] = wanted.candidates
    devices = {device.uuid: device for device, _ in totals.node.devices} if totals else {}
    named = [share for share in candidate.shares if refused.reason.endswith(share.device)]
    share = (named or list(candidate.shares))[0]
    device = devices.get(share.device)
    if totals is None or device is None or not device.healthy:
        where = f"{_gpu_of(share)} of {candidate.node}"
        fault = f": {device.public_fault}" if device and device.public_fault else ""
        return f"{where} is not available{fault}"
    held = holders(totals.leases, device.uuid, wanted.namespace)
    if share.mig is not None:
        return _instances_text(candidate.shares, device, totals, held)
    return _full_text(candidate.shares, device, totals, held)


def _instances_text(shares: Iterable[Share], device: Device, totals: NodeTotals, held: str) -> str:
    wanted = [share.mig.profile for share in shares if share.device == device.uuid and share.mig]
    free = [
        f"{_free_text(use, other)} on GPU {other.index}"
        for other, use in totals.node.devices
        if other.mode is DeviceMode.MIG and other.healthy
    ]
    more = f"; and {len(free) - SHOWN_GPUS} more GPUs" if len(free) > SHOWN_GPUS else ""
    return (
        f"{_gpu(device, totals.node.facts.name)} has no place for {_together(wanted)}; free are: "
        f"{'; '.join(free[:SHOWN_GPUS])}{more}; GPU {device.index} is leased to {held}"
    )


def _free_text(use: DeviceUse, device: Device) -> str:
    taken = parse_positions(use.taken.slots_taken)
    free = count_free(layout_shapes(device.layouts), use.taken.layout, taken)
    if use.taken.exclusive or not free:
        return "none"
    counts = [f"{count} of {profile}" for profile, count in free.items()]
    return (" and " if use.taken.layout else " or ").join(counts)


def _gpu(device: Device, node: NodeName) -> str:
    return f"GPU {device.index} ({device.uuid}) of {node}"


def _together(profiles: Sequence[str]) -> str:
    """For example, `1g.5gb and 2 x 3g.20gb`."""
    counts = Counter(profiles)
    return " and ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())


def _layout_text(layout: MigLayout) -> str:
    return _together([profile.name for profile in layout.positions])


def _full_text(shares: Sequence[Share], device: Device, totals: NodeTotals, held: str) -> str:
    """No percent sign: kube-scheduler takes it for a format."""
    leased = [
        (lease, booking)
        for lease in totals.leases
        for booking in bookings(lease.shares)
        if booking.device == device.uuid
    ]
    needs = next(booking for booking in bookings(shares) if booking.device == device.uuid)
    free_mib = device.memory_mib - sum(booking.memory_mib for _, booking in leased)
    free_cores = ALL_PERCENT - sum(booking.cores_percent for _, booking in leased)
    free_slots = device.slots - sum(booking.shares for _, booking in leased)
    return (
        f"GPU {device.index} ({device.uuid}) of {totals.node.facts.name} has {free_mib} MiB, "
        f"{free_cores} percent of its cores and {free_slots} shares free, and the claim needs "
        f"{needs.memory_mib} MiB, {needs.cores_percent} percent and {needs.shares}; "
        f"it is leased to {held}"
    )


def holders(leases: Iterable[Lease], device: DeviceUuid, viewer: Namespace) -> str:
    """Name only what the viewer's namespace has leased."""
    held = [
        (lease, booking.memory_mib)
        for lease in leases
        for booking in bookings(lease.shares)
        if booking.device == device
    ]
    named = [
        f"{'claim' if lease.claim else 'pod'} {lease.namespace}/{lease.name} ({memory_mib} MiB)"
        for lease, memory_mib in held
        if lease.namespace == viewer
    ][:SHOWN_HOLDERS]
    left = len(held) - len(named)
    if named:
        return ", ".join(named) + (f" and {left} more" if left else "")
    if left == 1:
        return "a pod or claim of another namespace"
    return f"{left} pods or claims of other namespaces" if left else "nobody"

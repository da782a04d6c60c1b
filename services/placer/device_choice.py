"""Which devices of one node a pod gets, container by container, in the order its author chose."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.placer.device_filters import device_excluded, is_selective
from services.placer.mirrored import DeviceState, NodeState
from shared.model.device import IDLE_BEFORE, Device, needed_cores, needed_mib
from shared.model.lease import Share, Terms
from shared.model.request import Company, DeviceOrder, GpuRequest, PodRequest

Pick = tuple[GpuRequest, DeviceState, int]
"""A container, a device for it, and the MiB that its share takes there."""


@dataclass(slots=True)
class Own:
    """What earlier containers of the same pod were given of one device."""

    memory: int = 0
    cores: int = 0
    shares: int = 0
    alone: bool = False


Owns = Mapping[DeviceState, Own]

NOTHING_OWN: Owns = {}


def choose_devices(request: PodRequest, node: NodeState) -> list[Pick] | None:
    """Return a device for every share of the pod, or None if the node has too little.

    Two shares of one container never meet on a device; two containers may. Init containers run
    before the others, so what they use is free again for them.
    """
    if not request.containers:
        return []
    selection = request.selection
    devices: Sequence[DeviceState] = node.devices
    if is_selective(selection):
        devices = [d for d in devices if device_excluded(selection, d.device) is None]
    if len(request.containers) == 1:
        return chosen_for(request.containers[0], request, devices, NOTHING_OWN)
    if request.same_device:
        for device in in_order(request, devices, {}):
            picks = in_turn(request, (device,))
            if picks is not None:
                return picks
        return None
    return in_turn(request, devices)


def in_turn(request: PodRequest, devices: Sequence[DeviceState]) -> list[Pick] | None:
    """Give every container its devices, one container after the other."""
    picks: list[Pick] = []
    owns: dict[DeviceState, Own] = {}
    several = len(request.containers) > 1
    for container in request.containers:
        chosen = chosen_for(container, request, devices, owns)
        if chosen is None:
            return None
        picks += chosen
        if several and not container.init:
            note_given(chosen, owns)
    return picks


def chosen_for(
    container: GpuRequest, request: PodRequest, devices: Sequence[DeviceState], owns: Owns
) -> list[Pick] | None:
    """Return a device for every share of one container, or None if too few can take one."""
    wanted = container.gpus
    if wanted > len(devices):
        return None
    tags, room, idle = request.tags, room_for(container), container.company in IDLE_BEFORE
    slotted, slots, chosen = container.slotted, container.slots, []
    seen = NOTHING_OWN if container.init else owns
    if request.distinct and owns:
        devices = [device for device in devices if device not in owns]
    for device in in_order(request, devices, owns):
        # What the pod's own containers took is looked at only where the rest would fit.
        if (device.slotted_room if slotted and not slots else device.room) < room or device.mig:
            continue
        memory = share_mib(container, device)
        if (
            device.memory + memory <= device.total
            and not (idle and device.shares)
            and not (tags and not device.tags.isdisjoint(tags))
            and not (slots and slotted and device.shares >= slots)
            and (not seen or _fits_beside(container, device, memory, seen.get(device)))
        ):
            chosen.append((container, device, memory))
            if len(chosen) == wanted:
                break
    if len(chosen) < wanted:
        return None
    if container.whole:
        chosen.sort(key=lambda pick: pick[1].index)
    return chosen


def _fits_beside(container: GpuRequest, device: DeviceState, memory: int, own: Own | None) -> bool:
    if own is None:
        return True
    return (
        not own.alone
        and device.memory + own.memory + memory <= device.total
        and device.cores + own.cores + room_for(container) <= 100
        and not (container.company in IDLE_BEFORE and own.shares)
        and (
            not container.slotted or device.shares + own.shares < (container.slots or device.slots)
        )
    )


def note_given(chosen: Sequence[Pick], owns: dict[DeviceState, Own]) -> None:
    """Add to what the pod's containers were given so far."""
    for container, device, memory in chosen:
        own = owns.setdefault(device, Own())
        own.memory += memory
        own.cores += needed_cores(container)
        own.shares += 1
        own.alone |= container.company is Company.ALONE


def room_for(container: GpuRequest) -> int:
    """Return the percent of a device's cores that must be unreserved for a share to come.

    One without cores still does not join where all of them are reserved, unless it may.
    """
    if container.whole:
        return 100
    return container.cores_percent or int(container.company is not Company.ANY)


def share_mib(container: GpuRequest, device: DeviceState) -> int:
    """Return what a share takes of the device: `shared.model.device.needed_mib` on the mirror."""
    units = container.memory_units
    if units is None or container.memory_percent is not None or container.memory_bytes is not None:
        return needed_mib(container, device.device)
    return device.everything if container.whole else units * device.unit


def in_order(
    request: PodRequest, devices: Sequence[DeviceState], owns: Owns
) -> Sequence[DeviceState]:
    """Sort devices, given by ascending index, into the order in which they are tried."""
    order = request.device_order
    if order is DeviceOrder.LAST:
        return devices[::-1]
    if order is DeviceOrder.FIRST:
        return devices
    if not owns:
        plain = _PLAIN.get(order)
        if plain is not None:
            return sorted(devices, key=plain)
    rank = _RANKS[order]
    return sorted(
        devices, key=lambda device: rank(device, owns.get(device, _NOTHING), request.weights)
    )


Weights = tuple[int, int, int]

_NOTHING = Own()

_PLAIN: Mapping[DeviceOrder, Callable[[DeviceState], int]] = {
    DeviceOrder.BINPACK: lambda device: -device.memory,
    DeviceOrder.SPREAD: lambda device: device.shares,
}
"""Where the pod has nothing of its own yet, and nothing needs weighing."""


def _allocated(device: DeviceState, own: Own, weights: Weights) -> int:
    """Return the weighted part of a device that is in use, in millionths."""
    slots, cores, memory = weights
    return (
        slots * 1_000_000 * (device.shares + own.shares) // max(device.slots, 1)
        + cores * 10_000 * (device.cores + own.cores)
        + memory * 1_000_000 * (device.memory + own.memory) // max(device.total, 1)
    )


_RANKS: Mapping[DeviceOrder, Callable[[DeviceState, Own, Weights], tuple[int, int]]] = {
    DeviceOrder.BINPACK: lambda device, own, _: (0, -device.memory - own.memory),
    DeviceOrder.SPREAD: lambda device, own, _: (0, device.shares + own.shares),
    DeviceOrder.TIGHTEST: lambda device, own, _: (
        -device.cores - own.cores,
        -device.memory - own.memory,
    ),
    DeviceOrder.MOST_ALLOCATED: lambda *facts: (0, -_allocated(*facts)),
    DeviceOrder.LEAST_ALLOCATED: lambda *facts: (0, _allocated(*facts)),
}


KNOWN_SHARES = 16
"""Shares kept per device: a share is a value, and pods of one template ask for equal ones."""


def shares_of(picks: Sequence[Pick]) -> tuple[Share, ...]:
    """Return the shares that a choice amounts to."""
    return tuple([_share(*pick) for pick in picks])


def _share(container: GpuRequest, device: DeviceState, memory: int) -> Share:
    key = (
        memory,
        container.container,
        container.cores_percent,
        container.company,
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
        share = device.known_shares[key] = Share(
            container=container.container,
            device=device.uuid,
            index=device.index,
            memory_mib=memory,
            cores_percent=needed_cores(container),
            unit_mib=device.unit,
            whole=container.whole,
            slotted=container.slotted,
            init=container.init,
            company=container.company,
            slots=container.slots,
            terms=terms_of(container, device.device, memory) if container.keeps_terms else None,
        )
    return share


def terms_of(container: GpuRequest, device: Device, memory_mib: int) -> Terms:
    """Return in which terms a container asked, for the dialects that must repeat them."""
    return Terms(
        memory_mib=memory_mib,
        device_mib=device.memory_mib,
        memory_bytes=None if container.whole else container.memory_bytes,
        memory_percent=None if container.whole else container.memory_percent,
    )

"""Which devices of one node a pod gets, container by container, in the order its author chose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.placer.device_filters import device_excluded, is_selective, mode_differs
from services.placer.mirrored import DeviceState, NodeState
from shared.model.device import needed_cores
from shared.model.lease import Share
from shared.model.request import DeviceOrder, GpuRequest, PodRequest

Pick = tuple[GpuRequest, DeviceState, int]
"""A container, a device for it, and the MiB that its share takes there."""


@dataclass(slots=True)
class Own:
    """What earlier containers of the same pod were given of one device."""

    memory: int = 0
    cores: int = 0
    shares: int = 0


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
        if mode_differs(selection, (device.device for device in devices)):
            return None
        devices = [d for d in devices if device_excluded(selection, d.device) is None]
    if len(request.containers) == 1:
        return chosen_for(request.containers[0], request, devices, NOTHING_OWN)
    if request.same_device:
        for device in in_order(request.device_order, devices, {}):
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
    tag, cores = request.tag, 100 if container.whole else container.cores_percent
    slotted, chosen = container.slotted, []
    seen = NOTHING_OWN if container.init else owns
    for device in in_order(request.device_order, devices, owns):
        # What the pod's own containers took is looked at only where the rest would fit.
        if (device.slotted_room if slotted else device.room) < cores:
            continue
        memory = share_mib(container, device)
        if (
            device.memory + memory <= device.total
            and (cores != 100 or not device.shares)
            and not (tag and tag in device.tags)
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
    wanted, cores = needed_cores(container), device.cores + own.cores
    return (
        device.memory + own.memory + memory <= device.total
        and cores + wanted <= 100
        and cores < 100
        and (wanted != 100 or not own.shares)
        and (not container.slotted or device.shares + own.shares < device.slots)
    )


def note_given(chosen: Sequence[Pick], owns: dict[DeviceState, Own]) -> None:
    """Add to what the pod's containers were given so far."""
    for container, device, memory in chosen:
        own = owns.setdefault(device, Own())
        own.memory += memory
        own.cores += needed_cores(container)
        own.shares += 1


def share_mib(container: GpuRequest, device: DeviceState) -> int:
    """Return what a share takes of the device: `shared.model.device.needed_mib` on the mirror."""
    if container.whole:
        return device.total
    if container.memory_percent is not None:
        return device.total // device.unit * container.memory_percent // 100 * device.unit
    if container.memory_units is not None:
        return container.memory_units * device.unit
    return device.total


def in_order(
    order: DeviceOrder, devices: Sequence[DeviceState], owns: Owns
) -> Sequence[DeviceState]:
    """Sort devices, given by ascending index, into the order in which they are tried."""
    if order is DeviceOrder.LAST:
        return devices[::-1]
    if order is DeviceOrder.FIRST:
        return devices
    own = {device: owns.get(device, _NOTHING) for device in devices} if owns else None
    if order is DeviceOrder.BINPACK:
        if own is None:
            return sorted(devices, key=_fullness)
        return sorted(devices, key=lambda d: -(d.memory + own[d].memory))
    if own is None:
        return sorted(devices, key=_share_count)
    return sorted(devices, key=lambda d: d.shares + own[d].shares)


_NOTHING = Own()


def _fullness(device: DeviceState) -> int:
    return -device.memory


def _share_count(device: DeviceState) -> int:
    return device.shares


KNOWN_SHARES = 16
"""Shares kept per device: a share is a value, and pods of one template ask for equal ones."""


def shares_of(picks: Sequence[Pick]) -> tuple[Share, ...]:
    """Return the shares that a choice amounts to."""
    return tuple([_share(*pick) for pick in picks])


def _share(container: GpuRequest, device: DeviceState, memory: int) -> Share:
    key = (
        container.container,
        memory,
        container.cores_percent,
        container.whole,
        container.slotted,
        container.init,
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
        )
    return share

"""Which devices of one node a pod gets, container by container, in the order its author chose."""

from collections.abc import Sequence
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


Owns = dict[DeviceState, Own]


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
    owns: Owns = {}
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
    chosen: list[Pick] = []
    seen = None if container.init else owns
    for device in in_order(request.device_order, devices, owns):
        if len(chosen) == wanted:
            break
        memory = share_mib(container, device)
        own = seen.get(device) if seen else None
        if takes(container, device, memory, request.tag, own):
            chosen.append((container, device, memory))
    if len(chosen) < wanted:
        return None
    if container.whole:
        chosen.sort(key=lambda pick: pick[1].index)
    return chosen


def note_given(chosen: Sequence[Pick], owns: Owns) -> None:
    """Add to what the pod's containers were given so far."""
    for container, device, memory in chosen:
        own = owns.setdefault(device, Own())
        own.memory += memory
        own.cores += needed_cores(container)
        own.shares += 1


def takes(
    container: GpuRequest, device: DeviceState, memory: int, tag: str, own: Own | None
) -> bool:
    """Say whether the device can take a share: `shared.model.device.fits` on the mirror."""
    taken, cores, shares = device.memory, device.cores, device.shares
    if own is not None:
        taken += own.memory
        cores += own.cores
        shares += own.shares
    wanted = 100 if container.whole else container.cores_percent
    return (
        taken + memory <= device.total
        and cores + wanted <= 100
        and cores < 100
        and device.healthy
        and (wanted != 100 or shares == 0)
        and (not container.slotted or shares < device.slots)
        and not (tag and tag in device.tags)
    )


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


def shares_of(picks: Sequence[Pick]) -> tuple[Share, ...]:
    """Return the shares that a choice amounts to."""
    return tuple(
        Share(
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
        for container, device, memory in picks
    )

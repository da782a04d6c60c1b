"""In which order a node's devices are tried, given what the pod has of them already."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.placer.mirror.node_mirror import DeviceState
from shared.model.request import DeviceOrder, PodRequest


@dataclass(slots=True)
class Own:
    """What earlier containers of the same pod were given of one device."""

    memory: int = 0
    cores: int = 0
    shares: int = 0
    alone: bool = False
    layout: str = ""
    """MIG layout that instances of the pod pin, those of init containers too."""
    positions: int = 0
    """Its positions that are taken, as bits."""


Owns = Mapping[DeviceState, Own]

NOTHING_OWN: Owns = {}
NOTHING = Own()

Weights = tuple[int, int, int]


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
        devices,
        key=lambda device: rank(device, owns.get(device, NOTHING), request.allocation_weights),
    )


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
    DeviceOrder.LEAST_LINKED: lambda device, *_: (0, sum(device.device.links.values())),
}

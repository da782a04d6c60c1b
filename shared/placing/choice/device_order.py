"""The order in which a node's devices are tried, given the pod's use of them; pure."""

from collections.abc import Callable, Mapping, Sequence

from shared.model.request import DeviceOrder, PodRequest
from shared.placing.choice.picks import NO_POD_USE, PodDeviceUse, PodDeviceUses
from shared.placing.mirror.node_mirror import MirroredDevice

AllocationWeights = tuple[int, int, int]


def ordered_devices(
    request: PodRequest, devices: Sequence[MirroredDevice], pod_uses: PodDeviceUses
) -> Sequence[MirroredDevice]:
    """Sort devices, given by ascending index, into the order in which they are tried."""
    order = request.device_order
    if order is DeviceOrder.LAST:
        return devices[::-1]
    if order is DeviceOrder.FIRST:
        return devices
    if not pod_uses:
        key = _KEYS_WITHOUT_POD_USE.get(order)
        if key is not None:
            return sorted(devices, key=key)
    key_of = _KEYS[order]
    return sorted(
        devices,
        key=lambda device: key_of(
            device, pod_uses.get(device, NO_POD_USE), request.allocation_weights
        ),
    )


_KEYS_WITHOUT_POD_USE: Mapping[DeviceOrder, Callable[[MirroredDevice], int]] = {
    DeviceOrder.BINPACK: lambda device: -device.used_mib,
    DeviceOrder.SPREAD: lambda device: device.shares,
}
"""Sort keys of orders that need no weights, while the pod uses no device yet."""


def _allocated(device: MirroredDevice, pod_use: PodDeviceUse, weights: AllocationWeights) -> int:
    """Return the weighted part of a device that is in use, in millionths."""
    slots, cores, memory = weights
    return (
        slots * 1_000_000 * (device.shares + pod_use.shares) // max(device.slots, 1)
        + cores * 10_000 * (device.used_cores + pod_use.cores_percent)
        + memory * 1_000_000 * (device.used_mib + pod_use.memory_mib) // max(device.total_mib, 1)
    )


_KEYS: Mapping[
    DeviceOrder, Callable[[MirroredDevice, PodDeviceUse, AllocationWeights], tuple[int, int]]
] = {
    DeviceOrder.BINPACK: lambda device, pod_use, _: (0, -device.used_mib - pod_use.memory_mib),
    DeviceOrder.SPREAD: lambda device, pod_use, _: (0, device.shares + pod_use.shares),
    DeviceOrder.TIGHTEST: lambda device, pod_use, _: (
        -device.used_cores - pod_use.cores_percent,
        -device.used_mib - pod_use.memory_mib,
    ),
    DeviceOrder.MOST_ALLOCATED: lambda *facts: (0, -_allocated(*facts)),
    DeviceOrder.LEAST_ALLOCATED: lambda *facts: (0, _allocated(*facts)),
    DeviceOrder.LEAST_LINKED: lambda device, *_: (0, sum(device.device.links.values())),
}

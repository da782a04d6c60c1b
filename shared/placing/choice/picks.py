"""Devices picked for a pod: what its containers use of each, and the shares they become; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.model.device import required_cores_percent
from shared.model.lease import MigPlacement, Share
from shared.model.request import GpuRequest, SharingPolicy
from shared.placing.mirror.node_mirror import MirroredDevice
from shared.placing.shares import enforced_share, instance_share

DevicePick = tuple[GpuRequest, MirroredDevice, int, MigPlacement | None]
"""A container, a device for it, the MiB of its share there, and the MIG instance; None: HAMi-core
enforces the share."""


@dataclass(slots=True)
class PodDeviceUse:
    """The use of one device by earlier containers of the same pod that go on running."""

    memory_mib: int = 0
    cores_percent: int = 0
    shares: int = 0
    exclusive: bool = False
    layout: str = ""
    """MIG layout that instances of the pod pin, those of init containers too."""
    instances: list[tuple[GpuRequest, int, int]] = field(default_factory=list)
    """Containers, those that end first too, with the MiB and the position of their instances."""

    def instances_beside(self, container: GpuRequest, pod: Sequence[GpuRequest]) -> tuple[int, int]:
        """Return the positions, as bits, and the MiB of instances in use beside a container."""
        positions = memory_mib = 0
        place = pod.index(container) if self.instances else 0
        for other, instance_mib, position in self.instances:
            earlier = other if pod.index(other) < place else container
            if not earlier.init:
                positions |= 1 << position
                memory_mib += instance_mib
        return positions, memory_mib


PodDeviceUses = Mapping[MirroredDevice, PodDeviceUse]

NO_POD_USES: PodDeviceUses = {}
NO_POD_USE = PodDeviceUse()


def add_pod_uses(picks: Sequence[DevicePick], pod_uses: dict[MirroredDevice, PodDeviceUse]) -> None:
    """Add picks to what the pod's containers use; of an init container, only instances stay."""
    for container, device, memory_mib, instance in picks:
        if container.init and instance is None:
            continue
        pod_use = pod_uses.setdefault(device, PodDeviceUse())
        if instance is not None:
            pod_use.layout = instance.layout
            pod_use.instances.append((container, memory_mib, instance.position))
        if container.init:
            continue
        pod_use.memory_mib += memory_mib
        pod_use.shares += 1
        if instance is None:
            pod_use.cores_percent += required_cores_percent(container)
            pod_use.exclusive |= container.sharing is SharingPolicy.EXCLUSIVE


def build_shares(picks: Sequence[DevicePick]) -> tuple[Share, ...]:
    """Return the shares that picks become."""
    return tuple(
        [
            enforced_share(container, device.device, memory_mib)
            if instance is None
            else instance_share(container, device.device, memory_mib, instance)
            for container, device, memory_mib, instance in picks
        ]
    )

"""Known devices, and their allocations to containers; pure.

This is the bookkeeping of a kubelet's device manager. While a plugin is gone, its resource stays
listed with nothing allocatable; `forget` drops it after the grace period.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

HEALTHY = "Healthy"
NO_NUMA: Mapping[str, frozenset[int]] = {}


@dataclass(frozen=True, slots=True)
class PluginAllocation:
    """Devices of one resource for one container, and the plugin's response."""

    pod_uid: str
    container: str
    resource: str
    devices: frozenset[str]
    response: bytes  # ContainerAllocateResponse, as the plugin sent it


class AllocationError(Exception):
    """A container cannot get its devices; the message is for the pod's owner."""


class KubeletDevices:
    """Known devices by health, and allocations by container."""

    def __init__(self) -> None:
        self.healthy: dict[str, frozenset[str]] = {}
        self.unhealthy: dict[str, frozenset[str]] = {}
        self.numa: dict[str, Mapping[str, frozenset[int]]] = {}
        """The NUMA nodes of each device, by resource."""
        self.allocations: dict[tuple[str, str, str], PluginAllocation] = {}
        """By pod uid, container and resource."""
        self.reserved: dict[str, set[str]] = {}
        """Devices for which a plugin's Allocate is in progress, by resource."""

    def update(
        self,
        resource: str,
        healths: Mapping[str, str],
        numa: Mapping[str, frozenset[int]] = NO_NUMA,
    ) -> None:
        """Replace the devices of a resource by the plugin's latest list."""
        self.numa[resource] = numa
        self.healthy[resource] = frozenset(d for d, health in healths.items() if health == HEALTHY)
        self.unhealthy[resource] = frozenset(healths) - self.healthy[resource]

    def mark_unhealthy(self, resource: str) -> None:
        """Mark all devices of a resource unhealthy: the plugin's stream has ended."""
        registered = self.healthy.get(resource, frozenset()) | self.unhealthy.get(
            resource, frozenset()
        )
        self.healthy[resource] = frozenset()
        self.unhealthy[resource] = registered

    def list_without_devices(self, resource: str) -> None:
        """List a resource of the checkpoint whose plugin has not registered yet."""
        self.healthy[resource] = frozenset()
        self.unhealthy[resource] = frozenset()

    def forget(self, resource: str) -> None:
        """Drop a resource; its allocations stay."""
        self.healthy.pop(resource, None)
        self.unhealthy.pop(resource, None)

    def manages(self, resource: str) -> bool:
        """Return whether this resource is the device manager's, not the node's allocatable."""
        return resource in self.healthy or any(key[2] == resource for key in self.allocations)

    def capacity(self) -> dict[str, int]:
        """Count all devices per resource."""
        return {
            name: len(device_ids) + len(self.unhealthy[name])
            for name, device_ids in self.healthy.items()
        }

    def allocatable(self) -> dict[str, int]:
        """Count healthy devices per resource, allocated or not."""
        return {name: len(device_ids) for name, device_ids in self.healthy.items()}

    def get(self, pod_uid: str, container: str, resource: str) -> PluginAllocation | None:
        """Return a container's allocation of a resource."""
        return self.allocations.get((pod_uid, container, resource))

    def container_allocations(self, pod_uid: str, container: str) -> list[PluginAllocation]:
        """Return all allocations of a container, in their order."""
        return [
            allocation
            for (uid, name, _), allocation in self.allocations.items()
            if uid == pod_uid and name == container
        ]

    def record(self, allocation: PluginAllocation) -> None:
        """Record an allocation."""
        key = (allocation.pod_uid, allocation.container, allocation.resource)
        self.allocations[key] = allocation

    def in_use(self, resource: str) -> frozenset[str]:
        """Return the devices of a resource that are allocated or reserved."""
        used: set[str] = set(self.reserved.get(resource, ()))
        for (_, _, name), allocation in self.allocations.items():
            if name == resource:
                used |= allocation.devices
        return frozenset(used)

    def retain(self, active: Set[str]) -> None:
        """Free the allocations of pods outside `active`."""
        for key in [key for key in self.allocations if key[0] not in active]:
            del self.allocations[key]


@dataclass(frozen=True, slots=True)
class DeviceCandidates:
    """The devices to choose from, before the plugin states its preference."""

    reused: frozenset[str]
    available: frozenset[str]
    needed: int  # beside the reused ones


def choose_devices(
    state: KubeletDevices, resource: str, required: int, reusable: Iterable[str]
) -> DeviceCandidates:
    """Return the devices that a container may get; raises AllocationError as a kubelet does.

    Devices of the pod's finished init containers come first, in a stable order.
    """
    if resource not in state.healthy:
        raise AllocationError(f"cannot allocate unregistered device {resource}")
    healthy = state.healthy[resource]
    if not healthy:
        raise AllocationError(
            f"no healthy devices present; cannot allocate unhealthy devices {resource}"
        )
    reused = frozenset(sorted(reusable)[:required])
    needed = required - len(reused)
    available = healthy - state.in_use(resource)
    if len(available) < needed:
        raise AllocationError(
            f"requested number of devices unavailable for {resource}. "
            f"Requested: {needed}, Available: {len(available)}"
        )
    return DeviceCandidates(reused, available, needed)


def align_devices(choice: DeviceCandidates, numa: Mapping[str, frozenset[int]]) -> DeviceCandidates:
    """Return the candidates of the lowest NUMA node with enough, as policy single-numa-node does.

    Devices that name no NUMA node do not count; if none does, there is nothing to align.
    Raises AllocationError if no NUMA node has enough.
    """
    nodes = sorted({node for name in choice.available for node in numa.get(name, ())})
    for node in nodes:
        aligned = frozenset(name for name in choice.available if node in numa[name])
        if len(aligned) >= choice.needed:
            return replace(choice, available=aligned)
    if nodes:
        raise AllocationError("Resources cannot be allocated with Topology locality")
    return choice


def pick_devices(choice: DeviceCandidates, preferred: Iterable[str]) -> frozenset[str]:
    """Return the preferred available devices, filled up with others.

    A real kubelet picks the others at random; here they are in order of name, so runs repeat.
    """
    wanted = [device for device in dict.fromkeys(preferred) if device in choice.available]
    rest = sorted(choice.available.difference(wanted))
    return choice.reused | frozenset((wanted + rest)[: choice.needed])

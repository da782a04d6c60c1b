"""Which devices a kubelet knows, and which container holds which of them; no I/O.

This is the bookkeeping half of a kubelet's device manager. A resource stays listed, with nothing
allocatable, while its plugin is away; it is forgotten only when `forget` is called after the grace.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

HEALTHY = "Healthy"


@dataclass(frozen=True, slots=True)
class DeviceAllocation:
    """Devices of one resource that one container holds, and what the plugin answered for them."""

    pod_uid: str
    container: str
    resource: str
    devices: frozenset[str]
    response: bytes  # ContainerAllocateResponse, as the plugin sent it


class AllocationError(Exception):
    """A container cannot have its devices; the message is what the pod's owner reads."""


@dataclass(slots=True)
class DeviceState:
    """Devices by health, and holdings by container."""

    healthy: dict[str, frozenset[str]] = field(default_factory=dict)
    unhealthy: dict[str, frozenset[str]] = field(default_factory=dict)
    allocations: dict[tuple[str, str, str], DeviceAllocation] = field(default_factory=dict)
    reserved: dict[str, set[str]] = field(default_factory=dict)
    """Chosen for a container whose plugin is being asked at this moment."""

    def update(self, resource: str, healths: Mapping[str, str]) -> None:
        """Replace the devices of a resource by the complete list its plugin has just sent."""
        self.healthy[resource] = frozenset(d for d, health in healths.items() if health == HEALTHY)
        self.unhealthy[resource] = frozenset(healths) - self.healthy[resource]

    def mark_unhealthy(self, resource: str) -> None:
        """Make every device unhealthy: the plugin's stream has ended."""
        known = self.healthy.get(resource, frozenset()) | self.unhealthy.get(resource, frozenset())
        self.healthy[resource] = frozenset()
        self.unhealthy[resource] = known

    def list_without_devices(self, resource: str) -> None:
        """List a resource without devices: known from the checkpoint, its plugin not yet back."""
        self.healthy[resource] = frozenset()
        self.unhealthy[resource] = frozenset()

    def forget(self, resource: str) -> None:
        """Stop listing a resource; what containers hold of it stays held."""
        self.healthy.pop(resource, None)
        self.unhealthy.pop(resource, None)

    def manages(self, resource: str) -> bool:
        """Tell whether the device manager, not the node's allocatable, decides about a resource."""
        return resource in self.healthy or any(key[2] == resource for key in self.allocations)

    def capacity(self) -> dict[str, int]:
        """Count all devices per resource."""
        return {
            name: len(found) + len(self.unhealthy[name]) for name, found in self.healthy.items()
        }

    def allocatable(self) -> dict[str, int]:
        """Count healthy devices per resource, held or not."""
        return {name: len(found) for name, found in self.healthy.items()}

    def get(self, pod_uid: str, container: str, resource: str) -> DeviceAllocation | None:
        """Return what a container holds of a resource."""
        return self.allocations.get((pod_uid, container, resource))

    def container_allocations(self, pod_uid: str, container: str) -> list[DeviceAllocation]:
        """Return everything a container holds, in the order it was given."""
        return [
            holding
            for (uid, name, _), holding in self.allocations.items()
            if uid == pod_uid and name == container
        ]

    def record(self, holding: DeviceAllocation) -> None:
        """Record what the plugin has just granted."""
        key = (holding.pod_uid, holding.container, holding.resource)
        self.allocations[key] = holding

    def in_use(self, resource: str) -> frozenset[str]:
        """Return the devices of a resource that nobody else may have."""
        used: set[str] = set(self.reserved.get(resource, ()))
        for (_, _, name), holding in self.allocations.items():
            if name == resource:
                used |= holding.devices
        return frozenset(used)

    def retain(self, active: Set[str]) -> None:
        """Free what pods outside `active` hold."""
        for key in [key for key in self.allocations if key[0] not in active]:
            del self.allocations[key]


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What is fixed before the plugin is asked for its preference."""

    reused: frozenset[str]
    available: frozenset[str]
    needed: int  # beside the reused ones


def choose_devices(
    ledger: DeviceState, resource: str, required: int, reusable: Iterable[str]
) -> DeviceChoice:
    """Say which devices a container may get; raises AllocationError, worded as the kubelet does.

    Devices of the pod's finished init containers come first, in a stable order.
    """
    if resource not in ledger.healthy:
        raise AllocationError(f"cannot allocate unregistered device {resource}")
    healthy = ledger.healthy[resource]
    if not healthy:
        raise AllocationError(
            f"no healthy devices present; cannot allocate unhealthy devices {resource}"
        )
    reused = frozenset(sorted(reusable)[:required])
    needed = required - len(reused)
    available = healthy - ledger.in_use(resource)
    if len(available) < needed:
        raise AllocationError(
            f"requested number of devices unavailable for {resource}. "
            f"Requested: {needed}, Available: {len(available)}"
        )
    return DeviceChoice(reused, available, needed)


def pick_devices(choice: DeviceChoice, preferred: Iterable[str]) -> frozenset[str]:
    """Take the preferred devices that are available, then any others until there are enough.

    A real kubelet takes the others in random order; by name, a replay repeats the same choice.
    """
    wanted = [device for device in dict.fromkeys(preferred) if device in choice.available]
    rest = sorted(choice.available.difference(wanted))
    return choice.reused | frozenset((wanted + rest)[: choice.needed])

"""MIG instances in ResourceSlices: what a device in MIG mode offers to claims; pure.

Every instance of every layout is a device of its own, and takes the memory slices of its GPU that
it would have: those of one GPU share its counters, so that a scheduler allocates only instances
that fit beside each other. A GPU has one layout at a time: as soon as a lease requires one, the
instances of others are left out.
https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/#partitionable-devices
"""

from collections.abc import Iterable, Sequence
from typing import Any

from services.node_agent.mig.instances import InstanceProfile
from services.node_agent.mig.layout_plan import arrange
from shared.model.claim import claimable, device_name
from shared.model.device import Device, MigProfile
from shared.model.lease import Lease, MigPlacement
from shared.model.names import DeviceUuid

Instance = tuple[MigPlacement, MigProfile]


class LeasedInstances:
    """The instances of a node's devices that leases have."""

    def __init__(self) -> None:
        self.layouts: dict[DeviceUuid, str] = {}
        """The layout that leases require."""
        self.unknown: set[tuple[DeviceUuid, int]] = set()
        """Positions that the scheduler does not know as allocated."""

    def add(self, lease: Lease, *, known: bool) -> None:
        """Add a lease, whose claim the scheduler knows or not."""
        for share in lease.shares:
            if share.mig is not None:
                self.layouts[share.device] = share.mig.layout
                if not known:
                    self.unknown.add((share.device, share.mig.position))

    def offered(self, device: Device) -> dict[str, Instance]:
        """Return the instances that claims may be allocated, by name of their slice's device."""
        layout = self.layouts.get(device.uuid)
        return {
            name: instance
            for name, instance in claimable(device).items()
            if instance is not None
            and layout in {None, instance[0].layout}
            and (device.uuid, instance[0].position) not in self.unknown
        }


def counter_set(device: Device, profiles: Iterable[InstanceProfile]) -> dict[str, Any]:
    """Return the memory slices of a device as counters."""
    slices = max(
        (start + profile.memory_slices for profile in profiles for start in profile.starts),
        default=0,
    )
    return {"name": device_name(device.uuid), "counters": _counters(range(slices))}


def consumed_counters(
    device: Device, place: MigPlacement, profiles: Sequence[InstanceProfile]
) -> list[dict[str, Any]]:
    """Return the memory slices that an instance takes if its layout is created as a whole.

    A layout that could not be created, but is there, has no others beside it, and needs none.
    """
    known = {profile.name: profile for profile in profiles}
    layout = next(each for each in device.layouts if each.name == place.layout)
    wanted = [known[each.name] for each in layout.positions if each.name in known]
    starts = arrange(wanted, (), sum(profile.compute_slices for profile in wanted))
    if starts is None or len(starts) != len(layout.positions):
        return []
    start = starts[place.position]
    taken = _counters(range(start, start + known[place.profile].memory_slices))
    return [{"counterSet": device_name(device.uuid), "counters": taken}]


def _counters(slices: Iterable[int]) -> dict[str, Any]:
    return {f"memory-slice-{number}": {"value": "1"} for number in slices}

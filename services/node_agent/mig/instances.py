"""MIG instances of a device, their profiles, and the layout they form; pure."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.model.devices.device import Device, MigLayout
from shared.model.errors import RequestError, UnavailableError
from shared.model.leases.lease import Lease, MigPlacement
from shared.model.names import DeviceUuid


class InUseError(UnavailableError):
    """An instance in use blocks a change of layout; retry later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceProfile:
    id: int
    name: str
    memory_mib: int
    compute_slices: int
    memory_slices: int
    count: int
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    gi: int
    profile: str
    start: int
    memory_slices: int
    compute_slices: int
    compute_ids: tuple[int, ...] = ()
    uuid: str = ""
    """Empty unless one compute instance fills it."""
    busy: bool = False


InstanceUuids = Mapping[tuple[DeviceUuid, int], str]
ListInstances = Callable[[DeviceUuid], Awaitable[tuple[MigInstance, ...]]]
"""Raises UnavailableError while the driver does not respond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigState:
    enabled: bool
    pending: bool
    """After the next reset of the device."""
    profiles: tuple[InstanceProfile, ...] = ()
    """Empty while MIG is off."""


def is_laid_out(layout: MigLayout, instances: Sequence[MigInstance]) -> bool:
    return count_profiles(layout) == Counter(instance.profile for instance in instances) and all(
        instance.uuid for instance in instances
    )


def instance_at(layout: MigLayout, position: int, instances: Sequence[MigInstance]) -> MigInstance:
    """Instances of a profile are counted by start slice.

    Raises RequestError if the layout has no such position, or the device has another layout.
    """
    positions = layout.positions
    if not 0 <= position < len(positions):
        raise RequestError(f"layout {layout.name} has {len(positions)} positions, not {position}")
    if not is_laid_out(layout, instances):
        raise RequestError(
            f"the device is not laid out as {layout.name}: it has {describe_instances(instances)}"
        )
    profile = positions[position].name
    number = sum(earlier.name == profile for earlier in positions[:position])
    alike = sorted((i for i in instances if i.profile == profile), key=lambda i: i.start)
    return alike[number]


def container_instances(
    lease: Lease,
    container: str,
    devices: Mapping[DeviceUuid, Device],
    instances: Mapping[DeviceUuid, Sequence[MigInstance]],
) -> dict[tuple[DeviceUuid, int], str]:
    """Raises RequestError if the layout is not the lease's."""
    uuids: dict[tuple[DeviceUuid, int], str] = {}
    for share in lease.shares_of(container):
        if share.mig is not None:
            layout = find_layout(share.mig, share.device, devices.get(share.device))
            there = instances.get(share.device, ())
            instance = instance_at(layout, share.mig.position, there)
            uuids[share.device, share.mig.position] = instance.uuid
    return uuids


def find_layout(place: MigPlacement, uuid: DeviceUuid, device: Device | None) -> MigLayout:
    layouts = device.layouts if device is not None else ()
    for layout in layouts:
        if layout.name == place.layout:
            if place.profile not in {p.name for p in layout.positions[place.position :][:1]}:
                break
            return layout
    names = ", ".join(layout.name for layout in layouts) or "none"
    raise RequestError(
        f"the lease is for {place.profile} at position {place.position} of layout {place.layout} "
        f"of device {uuid}, which does not have it (its layouts: {names}): were the layouts "
        "changed after the pod was placed?"
    )


def describe_instances(instances: Iterable[MigInstance]) -> str:
    """For example, `1g.5gb at slice 4`."""
    named = sorted((i.start, f"{i.profile} at slice {i.start}") for i in instances)
    return ", ".join(text for _, text in named) or "no instance"


def count_profiles(layout: MigLayout) -> Counter[str]:
    return Counter(profile.name for profile in layout.positions)

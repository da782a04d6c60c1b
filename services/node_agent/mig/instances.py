"""MIG instances of one device: how a layout is put on it, and which instance a position is; pure.

A device has memory slices in a row. An instance takes some of them side by side, from one of the
starts that its profile may have, and a number of the device's compute slices. Which instances fit
together therefore depends on where each one lies: whoever makes them one by one, wherever there is
room, may end with room left over that nothing fits into. So all of a layout is arranged at once.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.model.device import Device, MigLayout
from shared.model.errors import RequestError, UnavailableError
from shared.model.lease import Lease, MigPlacement
from shared.model.names import DeviceUuid


class InUseError(UnavailableError):
    """An instance that is in the way is used: it may be gone in a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceProfile:
    """A kind of instance that a device can have, in NVML's words."""

    id: int
    name: str
    """Such as `1g.10gb`."""
    memory_mib: int
    compute_slices: int
    memory_slices: int
    count: int
    """How many the device can have at most."""
    starts: tuple[int, ...]
    """First memory slices it may lie at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """An instance that is there."""

    gi: int
    """NVML's id of the GPU instance."""
    profile: str
    start: int
    memory_slices: int
    compute_slices: int
    compute_ids: tuple[int, ...] = ()
    """NVML's ids of the compute instances in it."""
    uuid: str = ""
    """Of its MIG device, if one compute instance takes all of it; empty: none does."""
    busy: bool = False
    """Some process uses it."""


ListInstances = Callable[[DeviceUuid], Awaitable[tuple[MigInstance, ...]]]
"""Returns the instances of a device. Raises UnavailableError while the driver does not respond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigState:
    """What NVML says of a device that knows MIG."""

    enabled: bool
    pending: bool
    """The mode after the next reset of the device."""
    profiles: tuple[InstanceProfile, ...] = ()
    """Empty while MIG is off."""


@dataclass(frozen=True, slots=True)
class Destroy:
    """Remove an instance, its compute instances first."""

    instance: MigInstance


@dataclass(frozen=True, slots=True)
class Complete:
    """Make the compute instance that an instance lacks."""

    instance: MigInstance


@dataclass(frozen=True, slots=True)
class Create:
    """Make an instance and its compute instance."""

    profile: InstanceProfile
    start: int


Step = Destroy | Complete | Create


def is_laid_out(layout: MigLayout, instances: Sequence[MigInstance]) -> bool:
    """Tell whether the device has exactly the layout's instances, ready to be used."""
    return _counts(layout) == Counter(instance.profile for instance in instances) and all(
        instance.uuid for instance in instances
    )


def instance_at(layout: MigLayout, position: int, instances: Sequence[MigInstance]) -> MigInstance:
    """Return the instance at a position: of those of its profile, counted by where they lie.

    Raises RequestError if the layout has no such position, or the device another layout.
    """
    positions = layout.positions
    if not 0 <= position < len(positions):
        raise RequestError(f"layout {layout.name} has {len(positions)} positions, not {position}")
    if not is_laid_out(layout, instances):
        raise RequestError(
            f"the device is not laid out as {layout.name}: it has {describe_instances(instances)}"
        )
    profile = positions[position].name
    number = sum(one.name == profile for one in positions[:position])
    alike = sorted((i for i in instances if i.profile == profile), key=lambda i: i.start)
    return alike[number]


def container_instances(
    lease: Lease,
    container: str,
    devices: Mapping[DeviceUuid, Device],
    instances: Mapping[DeviceUuid, Sequence[MigInstance]],
) -> dict[tuple[DeviceUuid, int], str]:
    """Return the UUIDs of a container's instances, by device and position, as things are.

    Raises RequestError if a device is not laid out as its lease says.
    """
    uuids: dict[tuple[DeviceUuid, int], str] = {}
    for share in lease.shares_of(container):
        if share.mig is not None:
            layout = find_layout(share.mig, share.device, devices.get(share.device))
            there = instances.get(share.device, ())
            found = instance_at(layout, share.mig.position, there)
            uuids[share.device, share.mig.position] = found.uuid
    return uuids


def find_layout(place: MigPlacement, uuid: DeviceUuid, device: Device | None) -> MigLayout:
    """Return the layout that a place is in. Raises RequestError if its device has none such."""
    layouts = device.layouts if device is not None else ()
    for layout in layouts:
        if layout.name == place.layout:
            if place.profile not in {p.name for p in layout.positions[place.position :][:1]}:
                break
            return layout
    known = ", ".join(layout.name for layout in layouts) or "none"
    raise RequestError(
        f"the lease is for {place.profile} at position {place.position} of layout {place.layout} "
        f"of device {uuid}, which is not so (it has {known}): were the layouts changed after the "
        "pod was placed?"
    )


def plan_layout(
    layout: MigLayout,
    profiles: Sequence[InstanceProfile],
    instances: Sequence[MigInstance],
    held: Collection[int] = (),
) -> tuple[Step, ...]:
    """Return the steps that give the device a layout; removals come first.

    Instances that the layout has, too, stay where they are if the others still fit beside them.
    `held` names instances (by their NVML ids) that somebody holds: these, and those that a process
    uses, stay in any case. Raises InUseError if one of them is in the way, RequestError if the
    layout cannot be on this device.
    """
    known = {profile.name: profile for profile in profiles}
    unknown = sorted(set(_counts(layout)) - set(known))
    if unknown:
        raise RequestError(
            f"layout {layout.name} has {', '.join(unknown)}, and the device knows "
            f"{', '.join(known) or 'no instances'}"
        )
    used = [instance for instance in instances if instance.gi in held or instance.busy]
    fitting = _reusable(layout, instances, used)
    foreign = [instance for instance in used if instance not in fitting]
    if foreign:
        raise InUseError(
            f"{describe_instances(foreign)} of the device {'is' if len(foreign) == 1 else 'are'} "
            f"in use, and layout {layout.name} does not contain that"
        )
    for kept in (fitting, used):
        missing = _missing(layout, kept, known)
        starts = arrange(missing, kept, _compute_slices(profiles))
        if starts is not None:
            return (
                *(Destroy(instance) for instance in instances if instance not in kept),
                *(Complete(instance) for instance in kept if not instance.uuid),
                *(Create(*pair) for pair in zip(missing, starts, strict=True)),
            )
    if used:
        raise InUseError(
            f"the other instances of layout {layout.name} do not fit beside "
            f"{describe_instances(used)}, which is in use"
        )
    raise RequestError(f"the instances of layout {layout.name} do not fit on the device")


def arrange(
    wanted: Sequence[InstanceProfile],
    kept: Sequence[MigInstance],
    compute_slices: int,
) -> tuple[int, ...] | None:
    """Return a start for each wanted instance so that all fit beside those kept, or None."""
    compute = sum(one.compute_slices for one in wanted) + sum(i.compute_slices for i in kept)
    if compute > compute_slices:
        return None
    taken = frozenset(number for i in kept for number in range(i.start, i.start + i.memory_slices))
    order = sorted(range(len(wanted)), key=lambda n: (-wanted[n].memory_slices, wanted[n].name, n))
    found = _search([wanted[n] for n in order], taken, None)
    if found is None:
        return None
    starts = dict(zip(order, found, strict=True))
    return tuple(starts[n] for n in range(len(wanted)))


def _search(
    wanted: Sequence[InstanceProfile], taken: frozenset[int], before: tuple[str, int] | None
) -> tuple[int, ...] | None:
    """Try every start of the first, then the rest; of like ones, each lies after the one before."""
    if not wanted:
        return ()
    first = wanted[0]
    least = before[1] + 1 if before is not None and before[0] == first.name else 0
    for start in sorted(first.starts):
        slices = frozenset(range(start, start + first.memory_slices))
        if start < least or slices & taken:
            continue
        rest = _search(wanted[1:], taken | slices, (first.name, start))
        if rest is not None:
            return (start, *rest)
    return None


def fits_alone(profiles: Sequence[InstanceProfile], layout: Sequence[InstanceProfile]) -> bool:
    """Tell whether all instances of a layout fit on an empty device."""
    return arrange(layout, (), _compute_slices(profiles)) is not None


def describe_instances(instances: Iterable[MigInstance]) -> str:
    """Name instances by profile and place."""
    named = sorted((i.start, f"{i.profile} at slice {i.start}") for i in instances)
    return ", ".join(text for _, text in named) or "no instance"


def _counts(layout: MigLayout) -> Counter[str]:
    return Counter(profile.name for profile in layout.positions)


def _compute_slices(profiles: Iterable[InstanceProfile]) -> int:
    return max((profile.compute_slices for profile in profiles), default=0)


def _reusable(
    layout: MigLayout, instances: Sequence[MigInstance], used: Sequence[MigInstance]
) -> list[MigInstance]:
    """Return the instances that the layout has, too: those in use first, no more than it has."""
    left = _counts(layout)
    fitting: list[MigInstance] = []
    for instance in sorted(instances, key=lambda i: (i not in used, i.start)):
        if left[instance.profile] > 0 and (instance.uuid or not instance.compute_ids):
            left[instance.profile] -= 1
            fitting.append(instance)
    return fitting


def _missing(
    layout: MigLayout, kept: Iterable[MigInstance], known: dict[str, InstanceProfile]
) -> list[InstanceProfile]:
    there = Counter(instance.profile for instance in kept)
    missing: list[InstanceProfile] = []
    for profile in layout.positions:
        if there[profile.name] > 0:
            there[profile.name] -= 1
        else:
            missing.append(known[profile.name])
    return missing

"""The steps that give a device a MIG layout; pure.

Created one by one, instances may leave room that nothing fits into, so a layout is arranged as a
whole.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from services.node_agent.mig.instances import (
    InstanceProfile,
    InUseError,
    MigInstance,
    count_profiles,
    describe_instances,
)
from shared.model.devices.device import MigLayout
from shared.model.errors import RequestError


@dataclass(frozen=True, slots=True)
class DestroyInstance:
    instance: MigInstance


@dataclass(frozen=True, slots=True)
class CompleteInstance:
    instance: MigInstance


@dataclass(frozen=True, slots=True)
class CreateInstance:
    profile: InstanceProfile
    start: int


PlanStep = DestroyInstance | CompleteInstance | CreateInstance


def plan_layout(
    layout: MigLayout,
    profiles: Sequence[InstanceProfile],
    instances: Sequence[MigInstance],
    in_use: Collection[int] = (),
) -> tuple[PlanStep, ...]:
    """Instances whose NVML IDs are `in_use`, or that a process uses, stay.

    Raises InUseError if one of these blocks the layout, RequestError if the layout is impossible on
    this device.
    """
    by_name = _known_profiles(layout, profiles)
    used = [instance for instance in instances if instance.gi in in_use or instance.busy]
    reusable = _reusable(layout, instances, used)
    foreign = [instance for instance in used if instance not in reusable]
    if foreign:
        raise InUseError(
            f"{describe_instances(foreign)} of the device {'is' if len(foreign) == 1 else 'are'} "
            f"in use, and not part of layout {layout.name}"
        )
    for kept in (reusable, used):
        missing = _missing(layout, kept, by_name)
        starts = arrange(missing, kept, _compute_slices(profiles))
        if starts is not None:
            return (
                *(DestroyInstance(instance) for instance in instances if instance not in kept),
                *(CompleteInstance(instance) for instance in kept if not instance.uuid),
                *(CreateInstance(*pair) for pair in zip(missing, starts, strict=True)),
            )
    if used:
        raise InUseError(
            f"the other instances of layout {layout.name} do not fit beside "
            f"{describe_instances(used)}, which is in use"
        )
    raise RequestError(f"the instances of layout {layout.name} do not fit on the device")


def _known_profiles(
    layout: MigLayout, profiles: Sequence[InstanceProfile]
) -> dict[str, InstanceProfile]:
    by_name = {profile.name: profile for profile in profiles}
    unknown = sorted(set(count_profiles(layout)) - set(by_name))
    if unknown:
        raise RequestError(
            f"layout {layout.name} needs {', '.join(unknown)}, and the device supports "
            f"{', '.join(by_name) or 'no instances'}"
        )
    return by_name


def arrange(
    wanted: Sequence[InstanceProfile], kept: Sequence[MigInstance], compute_slices: int
) -> tuple[int, ...] | None:
    """Return None if they do not all fit beside the kept ones."""
    compute = sum(profile.compute_slices for profile in wanted) + sum(
        i.compute_slices for i in kept
    )
    if compute > compute_slices:
        return None
    taken = frozenset(number for i in kept for number in range(i.start, i.start + i.memory_slices))
    order = sorted(range(len(wanted)), key=lambda n: (-wanted[n].memory_slices, wanted[n].name, n))
    in_order = _search([wanted[n] for n in order], taken, None)
    if in_order is None:
        return None
    starts = dict(zip(order, in_order, strict=True))
    return tuple(starts[n] for n in range(len(wanted)))


def _search(
    wanted: Sequence[InstanceProfile], taken: frozenset[int], before: tuple[str, int] | None
) -> tuple[int, ...] | None:
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
    return arrange(layout, (), _compute_slices(profiles)) is not None


def _compute_slices(profiles: Iterable[InstanceProfile]) -> int:
    return max((profile.compute_slices for profile in profiles), default=0)


def _reusable(
    layout: MigLayout, instances: Sequence[MigInstance], used: Sequence[MigInstance]
) -> list[MigInstance]:
    wanted = count_profiles(layout)
    reusable: list[MigInstance] = []
    for instance in sorted(instances, key=lambda i: (i not in used, i.start)):
        if wanted[instance.profile] > 0 and (instance.uuid or not instance.compute_ids):
            wanted[instance.profile] -= 1
            reusable.append(instance)
    return reusable


def _missing(
    layout: MigLayout, kept: Iterable[MigInstance], by_name: dict[str, InstanceProfile]
) -> list[InstanceProfile]:
    present = Counter(instance.profile for instance in kept)
    missing: list[InstanceProfile] = []
    for profile in layout.positions:
        if present[profile.name] > 0:
            present[profile.name] -= 1
        else:
            missing.append(by_name[profile.name])
    return missing

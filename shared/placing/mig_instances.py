"""The choice of a MIG instance on a device; pure.

The smallest instance that suffices is taken. Only a device without leases may be partitioned: its
first layout with a large enough instance is chosen.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from shared.model.denial import Denial
from shared.model.devices.device import Device, MigLayout, required_memory_mib
from shared.model.leases.lease import MigPlacement
from shared.model.requests.request import GpuRequest


class InstanceShape(NamedTuple):
    memory_mib: int
    profile: str
    positions: int


LayoutShapes = Mapping[str, tuple[InstanceShape, ...]]
"""In order of preference, each with its smallest instance first."""


@lru_cache(maxsize=256)
def layout_shapes(layouts: tuple[MigLayout, ...]) -> LayoutShapes:
    return {layout.name: _instance_shapes(layout) for layout in layouts}


def _instance_shapes(layout: MigLayout) -> tuple[InstanceShape, ...]:
    shapes = []
    first = 0
    for profile in layout.profiles:
        positions = ((1 << profile.count) - 1) << first
        shapes.append(InstanceShape(profile.memory_mib, profile.name, positions))
        first += profile.count
    return tuple(sorted(shapes, key=lambda shape: shape.memory_mib))


def largest_instance_mib(shapes_by_layout: LayoutShapes) -> int:
    """Return 0 if a device can have no instance."""
    return max(
        (shape.memory_mib for shapes in shapes_by_layout.values() for shape in shapes), default=0
    )


def parse_positions(taken: str) -> int:
    return int(taken[::-1], 2) if taken else 0


def format_positions(positions: int) -> str:
    """Format as 0 and 1, up to the last position that is taken."""
    return f"{positions:b}"[::-1] if positions else ""


def instance_mib(container: GpuRequest, device: Device, largest_mib: int) -> int:
    """A request for all memory gets the largest instance."""
    return largest_mib if container.wants_all_memory else required_memory_mib(container, device)


def largest_first(containers: Iterable[GpuRequest]) -> list[GpuRequest]:
    def size(container: GpuRequest) -> tuple[int, ...]:
        amounts = (container.memory_percent, container.memory_bytes, container.memory_units)
        return (-container.wants_all_memory, *(-(amount or 0) for amount in amounts))

    return sorted(containers, key=size)


def find_instance(
    shapes_by_layout: LayoutShapes, layout: str, taken: int, *, need_mib: int, free_mib: int
) -> tuple[MigPlacement, int] | None:
    """Return a free instance and its MiB; `layout` is that of the leased instances, or ""."""
    for name in (layout,) if layout else shapes_by_layout:
        for shape in shapes_by_layout.get(name, ()):
            free = shape.positions & ~taken
            if free and need_mib <= shape.memory_mib <= free_mib:
                position = (free & -free).bit_length() - 1
                place = MigPlacement(layout=name, position=position, profile=shape.profile)
                return place, shape.memory_mib
    return None


def find_instances(
    shapes_by_layout: LayoutShapes, layout: str, taken: int, profiles: Sequence[str]
) -> list[MigPlacement] | None:
    """Return instances of one layout.

    For example, `["1g.5gb", "3g.20gb"]` get the first layout that has both.
    """
    for name in (layout,) if layout else shapes_by_layout:
        places = _find_in_layout(name, shapes_by_layout.get(name, ()), taken, profiles)
        if len(places) == len(profiles):
            return places
    return None


def _find_in_layout(
    name: str, shapes: Sequence[InstanceShape], taken: int, profiles: Sequence[str]
) -> list[MigPlacement]:
    places: list[MigPlacement] = []
    for profile in profiles:
        free = next(
            (s.positions & ~taken for s in shapes if s.profile == profile and s.positions & ~taken),
            0,
        )
        if free:
            position = (free & -free).bit_length() - 1
            taken |= 1 << position
            places.append(MigPlacement(layout=name, position=position, profile=profile))
    return places


def count_free(shapes_by_layout: LayoutShapes, layout: str, taken: int) -> dict[str, int]:
    """Count each profile, the smallest first, in the first layout that has it.

    Of `{"1g.5gb": 7, "2g.10gb": 3}`, the first leased instance takes some others away.
    """
    free: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name in (layout,) if layout else shapes_by_layout:
        counts: dict[str, int] = {}
        for shape in shapes_by_layout.get(name, ()):
            count = (shape.positions & ~taken).bit_count()
            if count:
                counts[shape.profile] = counts.get(shape.profile, 0) + count
                sizes[shape.profile] = shape.memory_mib
        for profile, count in counts.items():
            free.setdefault(profile, count)
    return dict(sorted(free.items(), key=lambda item: sizes[item[0]]))


def largest_free_mib(shapes_by_layout: LayoutShapes, layout: str, taken: int, free_mib: int) -> int:
    return max(
        (
            shape.memory_mib
            for name in ((layout,) if layout else shapes_by_layout)
            for shape in shapes_by_layout.get(name, ())
            if shape.positions & ~taken and shape.memory_mib <= free_mib
        ),
        default=0,
    )


def instance_refusal(
    shapes_by_layout: LayoutShapes, layout: str, taken: int, *, need_mib: int, free_mib: int
) -> Denial | None:
    if find_instance(shapes_by_layout, layout, taken, need_mib=need_mib, free_mib=free_mib):
        return None
    needed = f"an instance of {need_mib} MiB or more is needed"
    largest = largest_instance_mib(shapes_by_layout)
    if not largest:
        return Denial("NoGpuInstances", "it is in MIG mode, and no layout for it is known")
    if largest < need_mib:
        text = f"{needed}, and the largest in its layouts has {largest} MiB"
        return Denial("GpuInstanceTooSmall", text)
    free = largest_free_mib(shapes_by_layout, layout, taken, free_mib)
    if layout:
        pinned = f"leased instances require its layout {layout}"
        left = f"the largest free instance there has {free} MiB" if free else "none is free there"
        return Denial("GpuInstancesTaken", f"{needed}, {pinned}, and {left}")
    text = f"{needed}, but only {free_mib} MiB of the device are free"
    return Denial("GpuInstancesTaken", text)

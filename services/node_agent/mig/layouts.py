"""The layouts that a device in MIG mode offers: known geometries, adapted to NVML's profiles; pure.

The geometries of A30 and A100 are those that Volcano ships. Those of Hopper and Blackwell follow
the same pattern with the profiles of NVIDIA's MIG user guide. A geometry defines the layouts and
their order; the sizes of instances come from NVML.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from services.node_agent.mig.instances import InstanceProfile, MigInstance
from services.node_agent.mig.layout_plan import fits_alone
from shared.dialects.volcano.device_config import MigGeometries
from shared.model.device import MigLayout, MigProfile

NEAR_PERCENT = 12
"""How much a profile's memory may differ from the geometry's and still match it."""
CURRENT = "present"
"""Name of a device's current layout if no geometry has it."""


def _layout(name: str, *profiles: tuple[str, int, int]) -> MigLayout:
    return MigLayout(
        name=name,
        profiles=tuple(
            MigProfile(name=n, memory_mib=mib, count=count) for n, mib, count in profiles
        ),
    )


def _seven_slice_layouts(*profiles: tuple[str, int]) -> tuple[MigLayout, ...]:
    """Return the layouts of a device with seven compute slices from its 1g, 2g, 3g, 7g."""
    one, two, three, all_ = profiles
    return (
        _layout("group1", (*one, 7)),
        _layout("group2", (*two, 3), (*one, 1)),
        _layout("group3", (*three, 2)),
        _layout("group4", (*all_, 1)),
    )


KNOWN_GEOMETRIES: tuple[MigGeometries, ...] = (
    MigGeometries(
        models=("A30",),
        layouts=(
            _layout("group1", ("1g.6gb", 6144, 4)),
            _layout("group2", ("2g.12gb", 12288, 2)),
            _layout("group3", ("4g.24gb", 24576, 1)),
        ),
    ),
    MigGeometries(
        models=("A100-SXM4-40GB", "A100-40GB-PCIe", "A100-PCIE-40GB"),
        layouts=_seven_slice_layouts(
            ("1g.5gb", 5120), ("2g.10gb", 10240), ("3g.20gb", 20480), ("7g.40gb", 40960)
        ),
    ),
    MigGeometries(
        models=("A100-SXM4-80GB", "A100-80GB-PCIe", "A100-PCIE-80GB"),
        layouts=_seven_slice_layouts(
            ("1g.10gb", 9728), ("2g.20gb", 19968), ("3g.40gb", 40192), ("7g.80gb", 80896)
        ),
    ),
    MigGeometries(
        models=("H100 80GB", "H100 PCIe", "H800"),
        layouts=_seven_slice_layouts(
            ("1g.10gb", 9984), ("2g.20gb", 20096), ("3g.40gb", 40448), ("7g.80gb", 81152)
        ),
    ),
    MigGeometries(
        models=("NVIDIA H200",),
        layouts=_seven_slice_layouts(
            ("1g.18gb", 16384), ("2g.35gb", 33024), ("3g.71gb", 71168), ("7g.141gb", 143360)
        ),
    ),
    MigGeometries(
        models=("NVIDIA B200",),
        layouts=_seven_slice_layouts(
            ("1g.23gb", 20992), ("2g.45gb", 45312), ("3g.90gb", 90624), ("7g.180gb", 182272)
        ),
    ),
)


def layouts_for(
    model: str, profiles: Sequence[InstanceProfile], geometries: Sequence[MigGeometries]
) -> tuple[tuple[MigLayout, ...], tuple[str, ...]]:
    """Return the layouts of a device, and warnings about the geometry that they come from.

    The first geometry with a part of the model's name applies. Profiles that NVML does not report
    are dropped, and layouts that do not fit. If no layout is left, or no geometry names the model,
    layouts are derived from NVML's profiles.
    """
    named = f"NVIDIA-{model}"
    geometry = next((g for g in geometries if any(part in named for part in g.models)), None)
    warnings: list[str] = []
    found: list[MigLayout] = []
    for layout in geometry.layouts if geometry is not None else ():
        real = _match_profiles(layout, model, profiles, warnings)
        if not real.profiles:
            continue
        if fits_alone(profiles, _instances(real, profiles)):
            found.append(real)
        else:
            warnings.append(f"layout {layout.name} of {model} does not fit on the device")
    if not found:
        if geometry is not None:
            warnings.append(
                f"no layout of {model} is left: layouts are derived from NVML's profiles"
            )
        found = list(derive_layouts(profiles))
    return tuple(found), tuple(warnings)


def derive_layouts(profiles: Sequence[InstanceProfile]) -> tuple[MigLayout, ...]:
    """Return one layout per instance size, smallest first, filled up with the smallest instances.

    Profiles for special uses (`+me`, `+gfx`, `-me`) are left out. Of profiles with equal memory,
    the one that uses most of the device's compute slices stays.
    """
    plain = [profile for profile in profiles if profile.name.replace(".", "").isalnum()]
    best: dict[int, InstanceProfile] = {}
    for profile in plain:
        rival = best.get(profile.memory_mib)
        if rival is None or _usable_slices(rival) < _usable_slices(profile):
            best[profile.memory_mib] = profile
    sizes = [best[memory] for memory in sorted(best)]
    return tuple(
        _fill_layout(f"group{number}", profile, sizes[0], profiles)
        for number, profile in enumerate(sizes, start=1)
    )


def current_layouts(
    instances: Sequence[MigInstance],
    layouts: Sequence[MigLayout],
    profiles: Sequence[InstanceProfile],
) -> tuple[MigLayout, ...]:
    """Return the only layout of a device that may not be partitioned: its current instances.

    It has the name of the known layout that it equals, if there is one.
    """
    counts: dict[str, int] = {}
    for instance in instances:
        if instance.uuid:
            counts[instance.profile] = counts.get(instance.profile, 0) + 1
    for layout in layouts:
        if counts == {profile.name: profile.count for profile in layout.profiles}:
            return (layout,)
    memory = {profile.name: profile.memory_mib for profile in profiles}
    present = tuple(
        MigProfile(name=name, memory_mib=memory[name], count=count)
        for name, count in sorted(counts.items(), key=lambda pair: (-memory[pair[0]], pair[0]))
    )
    return (MigLayout(name=CURRENT, profiles=present),) if present else ()


def _match_profiles(
    layout: MigLayout, model: str, profiles: Sequence[InstanceProfile], warnings: list[str]
) -> MigLayout:
    real: list[MigProfile] = []
    for profile in layout.profiles:
        found = _closest_profile(profile, profiles)
        if found is None:
            warnings.append(
                f"layout {layout.name} of {model} has {profile.name}, which NVML does not "
                f"report: it reports {', '.join(p.name for p in profiles) or 'none'}"
            )
            continue
        if found.name != profile.name:
            warnings.append(f"{profile.name} of {model} is called {found.name} by NVML")
        real.append(replace(profile, name=found.name, memory_mib=found.memory_mib))
    return replace(layout, profiles=tuple(real))


def _closest_profile(
    profile: MigProfile, profiles: Iterable[InstanceProfile]
) -> InstanceProfile | None:
    """Return the profile of this name, or else one of similar compute and memory."""
    slices = profile.name.partition("g.")[0]
    near = [
        one
        for one in profiles
        if one.name == profile.name
        or (
            str(one.compute_slices) == slices
            and one.name.replace(".", "").isalnum()
            and 100 * abs(one.memory_mib - profile.memory_mib) <= NEAR_PERCENT * profile.memory_mib
        )
    ]
    return min(
        near,
        key=lambda one: (one.name != profile.name, abs(one.memory_mib - profile.memory_mib)),
        default=None,
    )


def _instances(layout: MigLayout, profiles: Sequence[InstanceProfile]) -> list[InstanceProfile]:
    known = {profile.name: profile for profile in profiles}
    return [known[profile.name] for profile in layout.positions]


def _usable_slices(profile: InstanceProfile) -> int:
    return profile.count * profile.compute_slices


def _fill_layout(
    name: str,
    profile: InstanceProfile,
    smallest: InstanceProfile,
    profiles: Sequence[InstanceProfile],
) -> MigLayout:
    chosen: list[InstanceProfile] = []
    for one, most in ((profile, profile.count), (smallest, smallest.count)):
        while chosen.count(one) < most and fits_alone(profiles, [*chosen, one]):
            chosen.append(one)
    kinds = dict.fromkeys(chosen)
    return MigLayout(
        name=name,
        profiles=tuple(
            MigProfile(name=kind.name, memory_mib=kind.memory_mib, count=chosen.count(kind))
            for kind in kinds
        ),
    )

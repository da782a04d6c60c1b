"""Layouts that a device in MIG mode offers; pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from services.node_agent.mig.gpu_models import A30, A100_40, A100_80, B200, H100_80, H200
from services.node_agent.mig.instances import InstanceProfile, MigInstance
from services.node_agent.mig.layout_plan import fits_alone
from shared.dialects.volcano.device_config import MigGeometries
from shared.model.devices.device import MigLayout, MigProfile

NEAR_PERCENT = 12
CURRENT = "present"


def layouts_for(
    model: str, profiles: Sequence[InstanceProfile], geometries: Sequence[MigGeometries]
) -> tuple[tuple[MigLayout, ...], tuple[str, ...]]:
    """The first geometry with a part of the model's name applies, without what does not fit.

    If nothing is left, layouts are derived from NVML's profiles.
    """
    named = f"NVIDIA-{model}"
    geometry = next((g for g in geometries if any(part in named for part in g.models)), None)
    warnings: list[str] = []
    fitting: list[MigLayout] = []
    for layout in geometry.layouts if geometry is not None else ():
        real = _match_profiles(layout, model, profiles, warnings)
        if not real.profiles:
            continue
        if fits_alone(profiles, _instances(real, profiles)):
            fitting.append(real)
        else:
            warnings.append(f"layout {layout.name} of {model} does not fit on the device")
    if not fitting:
        if geometry is not None:
            warnings.append(
                f"no layout of {model} is left: layouts are derived from NVML's profiles"
            )
        fitting = list(derive_layouts(profiles))
    return tuple(fitting), tuple(warnings)


def derive_layouts(profiles: Sequence[InstanceProfile]) -> tuple[MigLayout, ...]:
    """Return one layout per instance size, filled up with the smallest instances.

    Profiles for special uses (`+me`, `+gfx`, `-me`) are left out.
    """
    plain = [profile for profile in profiles if profile.name.replace(".", "").isalnum()]
    ranked = sorted(plain, key=lambda profile: profile.count * profile.compute_slices, reverse=True)
    best = {profile.memory_mib: profile for profile in reversed(ranked)}
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
    """A known layout that equals the current instances gives the name."""
    counts = Counter(instance.profile for instance in instances if instance.uuid)
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
        closest = _closest_profile(profile, profiles)
        if closest is None:
            warnings.append(
                f"layout {layout.name} of {model} has {profile.name}, which NVML does not "
                f"report: it reports {', '.join(p.name for p in profiles) or 'none'}"
            )
            continue
        if closest.name != profile.name:
            warnings.append(f"{profile.name} of {model} is called {closest.name} by NVML")
        real.append(replace(profile, name=closest.name, memory_mib=closest.memory_mib))
    return replace(layout, profiles=tuple(real))


def _closest_profile(
    profile: MigProfile, profiles: Iterable[InstanceProfile]
) -> InstanceProfile | None:
    slices = profile.name.partition("g.")[0]
    near = [
        candidate
        for candidate in profiles
        if candidate.name == profile.name
        or (
            str(candidate.compute_slices) == slices
            and candidate.name.replace(".", "").isalnum()
            and 100 * abs(candidate.memory_mib - profile.memory_mib)
            <= NEAR_PERCENT * profile.memory_mib
        )
    ]
    return min(
        near,
        key=lambda candidate: (
            candidate.name != profile.name,
            abs(candidate.memory_mib - profile.memory_mib),
        ),
        default=None,
    )


def _instances(layout: MigLayout, profiles: Sequence[InstanceProfile]) -> list[InstanceProfile]:
    by_name = {profile.name: profile for profile in profiles}
    return [by_name[profile.name] for profile in layout.positions]


def _fill_layout(
    name: str,
    profile: InstanceProfile,
    smallest: InstanceProfile,
    profiles: Sequence[InstanceProfile],
) -> MigLayout:
    chosen: list[InstanceProfile] = []
    for instance, most in ((profile, profile.count), (smallest, smallest.count)):
        while chosen.count(instance) < most and fits_alone(profiles, [*chosen, instance]):
            chosen.append(instance)
    kinds = dict.fromkeys(chosen)
    return MigLayout(
        name=name,
        profiles=tuple(
            MigProfile(name=kind.name, memory_mib=kind.memory_mib, count=chosen.count(kind))
            for kind in kinds
        ),
    )


KNOWN_GEOMETRIES = tuple(
    MigGeometries(models=models, layouts=derive_layouts(profiles))
    for models, profiles in (
        (("A30",), A30),
        (("A100-SXM4-40GB", "A100-40GB-PCIe", "A100-PCIE-40GB"), A100_40),
        (("A100-SXM4-80GB", "A100-80GB-PCIe", "A100-PCIE-80GB"), A100_80),
        (("H100 80GB", "H100 PCIe", "H800"), H100_80),
        (("NVIDIA H200",), H200),
        (("NVIDIA B200",), B200),
    )
)
"""A30 and A100 as Volcano ships them; the others follow the same pattern."""

"""GPU models with their published figures; pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.node_agent.mig.instances import InstanceProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """A model with the values that NVML reports for it."""

    product: str
    """NVML's product name."""
    memory_mib: int
    mig: tuple[InstanceProfile, ...] = ()
    """Its instance profiles with NVML's IDs; empty: it does not support MIG."""


def _mig_profile(  # noqa: PLR0917 - a row of a table
    number: int, name: str, memory_mib: int, slices: int, count: int, starts: tuple[int, ...]
) -> InstanceProfile:
    compute = int(name.partition("g.")[0])
    return InstanceProfile(
        id=number,
        name=name,
        memory_mib=memory_mib,
        compute_slices=compute,
        memory_slices=slices,
        count=count,
        starts=starts,
    )


def _seven_slice_profiles(  # noqa: PLR0917 - a table
    one: tuple[str, int],
    large_one: tuple[str, int],
    two: tuple[str, int],
    three: tuple[str, int],
    four: tuple[str, int],
    whole: tuple[str, int],
) -> tuple[InstanceProfile, ...]:
    """Return the profiles of a device with seven compute and eight memory slices."""
    return (
        _mig_profile(19, *one, 1, 7, (0, 1, 2, 3, 4, 5, 6)),
        _mig_profile(20, f"{one[0]}+me", one[1], 1, 1, (0, 1, 2, 3, 4, 5, 6)),
        _mig_profile(15, *large_one, 2, 4, (0, 2, 4, 6)),
        _mig_profile(14, *two, 2, 3, (0, 2, 4)),
        _mig_profile(9, *three, 4, 2, (0, 4)),
        _mig_profile(5, *four, 4, 1, (0,)),
        _mig_profile(0, *whole, 8, 1, (0,)),
    )


A30 = (
    _mig_profile(14, "1g.6gb", 6144, 1, 4, (0, 1, 2, 3)),
    _mig_profile(21, "1g.6gb+me", 6144, 1, 1, (0, 1, 2, 3)),
    _mig_profile(5, "2g.12gb", 12288, 2, 2, (0, 2)),
    _mig_profile(0, "4g.24gb", 24576, 4, 1, (0,)),
)
A100_40 = _seven_slice_profiles(
    ("1g.5gb", 5120),
    ("1g.10gb", 10240),
    ("2g.10gb", 10240),
    ("3g.20gb", 20480),
    ("4g.20gb", 20480),
    ("7g.40gb", 40960),
)
"""With the rounded sizes of Volcano's table, as A30: a real device has up to 5 percent less."""
A100_80 = _seven_slice_profiles(
    ("1g.10gb", 9728),
    ("1g.20gb", 19968),
    ("2g.20gb", 19968),
    ("3g.40gb", 40192),
    ("4g.40gb", 40192),
    ("7g.80gb", 80896),
)
H100_80 = _seven_slice_profiles(
    ("1g.10gb", 9984),
    ("1g.20gb", 20096),
    ("2g.20gb", 20096),
    ("3g.40gb", 40448),
    ("4g.40gb", 40448),
    ("7g.80gb", 81152),
)
H200 = _seven_slice_profiles(
    ("1g.18gb", 16384),
    ("1g.35gb", 33024),
    ("2g.35gb", 33024),
    ("3g.71gb", 71168),
    ("4g.71gb", 71168),
    ("7g.141gb", 143360),
)
B200 = _seven_slice_profiles(
    ("1g.23gb", 20992),
    ("1g.45gb", 45312),
    ("2g.45gb", 45312),
    ("3g.90gb", 90624),
    ("4g.90gb", 90624),
    ("7g.180gb", 182272),
)

GPU_MODELS: Mapping[str, GpuModel] = {
    "T4": GpuModel(product="Tesla T4", memory_mib=15360),
    "A10": GpuModel(product="NVIDIA A10", memory_mib=23028),
    "A30": GpuModel(product="NVIDIA A30", memory_mib=24576, mig=A30),
    "L4": GpuModel(product="NVIDIA L4", memory_mib=23034),
    "A100-40GB": GpuModel(product="NVIDIA A100-SXM4-40GB", memory_mib=40960, mig=A100_40),
    "A100-80GB": GpuModel(product="NVIDIA A100-SXM4-80GB", memory_mib=81920, mig=A100_80),
    "H100-80GB": GpuModel(product="NVIDIA H100 80GB HBM3", memory_mib=81559, mig=H100_80),
    "H200": GpuModel(product="NVIDIA H200", memory_mib=143771, mig=H200),
    "B200": GpuModel(product="NVIDIA B200", memory_mib=183359, mig=B200),
    "V100-32GB": GpuModel(product="Tesla V100-SXM2-32GB", memory_mib=32768),
    "GTX1080Ti": GpuModel(product="NVIDIA GeForce GTX 1080 Ti", memory_mib=11178),
}

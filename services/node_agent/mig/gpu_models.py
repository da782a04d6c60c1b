"""GPU models with their published figures; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.node_agent.mig.instances import InstanceProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    product: str
    memory_mib: int
    mig: tuple[InstanceProfile, ...] = ()
    """With NVML's IDs; empty if the model does not support MIG."""


def _profile(  # noqa: PLR0917 - a row of a table
    number: int, name: str, memory_mib: int, slices: int, count: int, starts: Sequence[int]
) -> InstanceProfile:
    return InstanceProfile(
        id=number,
        name=name,
        memory_mib=memory_mib,
        compute_slices=int(name.partition("g.")[0]),
        memory_slices=slices,
        count=count,
        starts=tuple(starts),
    )


def _of_seven(*sizes: tuple[int, int]) -> tuple[InstanceProfile, ...]:
    """`sizes` are of one, two, four and eight memory slices: GB as in names, and MiB."""
    (eighth, eighth_mib), (quarter, quarter_mib), (half, half_mib), (whole, whole_mib) = sizes
    return (
        _profile(19, f"1g.{eighth}gb", eighth_mib, 1, 7, range(7)),
        _profile(20, f"1g.{eighth}gb+me", eighth_mib, 1, 1, range(7)),
        _profile(15, f"1g.{quarter}gb", quarter_mib, 2, 4, (0, 2, 4, 6)),
        _profile(14, f"2g.{quarter}gb", quarter_mib, 2, 3, (0, 2, 4)),
        _profile(9, f"3g.{half}gb", half_mib, 4, 2, (0, 4)),
        _profile(5, f"4g.{half}gb", half_mib, 4, 1, (0,)),
        _profile(0, f"7g.{whole}gb", whole_mib, 8, 1, (0,)),
    )


A30 = (
    _profile(14, "1g.6gb", 6144, 1, 4, range(4)),
    _profile(21, "1g.6gb+me", 6144, 1, 1, range(4)),
    _profile(5, "2g.12gb", 12288, 2, 2, (0, 2)),
    _profile(0, "4g.24gb", 24576, 4, 1, (0,)),
)
A100_40 = _of_seven((5, 5120), (10, 10240), (20, 20480), (40, 40960))
"""As in Volcano's table, rounded: a real device has up to 5 percent less."""
A100_80 = _of_seven((10, 9728), (20, 19968), (40, 40192), (80, 80896))
H100_80 = _of_seven((10, 9984), (20, 20096), (40, 40448), (80, 81152))
H200 = _of_seven((18, 16384), (35, 33280), (71, 71424), (141, 143360))
B200 = _of_seven((23, 20992), (45, 45312), (90, 90624), (180, 182272))

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

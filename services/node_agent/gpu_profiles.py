"""GPU models that can be simulated, with the figures their vendor publishes."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """What NVML would say of a model."""

    product: str
    """NVML's product name."""
    memory_mib: int


PROFILES: Mapping[str, GpuProfile] = {
    "T4": GpuProfile(product="Tesla T4", memory_mib=15360),
    "A10": GpuProfile(product="NVIDIA A10", memory_mib=23028),
    "A30": GpuProfile(product="NVIDIA A30", memory_mib=24576),
    "L4": GpuProfile(product="NVIDIA L4", memory_mib=23034),
    "A100-40GB": GpuProfile(product="NVIDIA A100-SXM4-40GB", memory_mib=40960),
    "A100-80GB": GpuProfile(product="NVIDIA A100-SXM4-80GB", memory_mib=81920),
    "H100-80GB": GpuProfile(product="NVIDIA H100 80GB HBM3", memory_mib=81559),
    "H200": GpuProfile(product="NVIDIA H200", memory_mib=143771),
    "V100-32GB": GpuProfile(product="Tesla V100-SXM2-32GB", memory_mib=32768),
    "GTX1080Ti": GpuProfile(product="NVIDIA GeForce GTX 1080 Ti", memory_mib=11178),
}

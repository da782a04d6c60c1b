"""HAMi-core's real library on the simulated GPUs: containers as the agent prepares them.

`LEASEHOLD_LIBVGPU` names one library, or several with commas between them.
"""

import functools
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_image import RegionSeed
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.isolation.region_writer import seed_region
from tests.support.gpu_driver import GIB, GpuDriver, GpuLoad

LIBRARIES = [Path(name) for name in os.environ.get("LEASEHOLD_LIBVGPU", "").split(",") if name]


@dataclass(kw_only=True)
class HamiContainer:
    """A container that the library limits; its processes run in the namespaces of the test."""

    driver: GpuDriver
    library: Path
    directory: Path
    loads: list[GpuLoad] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path = self.directory / "r.cache"

    def seed(self, *gib: float, cores: int = 0) -> RegionSeed:
        """Set its limits, as before a start: memory in GiB by device."""
        seed = RegionSeed(
            memory_bytes=tuple(int(amount * GIB) for amount in gib),
            cores_percent=(cores,) * len(gib),
            other_cores_percent=cores,
        )
        seed_region(self.path, seed, starting=True)
        return seed

    def load(self, **environment: str) -> GpuLoad:
        """Start a process with the library preloaded."""
        given = {
            "LD_PRELOAD": str(self.library),
            "CUDA_REDIRECT": str(self.library),
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(self.path),
            "LIBCUDA_LOG_LEVEL": "1",
        }
        load = self.driver.load(**given | environment)
        self.loads.append(load)
        return load

    @property
    def region(self) -> Region:
        """Its region now."""
        region = read_region(self.path)
        assert isinstance(region, Region), region
        return region

    @property
    def living(self) -> frozenset[int]:
        """PIDs of its processes that run."""
        return frozenset(load.pid for load in self.loads if load.process.returncode is None)


@functools.cache
def can_unshare() -> bool:
    """Whether this machine lets a test make namespaces, and mount in them."""
    unshare = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "sh", "-c")
    mounts = "mount -t tmpfs tmpfs /mnt && mount -t proc proc /proc"
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    return subprocess.run([*unshare, mounts], capture_output=True, check=False).returncode == 0

"""HAMi-core's real library on the simulated GPUs: containers as the agent prepares them.

`LEASEHOLD_LIBVGPU` names one library, or several with commas between them.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.library import NodeLibrary
from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_image import RegionSeed, region_path_of
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.isolation.region_writer import seed_region
from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerSetup
from shared.model.lease import Lease
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
            memory_bytes=tuple(int(one * GIB) for one in gib),
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
        found = read_region(self.path)
        assert isinstance(found, Region), found
        return found

    @property
    def living(self) -> frozenset[int]:
        """PIDs of its processes that run."""
        return frozenset(one.pid for one in self.loads if one.process.returncode is None)


_START = """
set -e
R=$1; shift
mount -t tmpfs tmpfs "$R"
cd "$R"
for one in bin lib lib64 sbin; do cp -a --no-target-directory /$one $one 2>/dev/null || true; done
mkdir -p usr etc dev tmp proc node-proc driver node
for one in usr dev; do mount --rbind /$one $one; done
for one in bin lib lib64 sbin; do
  [ -L $one ] || { mkdir -p $one; mount --rbind /$one $one; }
done
mount -t tmpfs tmpfs usr/local
mount --bind /proc node-proc
mount -t proc proc proc
mount --bind "$1" driver
mount --bind "$2" node
printf %s "$3" > overrideEnv
shift 3
while [ $# -gt 0 ]; do
  mkdir -p "./${1%/*}"
  if [ -d "$2" ]; then mkdir -p "./$1"; else touch "./$1"; fi
  mount --bind "$2" "./$1"
  [ "$3" = rw ] || mount -o remount,bind,ro "./$1"
  shift 3
done
exec chroot . /driver/gpu-load
"""
"""Makes a container's root of the machine's programs, the driver and the agent's mounts."""


@dataclass(kw_only=True)
class IsolatedContainer:
    """A container in namespaces of its own, with the files and mounts that the agent prepares."""

    driver: GpuDriver
    root: Path
    setup: ContainerSetup
    image_overrides: str = ""
    """Content of the image's own file of overrides."""

    @classmethod
    async def prepared(
        cls, driver: GpuDriver, library: Path, node: Path, lease: Lease
    ) -> "IsolatedContainer":
        """Prepare the container `main` of a lease, as HAMi names its variables and mounts."""
        installed = NodeLibrary(node / "library", library)
        assert await installed.update(), installed.unusable_reason
        files = ContainerFiles(PurePosixPath(node / "state"), installed)
        setup = DIALECTS["nvidia"].container_setup(lease, "main", {}, files.paths)
        await files.prepare(setup, starting=True)
        root = node / f"root-{lease.pod}"
        root.mkdir(parents=True, exist_ok=True)
        return cls(driver=driver, root=root, setup=setup)

    def load(self, *, with_environment: bool = True) -> GpuLoad:
        """Start its first process."""
        mounts = [
            text
            for one in self.setup.mounts
            for text in (one.container_path, one.host_path, "ro" if one.read_only else "rw")
        ]
        return self.driver.load(
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", _START, "-"),
            *(self.root, self.driver.folder, self.driver.state.parent, self.image_overrides),
            *mounts,
            **{
                **(self.setup.environment if with_environment else {}),
                "LD_LIBRARY_PATH": "/driver",
                "GPU_DRIVER_STATE": f"/node/{self.driver.state.name}",
                "GPU_DRIVER_PROC": "/node-proc",
            },
        )

    @property
    def region(self) -> Region:
        """Its region now."""
        path = region_path_of(self.setup)
        found = read_region(path) if path is not None else None
        assert isinstance(found, Region), found
        return found


def can_unshare() -> bool:
    """Whether this machine lets a test make namespaces."""
    return os.geteuid() == 0 and shutil.which("unshare") is not None

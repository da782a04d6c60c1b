"""What to try on a real GPU, as root: `python -m tests.benchmarks.hardware STEP`.

`devices` prints what NVML reports, `seed` makes a region with limits of 5 GiB and 40 %, `raise`
changes its first limits to 9 GiB and 80 %, and `cores` measures three limits of cores.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from services.node_agent.gpus.nvml.gpus import NvmlGpus
from services.node_agent.gpus.nvml.processes import NvmlProcesses
from services.node_agent.isolation.region_image import RegionSeed
from services.node_agent.isolation.region_writer import seed_region, write_limits
from services.node_agent.kubelet.cgroups import read_origin

REGION = Path("/tmp/region/r.cache")
BURN = (
    "import torch; a = torch.rand(4096, 4096, device='cuda')\nwhile True: a = (a @ a).clamp(0, 1)"
)
GIB = 1 << 30


def devices() -> None:
    """Print the devices, and each process on them with its pod."""
    for gpu in asyncio.run(NvmlGpus().discover()):
        print(gpu)
    for sample in asyncio.run(NvmlProcesses().sample()):
        for process in sample.processes:
            print(sample.index, process, read_origin(process.pid, Path("/proc")))


def seed(place: Path = REGION, *, gib: int = 5, cores: int = 40) -> None:
    """Create a region as the agent does before a container starts."""
    limits = RegionSeed(
        memory_bytes=(gib * GIB,), cores_percent=(cores,), other_cores_percent=cores
    )
    seed_region(place, limits, starting=True)


def raise_limits(place: Path = REGION) -> None:
    """Change the limits of the first device while processes run."""
    limits = RegionSeed(memory_bytes=(9 * GIB,), cores_percent=(80,), other_cores_percent=40)
    write_limits(place, limits)


def cores() -> None:
    """Print each limit, and the utilization of a process that computes, over 30 s."""
    given = os.environ | {
        "LD_PRELOAD": "/usr/local/vgpu/libvgpu.so",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(REGION),
        "GPU_CORE_UTILIZATION_POLICY": "force",
    }
    for limit in (25, 50, 75):
        seed(gib=8, cores=limit)
        burning = subprocess.Popen([sys.executable, "-c", BURN], env=given)
        time.sleep(15)
        seen = []
        for _ in range(30):
            samples = asyncio.run(NvmlProcesses().sample())
            ours = (p for one in samples for p in one.processes if p.pid == burning.pid)
            seen += [process.busy_percent or 0 for process in ours]
            time.sleep(1)
        burning.kill()
        print(limit, sum(seen) / max(1, len(seen)))


STEPS = {"devices": devices, "seed": seed, "raise": raise_limits, "cores": cores}

if __name__ == "__main__":
    STEPS[sys.argv[1]]()

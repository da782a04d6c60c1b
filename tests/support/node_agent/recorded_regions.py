"""Region files that HAMi-core's real library wrote, byte for byte, and what was true meanwhile.

`LEASEHOLD_LIBVGPU=... python -m tests.support.node_agent.recorded_regions` records them, one per
library, named after the folder that holds it.
"""

import gzip
import json
import tempfile
from pathlib import Path

from simcluster.gpu_driver.build import build
from tests.support.gpu_driver import GpuDriver, gpu
from tests.support.hami_core import LIBRARIES, HamiContainer

RECORDED = Path(__file__).parents[2] / "recorded" / "regions"
ONE = gpu(1)


def record(library: Path, work: Path) -> None:
    """Record a region that the library makes itself, after it has moved a process's record."""
    driver = GpuDriver(folder=build(), state=work / "gpus")
    driver.create(ONE)
    container = HamiContainer(driver=driver, library=library, directory=work / library.parent.name)
    limit = {"CUDA_DEVICE_MEMORY_LIMIT_0": "4g"}
    first, second, third = (container.load(**limit) for _ in range(3))
    for load in (first, second, third):
        assert load.fits("512m")
    second.kill()
    assert not first.fits("3600m")  # it removes the record of the second, and moves the third's
    assert third.fits("1g")
    facts = {
        "living": [first.pid, third.pid],
        "killed": second.pid,
        "driver_bytes": driver.used(ONE),
    }
    name = RECORDED / library.parent.name
    RECORDED.mkdir(parents=True, exist_ok=True)
    region = (container.directory / "r.cache").read_bytes()
    name.with_suffix(".region.gz").write_bytes(gzip.compress(region, mtime=0))
    name.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    driver.close()


def main() -> None:
    """Record all libraries."""
    for library in LIBRARIES:
        with tempfile.TemporaryDirectory() as work:
            record(library, Path(work))


if __name__ == "__main__":
    main()

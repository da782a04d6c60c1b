"""What a limit of cores leaves of a GPU to processes: `python -m tests.benchmarks.core_limits`.

Method: HAMi-core's real library (`LEASEHOLD_LIBVGPU`) on one simulated GPU of 80 multiprocessors,
whose kernels take the time that they name. Each row is a container of its own. Its processes launch
kernels without a pause; the GPU's time in their kernels is shown for the first six seconds and for
the twenty seconds after that. The load average of the machine is printed, because on a busy machine
the library measures late: `chrt --rr 5` in front of the command helps.
"""

import os
import tempfile
from pathlib import Path

from simcluster.gpu_driver.build import build
from tests.support.gpu_driver import GpuDriver, gpu
from tests.support.hami_core import LIBRARIES, HamiContainer

CASES = (
    *((limit, 1, 1_000, 640) for limit in (25, 50, 75)),
    (25, 2, 1_000, 640),
    (25, 1, 100, 640),
    (25, 1, 20_000, 640),
    (25, 1, 1_000, 1),
)
"""Limit in percent, processes, and microseconds and blocks of a kernel."""


def busy_percent(loads, seconds, kernel_us, blocks):
    """Launch kernels in all processes at once; return the part of the GPU's time they took."""
    for load in loads:
        load.send(f"burn {seconds}s {kernel_us} {blocks}")
    return sum(int(load.result().partition("busy=")[2].split()[0]) for load in loads)


def measure(case, folder, library):
    """Run one case; return its row."""
    limit, processes, kernel_us, blocks = case
    with tempfile.TemporaryDirectory(prefix="lh-cores-") as directory:
        driver = GpuDriver(folder=folder, state=Path(directory) / "gpus")
        driver.create(gpu(1))
        container = HamiContainer(driver=driver, library=library, directory=Path(directory) / "c")
        container.seed(4, cores=limit)
        try:
            loads = [container.load(GPU_CORE_UTILIZATION_POLICY="force") for _ in range(processes)]
            first, then = (busy_percent(loads, seconds, kernel_us, blocks) for seconds in (6, 20))
        finally:
            driver.close()
    what = f"limit {limit} %, {processes} process(es), kernels of {kernel_us} µs, {blocks} block(s)"
    return f"{what}: {first} % in the first 6 s, then {then} %"


def main():
    """Measure every case with every library."""
    if not LIBRARIES:
        raise SystemExit("LEASEHOLD_LIBVGPU is not set: set it to the path of a libvgpu.so")
    folder = build()
    for library in LIBRARIES:
        print(library)
        for case in CASES:
            row = measure(case, folder, library)
            print(f"  {row}  (load average {os.getloadavg()[0]:.1f})", flush=True)


if __name__ == "__main__":
    main()

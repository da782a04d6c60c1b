"""What a limit of cores leaves of a GPU to processes: `python -m tests.benchmarks.core_limits`.

Method: HAMi-core's real library (`LEASEHOLD_LIBVGPU`) on one simulated GPU of 80 multiprocessors,
whose kernels take the time that they name. Each row is a container of its own. Its processes launch
kernels without a pause; the GPU's time in their kernels is shown for the first six seconds and for
the twenty seconds after that. The load average of the machine is printed, because on a busy machine
the library measures late: `chrt --rr 5` in front of the command helps.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from simcluster.gpu_driver.build import build
from tests.support.gpu_driver import GpuDriver, GpuLoad, gpu
from tests.support.hami_core import LIBRARIES, HamiContainer

FIRST_S, THEN_S = 6, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One container."""

    limit_percent: int
    processes: int = 1
    kernel_us: int = 1_000
    blocks: int = 640

    def __str__(self) -> str:
        return (
            f"limit {self.limit_percent} %, {self.processes} process(es), "
            f"kernels of {self.kernel_us} µs and {self.blocks} block(s)"
        )


CASES = (
    *(Case(limit_percent=limit) for limit in (25, 50, 75)),
    Case(limit_percent=25, processes=2),
    Case(limit_percent=25, kernel_us=100),
    Case(limit_percent=25, kernel_us=20_000),
    Case(limit_percent=25, blocks=1),
)


def busy_percent(loads: list[GpuLoad], case: Case, seconds: int) -> int:
    """Launch kernels in all processes at once; return the part of the GPU's time they took."""
    for load in loads:
        load.send(f"burn {seconds}s {case.kernel_us} {case.blocks}")
    return sum(int(load.result().partition("busy=")[2].split()[0]) for load in loads)


def measure(case: Case, folder: Path, library: Path) -> str:
    """Run one case; return its row."""
    with tempfile.TemporaryDirectory(prefix="lh-cores-") as directory:
        driver = GpuDriver(folder=folder, state=Path(directory) / "gpus")
        driver.create(gpu(1))
        container = HamiContainer(driver=driver, library=library, directory=Path(directory) / "c")
        container.seed(4, cores=case.limit_percent)
        try:
            loads = [
                container.load(GPU_CORE_UTILIZATION_POLICY="force") for _ in range(case.processes)
            ]
            first = busy_percent(loads, case, FIRST_S)
            then = busy_percent(loads, case, THEN_S)
        finally:
            driver.close()
    return f"{case}: {first} % in the first {FIRST_S} s, then {then} %"


def main() -> None:
    """Measure every case with every library."""
    if not LIBRARIES:
        raise SystemExit("LEASEHOLD_LIBVGPU is not set: set it to the path of a libvgpu.so")
    with tempfile.TemporaryDirectory(prefix="lh-driver-") as built:
        folder = build(Path(built))
        for library in LIBRARIES:
            print(library)
            for case in CASES:
                row = measure(case, folder, library)
                print(f"  {row}  (load average {os.getloadavg()[0]:.1f})", flush=True)


if __name__ == "__main__":
    main()

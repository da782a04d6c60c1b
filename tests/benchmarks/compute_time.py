"""What limits of cores by GPU time hold on the simulated driver, which lets programs take turns.

    python -m tests.benchmarks.compute_time [--seconds 10] [--results results.json]

Programs that never wait compute under a limit, one after the other, each on a GPU of its own; then
two at once on one GPU. A figure is the percent of the GPU's time that a container has had in all
these seconds, and in brackets the least and most of any second, by the driver's own count. The last
rows are a pod with a kernel of 200 us every 10 or 2 ms on average beside one with kernels of 20 ms:
how long it waits for a kernel. Where long kernels compete, limits are corrected by what NVML shows,
as the agent does it. It needs a C compiler, and a machine that does nothing else.
"""

import argparse
import ctypes
import itertools
import json
import os
import tempfile
import time
from pathlib import Path

import pynvml

from services.node_agent.compute_time.build_library import LIBRARY, build_library
from services.node_agent.compute_time.steering import STEER_S
from simcluster.gpu_driver.build import build
from tests.benchmarks.measured import columns_table
from tests.support.compute_time import TimeContainer
from tests.support.gpu_driver import GpuDriver, gpu
from tests.support.waiting import until_blocking

LIMITS = (25, 50, 75)
KINDS = {
    "kernels of 20 us": "20 kernel",
    "of 1 ms": "1000 kernel",
    "of 20 ms": "20000 kernel",
    "of 100 ms": "100000 kernel",
    "graphs of 2 ms": "20 graph",
}
AT_ONCE = {"kernels of 20 us": "20 kernel", "of 1 ms": "1000 kernel", "of 20 ms": "20000 kernel"}
PERIODS_MS = (10, 2)
"""Of kernels of 200 us. Beside kernels of 20 ms, without limits, they wait for 1.4 ms each, or 2.5
if they come again before the driver's time slice ends: with 2 ms, nearly all of them do."""
WARM_US = 500_000
"""Of GPU time: afterwards the bucket has no time saved."""
AVERAGED_S = 3
"""NVML's percents are averaged."""
LOOPS = 1
"""Of a kernel: the simulated driver knows how long it takes."""


class Machine:
    """Containers with limits on simulated GPUs."""

    def __init__(self, folder: Path, seconds: int) -> None:
        self.seconds = seconds
        self.library = build_library(folder / LIBRARY)
        self.driver = GpuDriver(folder=build(), state=folder / "state")
        self.folder = folder
        self.card = gpu(1)
        self.containers: list[TimeContainer] = []
        self.made = 0

    def start(self, percents):
        """Make an idle GPU, and containers on it with these limits."""
        for container in self.containers:
            for load in container.loads:
                load.kill()
        self.driver.create(self.card)
        self.containers = []
        for percent in percents:
            self.made += 1
            directory = self.folder / f"container-{self.made}"
            gpus = {self.card.uuid: percent}
            self.containers.append(
                TimeContainer(
                    driver=self.driver, library=self.library, directory=directory, gpus=gpus
                )
            )

    def flood(self, container, kind):
        container.load().send(f"flood 600s {kind} {LOOPS}")
        until_blocking(lambda: container.ran_us(self.card)[0] >= WARM_US)

    def pass_time(self, seconds):
        """Correct the limits of those that compete, twice a second, as the agent does."""
        ends_at = time.monotonic() + seconds
        while (left := ends_at - time.monotonic()) > 0:
            time.sleep(min(left, STEER_S))
            if len(self.containers) > 1:
                for container in self.containers:
                    container.show_measured(self.card)

    def percents(self, kind):
        """Return of each container the percent of all seconds, and of each second."""
        for container in self.containers:
            self.flood(container, kind)
        if len(self.containers) > 1:
            self.pass_time(AVERAGED_S)
        rows = [self.ran()]
        for _ in range(self.seconds):
            self.pass_time(1)
            rows.append(self.ran())
        return [
            (
                percent(rows[0][number], rows[-1][number]),
                [percent(*pair) for pair in itertools.pairwise(column)],
            )
            for number, column in enumerate(zip(*rows, strict=True))
        ]

    def ran(self):
        return [container.ran_us(self.card) for container in self.containers]


def percent(before, after):
    return 100 * (after[0] - before[0]) / (after[1] - before[1])


def single(machine, limit, kind):
    machine.start([limit])
    [(mean, seconds)] = machine.percents(kind)
    return f"{mean:.1f} ({min(seconds):.0f}-{max(seconds):.0f})"


def both(machine, kind):
    machine.start([25, 75])
    return " and ".join(f"{mean:.1f}" for mean, _ in machine.percents(kind))


def latency(machine, limits, period_ms):
    machine.start(limits)
    victim, other = machine.containers
    machine.flood(other, "20000 kernel")
    waiting = victim.load()
    waiting.send(f"latency {machine.seconds + AVERAGED_S}s 200 {period_ms * 1000} {LOOPS}")
    machine.pass_time(machine.seconds + AVERAGED_S)
    words = dict(word.split("=") for word in waiting.result().split())
    return f"{int(words['p50_us']) / 1000:.1f} / {int(words['p99_us']) / 1000:.1f} ms"


def measure(machine):
    """Return the cells by column and row, and print each when it is known."""
    columns = {}

    def note(kind, row, cell):
        columns.setdefault(kind, {})[row] = cell
        print(f"{row}, {kind}: {cell}", flush=True)

    for kind, command in KINDS.items():
        for limit in LIMITS:
            note(kind, f"{limit} %", single(machine, limit, command))
    for kind, command in AT_ONCE.items():
        note(kind, "25 % and 75 %, two pods at once", both(machine, command))
    for period_ms in PERIODS_MS:
        row = f"a kernel of 200 us every {period_ms} ms beside one: p50 / p99"
        note("of 20 ms", f"{row}, no limits", latency(machine, [100, 100], period_ms))
        for own, other in ((50, 50), (75, 25)):
            limits = f"limits {own} % and {other} %"
            note("of 20 ms", f"{row}, {limits}", latency(machine, [own, other], period_ms))
    return columns


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=10, help="of each figure (default 10)")
    parser.add_argument("--results", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lh-time-") as folder:
        machine = Machine(Path(folder), options.seconds)
        ctypes.CDLL(str(machine.driver.folder / "libnvidia-ml.so.1"))  # for pynvml, by its name
        os.environ["GPU_DRIVER_STATE"] = str(machine.driver.state)
        machine.driver.create(machine.card)
        pynvml.nvmlInit()
        try:
            columns = measure(machine)
        finally:
            machine.driver.close()
    if options.results:
        options.results.write_text(json.dumps(columns, indent=1))
    print(f"\n{columns_table(columns, 'limit')}")


if __name__ == "__main__":
    main()

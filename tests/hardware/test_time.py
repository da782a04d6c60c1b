"""How processes take turns on the GPU, and what limits by GPU time leave to them.

The GPU's time is what kernels need whose duration was measured before, on a GPU of its own.
"""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import pytest

from services.node_agent.compute_time.build_library import LIBRARY, build_library
from services.node_agent.compute_time.time_files import write_time_limits
from services.node_agent.compute_time.time_layouts import TimeLimit
from shared.model.errors import UnavailableError
from tests.hardware.conftest import Add, AddPod
from tests.hardware.machine import Machine
from tests.hardware.test_compute import KERNELS
from tests.support.gpu_driver import GpuLoad

MOST_OFF = 3
"""Points that a mean may differ from its limit."""
LEAST_PART = 0.9
"""Of each limit, if two pods have all of the GPU together."""
WARM_S = 60
"""HAMi-core's bucket is empty by then, if its kernels are of a millisecond."""
Load = Callable[[int], GpuLoad]


@pytest.fixture
def load(machine: Machine) -> Iterator[Load]:
    """Starts a program with a limit by GPU time in percent, or without one: 0."""
    try:
        library = build_library(machine.root / LIBRARY)
    except UnavailableError as error:
        pytest.skip(str(error))
    made: list[GpuLoad] = []

    def start(percent: int) -> GpuLoad:
        directory: Path = machine.root / f"container-{len(made)}"
        directory.mkdir()
        limit = TimeLimit(
            device=machine.gpu.uuid, percent=percent, allowed=percent, measured=0, measured_at=0
        )
        write_time_limits(directory / "limits", [limit])
        files = {
            "LEASEHOLD_TIME_LIMITS": str(directory / "limits"),
            "LEASEHOLD_TIME_USE": str(directory / "use"),
        }
        made.append(machine.load(LD_PRELOAD=str(library), **files))
        return made[-1]

    yield start
    for program in made:
        program.kill()


def percents(machine: Machine, kernel_us: int, *loads: GpuLoad, warm_s: float) -> list[list[int]]:
    """Have programs compute at once; return the percent of the GPU that each got, by seconds."""
    seconds = [warm_s, *(1 for _ in range(1 if machine.quick else 4))]
    loops = machine.loops
    for program in loads:
        for length in seconds:
            program.send(f"burn {length}s {kernel_us} 640 {loops}")
    results = [[program.result() for _ in seconds] for program in loads]
    return [[_busy(text) for text in of_program[1:]] for of_program in results]


def _busy(text: str) -> int:
    match = re.search(r"busy=(\d+)", text)
    assert match, text
    return int(match[1])


def _shown(by_second: list[int]) -> str:
    return f"{fmean(by_second):.1f} (by seconds: {', '.join(map(str, by_second))})"


def test_how_long_a_turn_is_and_what_a_switch_costs(
    machine: Machine, load: Load, seen: Add
) -> None:
    seconds = 0.5 if machine.quick else 3
    waiting = load(0)
    command = f"latency {seconds}s {KERNELS['tiny']} 1000 {machine.loops}"
    alone = waiting.do(command)
    other = load(0)
    other.send(f"flood {seconds + 2}s {KERNELS['long']} kernel {machine.loops}")
    beside = waiting.do(command)
    other.result()
    both = percents(machine, KERNELS["short"], waiting, other, warm_s=0.3)

    seen("a kernel of 20 us, alone, from launch to end", alone)
    seen("the same beside kernels of 20 ms: a turn of the other takes about its median", beside)
    lost = 100 - sum(map(fmean, both))
    seen("percent of the GPU that two programs lose by switches, kernels of 1 ms", f"{lost:.1f}")


def test_whether_nvml_divides_the_time_of_programs_fairly(
    real: Machine, load: Load, seen: Add
) -> None:
    """NVML corrects the charges of long kernels that compete."""
    programs = [load(0), load(0)]
    for program in programs:
        program.send(f"flood 6s {KERNELS['long']} kernel {real.loops}")
    time.sleep(4)
    sample = {process.pid: process.busy_percent for process in real.sample().processes}
    first, second = (sample.get(program.process.pid) or 0 for program in programs)

    holds = first > 0 and abs(first - second) <= 2 * MOST_OFF
    shows = "percents by NVML of two programs that take equal turns, kernels of 20 ms"
    seen(shows, f"{first} and {second}", "equal", holds=holds)


@pytest.mark.parametrize("limit", [25, 50, 75])
@pytest.mark.parametrize("kind", KERNELS)
def test_one_program_with_a_limit(
    machine: Machine, load: Load, seen: Add, kind: str, limit: int
) -> None:
    if machine.quick and (kind, limit) != ("short", 25):
        pytest.skip("one case is enough in `make test`")
    (got,) = percents(machine, KERNELS[kind], load(limit), warm_s=0.5)

    most = MOST_OFF if machine.real else 15  # a simulated GPU has a busy machine's time
    holds = abs(fmean(got) - limit) <= most if machine.real else fmean(got) <= limit + most
    seen(f"percent by GPU time, limit {limit}, {kind} kernels", _shown(got), limit, holds=holds)


@pytest.mark.parametrize("kind", KERNELS)
def test_two_programs_with_25_and_75(machine: Machine, load: Load, seen: Add, kind: str) -> None:
    if machine.quick and kind != "short":
        pytest.skip("one case is enough in `make test`")
    both = percents(machine, KERNELS[kind], load(25), load(75), warm_s=0.5)

    quarter, rest = map(fmean, both)
    holds = quarter >= 25 * LEAST_PART and rest >= 75 * LEAST_PART if machine.real else None
    seen(
        f"percents by GPU time, limits 25 and 75 at once, {kind} kernels",
        " and ".join(map(_shown, both)),
        f"at least {LEAST_PART:g} of each",
        holds=holds,
    )
    assert quarter > 0
    assert rest > 0


def test_hami_core_after_a_minute(real: Machine, pods: AddPod, seen: Add) -> None:
    if real.library is None:
        pytest.skip("no library of HAMi-core was given")
    program = pods("warm", mib=4096, cores=25).load(answer_s=2 * WARM_S)
    (got,) = percents(real, KERNELS["short"], program, warm_s=WARM_S)

    seen("percent by HAMi-core, limit 25, short kernels, after 60 s", _shown(got), 25, holds=None)

"""How processes take turns on the GPU, and what limits by GPU time leave to them.

The GPU's time is what kernels need whose duration was measured before, on a GPU of its own.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import pytest

from tests.hardware.conftest import Add, AddPod, AddTimeContainer
from tests.hardware.machine import Machine
from tests.support.gpu_driver import GpuLoad

MOST_OFF = 3
"""Points that a mean may differ from its limit."""
LEAST_PART = 0.9
"""Of each limit, if two pods have all of the GPU together."""
MOST_LAUNCH_PERCENT = 2.0
"""By which limits by GPU time may slow launches down."""
AVERAGED_S = 3
"""NVML's percents are averaged, where kernels of 5 ms and more compete."""
WARM_S = 60
"""HAMi-core's bucket is empty by then, if its kernels are of a millisecond."""
GRAPH_KERNELS = 100
Load = Callable[[int], GpuLoad]


@dataclass(frozen=True)
class Kind:
    """What programs launch."""

    kernel_us: int
    seconds: int
    """How long it is measured: ten seconds have only a hundred of the longest kernels."""
    how: str = "kernel"


KINDS = {
    "kernels of 20 ms": Kind(20_000, 10),
    "kernels of 1 ms": Kind(1_000, 5),
    "kernels of 20 us": Kind(20, 5),
    "graphs of 2 ms": Kind(20, 5, "graph"),
    "kernels of 100 ms": Kind(100_000, 10),
}
"""In this order: what the H200 has shown to be limited by nothing else comes first."""
AT_ONCE = ("kernels of 20 ms", "kernels of 1 ms", "kernels of 20 us")
IN_MAKE_TEST = "kernels of 1 ms"


@pytest.fixture
def load(machine: Machine, time_containers: AddTimeContainer) -> Iterator[Load]:
    """Starts a program with a limit by GPU time in percent, or without one: 0.

    What NVML shows of it corrects its charges until the test ends.
    """
    with contextlib.ExitStack() as stack:

        def start(percent: int) -> GpuLoad:
            if not percent:
                program = machine.load()
                stack.callback(program.kill)
                return program
            container = time_containers(percent)
            program = container.load()
            stack.callback(program.kill)
            stack.enter_context(container.steered(program))
            return program

        yield start


@dataclass(frozen=True)
class Percents:
    """Of the GPU's time, that a program's launches needed."""

    mean: float
    by_second: str

    def __str__(self) -> str:
        return f"{self.mean:.1f} (by seconds: {self.by_second})"


def percents(machine: Machine, kind: Kind, *loads: GpuLoad, warm_s: float = 0.5) -> list[Percents]:
    """Have programs launch at once and never wait; return what each got of the GPU."""
    seconds = 2 if machine.quick else kind.seconds
    loops = machine.loops
    for program in loads:
        program.send(f"flood {warm_s}s {kind.kernel_us} {kind.how} {loops}")
        program.send(f"percents {seconds} {kind.kernel_us} {kind.how} {loops}")
    results = [(program.result(), program.result())[1] for program in loads]
    return [_read(text) for text in results]


def _read(text: str) -> Percents:
    match = re.fullmatch(r"by=(\S+) mean=(\S+)", text)
    assert match, text
    return Percents(float(match[2]), match[1].replace(",", ", "))


def test_how_long_a_turn_is_and_what_a_switch_costs(
    machine: Machine, load: Load, seen: Add
) -> None:
    seconds = 0.5 if machine.quick else 3
    waiting = load(0)
    command = f"latency {seconds}s 20 1000 {machine.loops}"
    alone = waiting.do(command)
    other = load(0)
    other.send(f"flood {seconds + 2}s 20000 kernel {machine.loops}")
    beside = waiting.do(command)
    other.result()
    both = percents(machine, KINDS["kernels of 1 ms"], waiting, other)

    seen("a kernel of 20 us, alone, from launch to end", alone)
    seen("the same beside kernels of 20 ms: a turn of the other takes about its median", beside)
    lost = 100 - sum(had.mean for had in both)
    seen("percent of the GPU that two programs lose by switches, kernels of 1 ms", f"{lost:.1f}")


def test_whether_nvml_divides_the_time_of_programs_fairly(
    real: Machine, load: Load, seen: Add
) -> None:
    """NVML corrects the charges of long kernels that compete."""
    programs = [load(0), load(0)]
    for program in programs:
        program.send(f"flood 6s 20000 kernel {real.loops}")
    time.sleep(4)
    sample = {process.pid: process.busy_percent for process in real.sample().processes}
    first, second = (sample.get(program.process.pid) or 0 for program in programs)

    holds = first > 0 and abs(first - second) <= 2 * MOST_OFF
    shows = "percents by NVML of two programs that take equal turns, kernels of 20 ms"
    seen(shows, f"{first} and {second}", "equal", holds=holds)


@pytest.mark.parametrize("limit", [25, 50, 75])
@pytest.mark.parametrize("kind", KINDS)
def test_one_program_with_a_limit(
    machine: Machine, load: Load, seen: Add, kind: str, limit: int
) -> None:
    if machine.quick and (kind, limit) != (IN_MAKE_TEST, 25):
        pytest.skip("one case is enough in `make test`")
    [got] = percents(machine, KINDS[kind], load(limit))

    most = MOST_OFF if machine.real else 15  # a simulated GPU has a busy machine's time
    holds = abs(got.mean - limit) <= most if machine.real else got.mean <= limit + most
    target = f"{limit}, within {MOST_OFF}"
    seen(f"percent by GPU time, limit {limit}, {kind}", got, target, holds=holds)


@pytest.mark.parametrize("kind", AT_ONCE)
def test_two_programs_with_25_and_75(machine: Machine, load: Load, seen: Add, kind: str) -> None:
    if machine.quick and kind != IN_MAKE_TEST:
        pytest.skip("one case is enough in `make test`")
    both = percents(machine, KINDS[kind], load(25), load(75), warm_s=AVERAGED_S)

    quarter, rest = both
    holds = None
    if machine.real:
        holds = quarter.mean >= 25 * LEAST_PART and rest.mean >= 75 * LEAST_PART
    seen(
        f"percents by GPU time, limits 25 and 75 at once, {kind}",
        " and ".join(map(str, both)),
        f"at least {LEAST_PART:g} of each",
        holds=holds,
    )
    assert quarter.mean > 0
    assert rest.mean > 0


@pytest.mark.parametrize("limits", [(0, 0), (50, 50), (75, 25)], ids=str)
def test_how_long_a_short_kernel_waits_beside_long_ones(
    machine: Machine, load: Load, seen: Add, limits: tuple[int, int]
) -> None:
    """A kernel of 200 us every 5 ms on average, beside kernels of 20 ms."""
    seconds = 0.5 if machine.quick else 4
    waiting, other = map(load, limits)
    other.send(f"flood {seconds + AVERAGED_S}s 20000 kernel {machine.loops}")
    waited = waiting.do(f"latency {seconds}s 200 5000 {machine.loops}")
    words = "limits {} and {} by GPU time".format(*limits) if any(limits) else "no limits"
    seen(f"a kernel of 200 us beside those of 20 ms, from launch to end, {words}", waited)
    assert "p50_us=" in waited


def test_launches_per_second(machine: Machine, load: Load, seen: Add) -> None:
    seconds = 0.1 if machine.quick else 1
    without = load(0)
    limited = load(100)
    rates = [
        [program.value(f"launches {seconds}s", "per_s") for program in (without, limited)]
        for _ in range(5)
    ]

    bare, held = (median(rate) for rate in zip(*rates, strict=True))
    cost = (bare - held) / bare * 100
    seen(
        "launches of empty kernels per second, without and with a limit by GPU time",
        f"{bare:,.0f}, {held:,.0f}: {cost:.1f} % less",
        f"at most {MOST_LAUNCH_PERCENT:g} % less",
        holds=cost <= MOST_LAUNCH_PERCENT if machine.real else held > 0,
    )


def test_pytorch_with_a_limit(
    torch_machine: Machine, time_containers: AddTimeContainer, seen: Add
) -> None:
    """Matrix products of some milliseconds, twenty between two waits."""
    rates = {}
    for limit in (0, 25, 50):
        program = time_containers(limit).torch() if limit else torch_machine.torch()
        program.do("product 1")  # its bucket has no time saved afterwards
        words = dict(word.split("=") for word in program.do("product 5").split())
        program.kill()
        rates[limit] = float(words["mean_tflops"])
    for limit in (25, 50):
        got = 100 * rates[limit] / rates[0]
        holds = abs(got - limit) <= MOST_OFF
        shows = f"percent of PyTorch's matrix products, limit {limit} by GPU time"
        seen(shows, f"{got:.1f}", f"{limit}, within {MOST_OFF}", holds=holds)


def test_hami_core_after_a_minute(real: Machine, pods: AddPod, seen: Add) -> None:
    if real.library is None:
        pytest.skip("no library of HAMi-core was given")
    program = pods("warm", mib=4096, cores=25).load(answer_s=2 * WARM_S)
    [got] = percents(real, KINDS["kernels of 1 ms"], program, warm_s=WARM_S)

    shows = "percent by HAMi-core, limit 25, kernels of 1 ms, after 60 s"
    seen(shows, got, 25, holds=None)

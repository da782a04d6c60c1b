"""The limiter in C on a GPU with one queue, with a clock of the test."""

import subprocess
from pathlib import Path

import pytest

from services.node_agent import compute_time
from services.node_agent.c_compiler import compile_c
from services.node_agent.compute_time.time_files import write_time_limits
from services.node_agent.compute_time.time_layouts import TimeLimit
from shared.model.names import DeviceUuid
from simcluster.gpu_driver.build import compiler
from tests.support.gpu_driver import gpu

PROGRAM = Path(__file__).with_name("never_waits.c")
FALSE_CLOCK = ("-Dclock_gettime=clock_of_test", "-Dnanosleep=sleep_of_test")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if compiler() is None:
        pytest.skip("the limiter needs a C compiler")
    folder = Path(compute_time.__path__[0])
    sources = (PROGRAM, folder / "limiter.c", folder / "bucket.c")
    target = tmp_path_factory.mktemp("limiter") / "never_waits"
    return compile_c(target, sources, (f"-I{folder}", *FALSE_CLOCK, "-lpthread"))


@pytest.mark.parametrize("limit", [25, 50, 75])
@pytest.mark.parametrize("kernel_us", [20, 50, 1000, 20_000, 100_000])
def test_a_program_that_never_waits_gets_its_limit_to_half_a_point(
    program: Path, tmp_path: Path, limit: int, kernel_us: int
) -> None:
    limits = tmp_path / "limits"
    own = TimeLimit(device=DeviceUuid(gpu(1).uuid), percent=limit, allowed=limit)
    write_time_limits(limits, [own])

    command = (program, limits, tmp_path / "use", str(1000 * kernel_us))
    printed = subprocess.check_output(command, text=True)

    assert float(printed) == pytest.approx(limit, abs=0.5)

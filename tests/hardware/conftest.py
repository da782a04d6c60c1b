"""Fixtures: the GPU of this machine for `python -m tests.hardware`, else a simulated one."""

import ctypes
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import EllipsisType
from typing import Any

import pytest

from services.node_agent.compute_time.build_library import LIBRARY, build_library
from shared.model.errors import UnavailableError
from simcluster.gpu_driver.build import build
from tests.hardware import results
from tests.hardware.machine import Machine, Pod, first_gpu, torch_python
from tests.hardware.private_mps import PrivateMps
from tests.hardware.results import Row
from tests.hardware.time_container import TimeContainer
from tests.support.gpu_driver import GpuDriver, gpu
from tests.support.hami_core import LIBRARIES

RESULTS = "GPU_TESTS_RESULTS"
SIMULATED = "GPU_TESTS_SIMULATED"
"""Set by `python -m tests.hardware`: the folder of results, and whether the GPU is simulated."""
Add = Callable[..., None]
AddPod = Callable[..., Pod]
AddTimeContainer = Callable[[int], TimeContainer]


def part_of(path: Path) -> str:
    """Return the part that a file of tests is about."""
    return path.stem.removeprefix("test_")


@pytest.fixture(scope="session")
def folder() -> Path:
    """The compiled programs."""
    try:
        return build()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def machine(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The machine with the GPU."""
    library = LIBRARIES[0] if LIBRARIES else None
    driver = None
    if RESULTS not in os.environ or SIMULATED in os.environ:
        ctypes.CDLL(str(folder / "libnvidia-ml.so.1"))  # pynvml finds it by this name
        driver = GpuDriver(folder=folder, state=tmp_path / "gpus")
        driver.create(gpu(1, reserved_mib=600))
        monkeypatch.setenv("GPU_DRIVER_STATE", str(driver.state))
    yield Machine(
        folder=folder,
        root=tmp_path,
        library=library,
        driver=driver,
        gpu=first_gpu(),
        quick=RESULTS not in os.environ,
    )
    if driver:
        driver.close()


@pytest.fixture
def real(machine: Machine) -> Machine:
    """The machine, for what only a real GPU can show."""
    if not machine.real:
        pytest.skip("the simulated driver cannot show it")
    return machine


@pytest.fixture
def torch_machine(real: Machine) -> Machine:
    """The machine, for what needs PyTorch."""
    if not torch_python():
        pytest.skip("no Python on this machine has PyTorch: set TORCH_PYTHON")
    return real


@pytest.fixture
def pods(machine: Machine) -> Iterator[AddPod]:
    """Makes pods; their processes end with the test."""
    made: list[Pod] = []

    def add(name: str, *, mib: int, cores: int = 0) -> Pod:
        made.append(machine.pod(name, mib=mib, cores=cores))
        return made[-1]

    yield add
    for pod in made:
        pod.close()


@pytest.fixture(scope="session")
def time_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of limits by GPU time."""
    try:
        return build_library(tmp_path_factory.mktemp("compute-time") / LIBRARY)
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def time_containers(machine: Machine, time_library: Path) -> AddTimeContainer:
    """Makes containers whose programs get a percent of the GPU's time."""
    numbers = itertools.count()

    def add(percent: int) -> TimeContainer:
        directory = machine.root / f"container-{next(numbers)}"
        return TimeContainer(
            machine=machine, library=time_library, directory=directory, percent=percent
        )

    return add


@pytest.fixture
def mps(machine: Machine) -> Iterator[PrivateMps]:
    """The daemons that a test starts end with it; no setting of the GPU changes."""
    made = PrivateMps(machine)
    if reason := made.missing_reason:
        pytest.skip(reason)
    yield made
    made.close()


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> Iterator[Add]:
    """Adds rows to the table; the test fails at its end if one does not hold.

    A figure with a target must be it, unless `holds` says otherwise; None: it is not judged.
    """
    wrong: list[str] = []

    def add(
        shows: str, figure: object, target: object = "", *, holds: bool | EllipsisType | None = ...
    ) -> None:
        if isinstance(holds, EllipsisType):
            holds = None if target == "" else str(figure) == str(target)
        row = Row(
            part=part_of(request.path),
            shows=shows,
            figure=str(figure),
            target=str(target),
            holds=holds,
        )
        keep(row)
        if holds is False:
            wrong.append(f"{shows}: {figure}, and not {target}")

    yield add
    assert not wrong, "; ".join(wrong)


def keep(row: Row) -> None:
    """Write a row to the results, if this run has any."""
    if RESULTS in os.environ:
        results.append(Path(os.environ[RESULTS]) / "rows.jsonl", row)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Add a row for a test that did not run, or failed in another way than by a figure."""
    outcome: Any = yield
    report = outcome.get_result()
    if call.when == "teardown" or not (report.failed or report.skipped):
        return
    text = str(call.excinfo.value) if call.excinfo else ""
    word = "failed" if report.failed else "not run"
    keep(
        Row(
            part=part_of(item.path),
            shows=item.name.removeprefix("test_").replace("_", " "),
            figure=f"{word}: {text[:300]}",
            holds=False if report.failed else None,
        )
    )

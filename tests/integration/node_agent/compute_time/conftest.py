"""Fixtures: the library of compute time, and containers with it on simulated GPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.node_agent.compute_time.build_library import LIBRARY, build_library
from simcluster.gpu_driver.build import compiler
from tests.support.compute_time import TimeContainer
from tests.support.driver_fixtures import driver, driver_folder, nvml
from tests.support.gpu_driver import GpuDriver

__all__ = ["driver", "driver_folder", "nvml"]

MakeContainer = Callable[..., TimeContainer]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if compiler() is None:
        pytest.skip("the library of compute time needs a C compiler")
    return build_library(tmp_path_factory.mktemp("library") / LIBRARY)


@pytest.fixture
def container(driver: GpuDriver, library: Path, tmp_path: Path) -> MakeContainer:
    made: list[TimeContainer] = []

    def make(gpus: dict[str, int]) -> TimeContainer:
        directory = tmp_path / f"container-{len(made)}"
        made.append(TimeContainer(driver=driver, library=library, directory=directory, gpus=gpus))
        return made[-1]

    return make

"""Fixtures: the simulated GPUs' driver."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from simcluster.gpu_driver.build import build, compiler
from tests.support.gpu_driver import GpuDriver


@pytest.fixture(scope="session")
def driver_folder() -> Path:
    """The compiled driver; without a C compiler its tests are skipped."""
    if compiler() is None:
        pytest.skip("the simulated GPUs' driver needs a C compiler")
    return build()


@pytest.fixture
def driver(driver_folder: Path, tmp_path: Path) -> Iterator[GpuDriver]:
    """A driver without GPUs; its programs end with the test."""
    made = GpuDriver(folder=driver_folder, state=tmp_path / "state")
    yield made
    made.close()


@pytest.fixture
def nvml(driver: GpuDriver, monkeypatch: pytest.MonkeyPatch) -> GpuDriver:
    """The driver, which pynvml uses in this process."""
    ctypes.CDLL(str(driver.folder / "libnvidia-ml.so.1"))  # pynvml finds it by this name
    monkeypatch.setenv("GPU_DRIVER_STATE", str(driver.state))
    return driver

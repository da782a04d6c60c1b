"""The simulated GPUs' driver in place of HAMi-core: limits of a region that the agent wrote."""

import subprocess
from pathlib import Path

import pytest

from services.node_agent.isolation.region import Region, sums
from services.node_agent.isolation.region_image import RegionSeed
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.isolation.region_writer import seed_region, write_limits
from tests.support.gpu_driver import CONTEXT, GIB, MIB, GpuDriver, GpuLoad, gpu
from tests.support.waiting import until_blocking

ONE, OTHER = gpu(1), gpu(2)


class Container:
    """Programs with one region."""

    def __init__(self, driver: GpuDriver, root: Path, *gib: int, cores: int = 100) -> None:
        self.driver = driver
        self.place = root / "r.cache"
        seed = RegionSeed(
            memory_bytes=tuple(amount * GIB for amount in gib), cores_percent=(cores,) * len(gib)
        )
        seed_region(self.place, seed, starting=True)
        self.variables = {
            "GPU_DRIVER_LIMITS": str(self.place),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }

    def load(self) -> GpuLoad:
        return self.driver.load(**self.variables)

    @property
    def region(self) -> Region:
        region = read_region(self.place)
        assert isinstance(region, Region)
        return region


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "region"
    made.mkdir()
    return made


def test_memory_is_limited_for_all_processes_together_and_counted_in_the_region(
    driver: GpuDriver, root: Path
) -> None:
    driver.create(ONE)
    container = Container(driver, root, 4)
    first, second = container.load(), container.load()

    assert first.fits("3g")
    assert not second.fits("1g")
    assert second.fits("256m")
    assert first.value("info", "total") == first.value("total 0", "total") == 4 * GIB
    assert first.value("nvml", "used") == 3 * GIB + 256 * MIB + 2 * CONTEXT
    usage = sums(container.region, 0)
    assert (usage.total, usage.context) == (3 * GIB + 256 * MIB + 2 * CONTEXT, 2 * CONTEXT)
    assert container.region.uuids[0] == ONE.uuid
    outside = driver.load()
    assert outside.fits("8g")
    assert outside.value("nvml", "total") == 16 * GIB


def test_a_killed_process_frees_its_memory_and_its_slot(driver: GpuDriver, root: Path) -> None:
    driver.create(ONE)
    container = Container(driver, root, 4)
    first, second = container.load(), container.load()
    assert first.fits("3g")
    first.kill()

    assert second.fits("3g")
    second.end()

    assert container.load().fits("3g")
    assert sums(container.region, 0).total == 3 * GIB + CONTEXT


def test_each_device_has_its_own_limit_and_a_raised_one_applies_at_once(
    driver: GpuDriver, root: Path
) -> None:
    driver.create(ONE, OTHER)
    container = Container(driver, root, 2, 3)
    load = container.load()

    assert not load.fits("2g")
    assert load.do("device 1") == "ok"
    assert load.fits("2g")
    limits = RegionSeed(memory_bytes=(2 * GIB, 6 * GIB), cores_percent=(100, 100))
    write_limits(container.place, limits)
    assert load.fits("2g")
    assert load.value("nvml 1", "total") == 6 * GIB


def test_a_core_limit_slows_a_program_down(driver: GpuDriver, root: Path) -> None:
    driver.create(ONE)
    load = Container(driver, root, 4, cores=25).load()
    busy: list[int] = []

    def burn() -> bool:
        """Compute for a second; on a machine that is busy, the program may come to less."""
        busy.append(int(load.do("burn 1s").rpartition("busy=")[2].split()[0]))
        return busy[-1] >= 10

    until_blocking(burn)

    assert max(busy) <= 30


def test_nvidia_smi_shows_the_memory_of_the_lease(driver: GpuDriver, root: Path) -> None:
    driver.create(ONE, OTHER)
    container = Container(driver, root, 3)
    variables = driver.environment | container.variables | {"NVIDIA_VISIBLE_DEVICES": OTHER.uuid}

    def shown(*arguments: str) -> str:
        command = [str(driver.folder / "nvidia-smi"), *arguments]
        return subprocess.check_output(command, env=variables, text=True)

    assert "0MiB /    3072MiB" in shown()
    assert shown("-L") == f"GPU 0: {OTHER.name} (UUID: {OTHER.uuid})\n"

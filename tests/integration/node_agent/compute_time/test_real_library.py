"""Beside HAMi-core's real library: it holds the memory, and GPU time holds the cores."""

import time
from pathlib import Path

import pytest

from services.node_agent.isolation.region_image import RegionSeed
from services.node_agent.isolation.region_writer import seed_region
from tests.integration.node_agent.compute_time.conftest import MakeContainer
from tests.support.gpu_driver import GIB, GpuDriver, gpu
from tests.support.hami_core import LIBRARIES
from tests.support.waiting import until_blocking

pytestmark = pytest.mark.skipif(
    not LIBRARIES, reason="set LEASEHOLD_LIBVGPU to the path of HAMi-core's libvgpu.so"
)


@pytest.mark.parametrize("library_of_memory", LIBRARIES, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("way", ["kernel", "ex", "graph", "cooperative", "address", "thread"])
def test_each_library_holds_its_part(
    driver: GpuDriver, container: MakeContainer, library_of_memory: Path, way: str
) -> None:
    own = gpu(1)
    driver.create(own)
    made = container({own.uuid: 30})
    region = made.directory / "r.cache"
    seed = RegionSeed(memory_bytes=(2 * GIB,), cores_percent=(0,))
    seed_region(region, seed, starting=True)
    load = made.load(
        preload=str(library_of_memory),
        CUDA_REDIRECT=str(library_of_memory),
        CUDA_DEVICE_MEMORY_SHARED_CACHE=str(region),
        CUDA_DEVICE_MEMORY_LIMIT_0="2g",
        GPU_CORE_UTILIZATION_POLICY="disable",
        LIBCUDA_LOG_LEVEL="1",
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
    )
    assert load.fits("1g")
    assert not load.fits("2g")
    load.send(f"flood 300s 1000 {way} 1")
    until_blocking(lambda: made.ran_us(own)[0] > 500_000)

    def percent() -> float:
        ran, at = made.ran_us(own)
        time.sleep(1)
        ran_then, at_then = made.ran_us(own)
        return 100 * (ran_then - ran) / (at_then - at)

    until_blocking(lambda: 28 <= percent() <= 32)

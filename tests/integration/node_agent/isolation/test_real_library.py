"""HAMi-core's real library on the simulated GPUs, if `LEASEHOLD_LIBVGPU` names one or several."""

import os
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.isolation.library import unusable_reason
from services.node_agent.isolation.region import sums
from services.node_agent.isolation.region_image import RegionSeed, altered_limits
from services.node_agent.isolation.region_writer import write_limits
from tests.support.gpu_driver import CONTEXT, GIB, MIB, GpuDriver, gpu
from tests.support.hami_core import LIBRARIES, HamiContainer
from tests.support.waiting import until

ONE = gpu(1)
UNAVAILABLE = pytest.param(None, marks=pytest.mark.skip(reason="LEASEHOLD_LIBVGPU is not set"))
EACH: list[Any] = [*LIBRARIES] or [UNAVAILABLE]


@pytest.fixture(params=EACH, ids=lambda path: path and path.parent.name)
async def library(request: pytest.FixtureRequest) -> Path:
    """A library that the agent would install."""
    path: Path = request.param
    reason = await unusable_reason(path)
    if reason:
        pytest.skip(reason)
    Path("/tmp/vgpulock").mkdir(exist_ok=True)  # libraries up to HAMi 2.8 wait for it
    return path


@pytest.fixture
def one(driver: GpuDriver, library: Path, tmp_path: Path) -> HamiContainer:
    """A container on a machine with one GPU of 16 GiB."""
    driver.create(ONE)
    return HamiContainer(driver=driver, library=library, directory=tmp_path / "u1_main")


def total(container: HamiContainer, position: int = 0) -> int:
    return sums(container.region, position, container.living).total


@pytest.mark.parametrize(
    "variables", [{}, {"CUDA_DEVICE_MEMORY_LIMIT_0": "9g"}, {"CUDA_DEVICE_MEMORY_LIMIT": "1g"}]
)
def test_hami_core_10_a_seeded_region_wins_over_the_environment(
    one: HamiContainer, variables: dict[str, str]
) -> None:
    seed = one.seed(5, cores=40)
    load = one.load(**variables)

    assert load.fits("4g")
    assert not load.fits("1g")
    assert load.value("nvml", "total") == 5 * GIB
    assert load.value("info", "total") == 5 * GIB
    assert load.value("total", "total") == 5 * GIB
    assert altered_limits(one.region, seed) == ()
    assert one.region.uuids[0] == ONE.uuid
    assert sums(one.region, 0, one.living).context == CONTEXT


def test_two_devices_have_their_own_limits_by_pci_address(
    driver: GpuDriver, library: Path, tmp_path: Path
) -> None:
    slow = gpu(1, sms=40)
    fast = gpu(2, sms=100)
    driver.create(slow, fast)
    container = HamiContainer(driver=driver, library=library, directory=tmp_path / "u1_main")
    container.seed(2, 6)
    load = container.load(CUDA_DEVICE_ORDER="PCI_BUS_ID")

    assert [load.value(f"nvml {n}", "total") for n in (0, 1)] == [2 * GIB, 6 * GIB]
    assert not load.fits("3g")
    assert load.do("device 1") == "ok"
    assert load.fits("3g")
    assert container.region.uuids[:2] == (slow.uuid, fast.uuid)
    assert total(container, 1) >= 3 * GIB


@pytest.mark.parametrize("how", ["alloc", "managed", "create", "async"])
def test_the_use_of_several_processes_is_what_the_driver_accounts(
    one: HamiContainer, how: str
) -> None:
    one.seed(8)
    loads = [one.load(), one.load()]

    for load in loads:
        assert load.fits("512m", how)

    assert total(one) == 2 * (512 * MIB + CONTEXT)
    assert total(one) == one.driver.used(ONE)


def test_a_forked_child_counts(one: HamiContainer) -> None:
    one.seed(4)
    load = one.load()

    child = int(load.do("fork alloc 1g").split()[1].rstrip(":"))

    assert {slot.pid for slot in one.region.slots} == {load.pid, child}
    assert sums(one.region, 0, {load.pid, child}).buffer == GIB


def test_hami_core_12_a_raised_limit_applies_to_the_next_allocation(one: HamiContainer) -> None:
    one.seed(5)
    load = one.load()
    assert load.fits("4g")
    assert not load.fits("3g")

    write_limits(one.path, RegionSeed(memory_bytes=(9 * GIB,), cores_percent=(0,)))

    assert load.fits("3g")
    assert load.value("nvml", "total") == 9 * GIB


def test_ended_and_killed_processes_use_nothing(one: HamiContainer) -> None:
    one.seed(4)
    ended = one.load()
    killed = one.load()
    assert ended.fits("1g")
    assert killed.fits("1g")

    ended.end()
    killed.kill()

    assert sums(one.region, 0, one.living).total == 0
    assert sums(one.region, 0).enforced > 0
    assert not one.region.processes(one.living)


def test_hami_core_7_a_process_whose_record_was_moved_is_measured(one: HamiContainer) -> None:
    one.seed(4)
    first, second, third = one.load(), one.load(), one.load()
    for load in (first, second, third):
        assert load.fits("512m")
    second.kill()
    assert not first.fits("3600m")  # it removes the record of the second, and moves the third's

    more = sum(third.fits("1g") for _ in range(4))

    assert total(one) == one.driver.used(ONE) == (2 * 512 + more * 1024) * MIB + 2 * CONTEXT
    assert bool(one.region.lost(one.living)) == (more == 4), "none is lost that has a limit"


def test_hami_core_28_a_restarted_container_starts_with_nothing(one: HamiContainer) -> None:
    one.seed(4)
    load = one.load()
    assert load.fits("3g")
    load.kill()

    one.seed(4)

    assert one.region.slots == ()
    assert one.load().fits("3g")


def test_the_lock_of_a_killed_process_is_freed(one: HamiContainer) -> None:
    one.seed(4)
    killed = one.load()
    killed.kill()
    layout = one.region.layout
    with (one.directory / "r.cache").open("r+b") as region:  # as if killed while it held the lock
        os.pwrite(region.fileno(), bytes(8), layout.semaphore)
        os.pwrite(region.fileno(), killed.pid.to_bytes(8, "little"), layout.owner)
    assert (one.region.locked, one.region.lock_owner) == (True, killed.pid)

    assert one.load().fits("1g")  # after 10 s

    assert not one.region.locked


async def test_utilization_is_measured_without_a_core_limit(one: HamiContainer) -> None:
    one.seed(4, cores=0)
    load = one.load()

    load.send("burn 4s")

    await until(lambda: sums(one.region, 0, one.living).sm_percent > 80)


def test_a_core_limit_slows_a_process(one: HamiContainer) -> None:
    one.seed(4, cores=25)
    load = one.load(GPU_CORE_UTILIZATION_POLICY="force")
    load.do("burn 2s")  # the first seconds have no limit

    busy = load.value("burn 4s", "busy")

    assert 5 < busy < 95, "limits of cores are loose"


def test_standard_error_has_errors_only(one: HamiContainer) -> None:
    one.seed(4)
    load = one.load(CUDA_DEVICE_MEMORY_LIMIT_0="4g")

    assert load.fits("1g")
    quiet = load.errors()
    write_limits(one.path, RegionSeed(memory_bytes=(3 * GIB,), cores_percent=(0,)))
    later = one.load(CUDA_DEVICE_MEMORY_LIMIT_0="4g")

    assert "Msg" not in quiet
    assert "Limit inconsistency" not in quiet
    assert "Limit inconsistency detected for 0th device" in later.errors()

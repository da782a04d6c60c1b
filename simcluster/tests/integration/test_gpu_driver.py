"""The simulated GPUs' driver: accounts, killed processes, kernels, visible devices."""

import subprocess
from pathlib import Path

import pytest

from shared.model.errors import UnavailableError
from simcluster.gpu_driver import build as gpu_driver_build
from tests.support.gpu_driver import CONTEXT, GIB, MIB, GpuDriver, gpu
from tests.support.waiting import until_blocking

ONE = gpu(1)


def test_processes_share_the_memory_of_a_gpu_and_a_killed_one_frees_its_own(
    driver: GpuDriver,
) -> None:
    driver.create(ONE)
    first, second = driver.load(), driver.load()

    assert first.fits("10g")
    assert not second.fits("6g")
    assert second.value("info", "free") == 6 * GIB - 2 * CONTEXT
    first.kill()

    assert second.fits("6g")
    assert second.value("nvml", "used") == 6 * GIB + CONTEXT


@pytest.mark.parametrize("how", ["alloc", "managed", "pitch", "async", "create"])
def test_each_kind_of_memory_is_accounted_and_freed(driver: GpuDriver, how: str) -> None:
    driver.create(ONE)
    load = driver.load()

    assert load.fits("512m", how)
    assert load.value("nvml", "used") == 512 * MIB + CONTEXT
    assert load.do("free 0") == "ok"

    assert load.value("nvml", "used") == CONTEXT


def test_a_forked_child_has_an_account_of_its_own(driver: GpuDriver) -> None:
    driver.create(ONE)
    load = driver.load()

    assert load.do("fork alloc 1g").endswith(": ok")
    assert load.value("nvml", "used") == GIB + 2 * CONTEXT
    load.end()

    other = driver.load()
    until_blocking(lambda: other.value("nvml", "used") == CONTEXT)  # the child dies soon after


def test_kernels_of_two_processes_take_turns(driver: GpuDriver) -> None:
    driver.create(ONE)
    loads = driver.load(), driver.load()

    def burn() -> bool:
        """Compute for a second; on a machine that is busy, it may not be the same second."""
        for load in loads:
            load.send("burn 1s")
        busy = [int(load.result().rpartition("busy=")[2].split()[0]) for load in loads]
        return min(busy) >= 15 and max(busy) <= 85 and 60 <= sum(busy) <= 110

    until_blocking(burn)


def test_devices_are_those_that_the_runtime_injects_and_cuda_orders_them(driver: GpuDriver) -> None:
    slow = gpu(1, sms=40)
    hidden = gpu(2)
    fast = gpu(3, sms=100, memory_mib=8192)
    driver.create(slow, hidden, fast)
    injected = {"NVIDIA_VISIBLE_DEVICES": f"{fast.uuid},{slow.uuid}"}

    by_speed = driver.load(**injected)
    by_address = driver.load(**injected, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    second = driver.load(**injected, CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="1")

    assert f"uuid={slow.uuid}" in by_speed.do("nvml 0")
    assert by_speed.value("total 0", "total") == 8 * GIB
    assert by_address.value("total 0", "total") == 16 * GIB
    assert second.value("total 0", "total") == 8 * GIB
    assert second.do("total 1").startswith("error")


def test_commands_are_arguments_and_one_that_fails_is_the_exit_status(driver: GpuDriver) -> None:
    driver.create(ONE)

    done = subprocess.run(
        [driver.folder / "gpu-load", "alloc 8g", "alloc 9g", "free 0"],
        env=driver.environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.splitlines() == ["alloc 8g: ok", "alloc 9g: out of memory", "free 0: ok"]
    assert done.returncode == 1


def test_without_gpus_there_is_no_driver(driver: GpuDriver) -> None:
    done = subprocess.run(
        [driver.folder / "gpu-load"], env=driver.environment, capture_output=True, check=False
    )

    assert (done.returncode, done.stdout) == (3, b"CUDA error 100\n")


def test_a_machine_without_a_compiler_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    with pytest.raises(UnavailableError, match="install gcc or clang"):
        gpu_driver_build.build()


def test_the_driver_is_compiled_once(driver_folder: Path) -> None:
    before = (driver_folder / "libcuda.so.1").stat().st_mtime_ns

    assert gpu_driver_build.build() == driver_folder
    assert (driver_folder / "libcuda.so.1").stat().st_mtime_ns == before

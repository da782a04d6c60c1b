"""GPU processes through NVML, with a fake driver."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from services.node_agent.gpus.inventory import GpuProcess
from services.node_agent.gpus.nvml.processes import NvmlProcesses
from shared.model.errors import UnavailableError
from tests.support.node_agent.fake_nvml import GIB, failing, install


def on(pid: int, memory: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=memory)


def busy(pid: int, percent: int, ago_s: float) -> SimpleNamespace:
    stamp = int((time.time() - ago_s) * 1e6)
    return SimpleNamespace(pid=pid, smUtil=percent, timeStamp=stamp)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    install(monkeypatch)
    answers: dict[str, Any] = {
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetUUID": lambda _: b"GPU-a",
        "nvmlDeviceGetMinorNumber": lambda _: 3,
        "nvmlDeviceGetName": lambda _: "Tesla T4",
        "nvmlDeviceGetMemoryInfo": lambda *_: SimpleNamespace(used=2 * GIB, total=16 * GIB),
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=40, memory=12),
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [on(7, GIB), on(8, None)],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda _: [on(7, GIB), on(9, 5)],
        "nvmlDeviceGetProcessUtilization": lambda _, since: [
            busy(7, 20, 1), busy(7, 60, 2), busy(9, 50, 3600), busy(8, 4_000_000, 1),
        ],
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return monkeypatch


async def test_each_gpu_process_is_reported_once_with_its_memory_and_recent_use(
    driver: pytest.MonkeyPatch,
) -> None:
    (sample,) = await NvmlProcesses().sample()

    assert (sample.device, sample.index, sample.model) == ("GPU-a", 3, "Tesla T4")
    assert sample.memory_bytes == 16 * GIB
    assert (sample.used_bytes, sample.busy_percent, sample.memory_busy_percent) == (2 * GIB, 40, 12)
    assert sample.processes == (
        GpuProcess(pid=7, memory_bytes=GIB, busy_percent=40),
        GpuProcess(pid=8, memory_bytes=None, busy_percent=0),
        GpuProcess(pid=9, memory_bytes=5, busy_percent=0),
    )


async def test_values_that_the_driver_does_not_support_are_left_out(
    driver: pytest.MonkeyPatch,
) -> None:
    for name in ("UtilizationRates", "ProcessUtilization", "GraphicsRunningProcesses"):
        driver.setattr(pynvml, f"nvmlDeviceGet{name}", failing("NOT_SUPPORTED"))

    (sample,) = await NvmlProcesses().sample()

    assert sample.busy_percent is None
    assert [(one.pid, one.busy_percent) for one in sample.processes] == [(7, None), (8, None)]


async def test_processes_without_a_recent_sample_are_at_zero_percent(
    driver: pytest.MonkeyPatch,
) -> None:
    driver.setattr(pynvml, "nvmlDeviceGetProcessUtilization", failing("NOT_FOUND"))
    (sample,) = await NvmlProcesses().sample()

    assert {one.busy_percent for one in sample.processes} == {0}


async def test_a_process_in_mig_mode_has_the_id_of_its_instance(driver: pytest.MonkeyPatch) -> None:
    listed = [on(7, GIB), on(8, GIB)]
    listed[0].gpuInstanceId = 3
    listed[1].gpuInstanceId = 0xFFFFFFFF
    driver.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda _: listed)
    driver.setattr(pynvml, "nvmlDeviceGetGraphicsRunningProcesses", lambda _: [])

    (sample,) = await NvmlProcesses().sample()

    assert [one.instance for one in sample.processes] == [3, None]


async def test_a_driver_that_hangs_at_every_device_is_reported(driver: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    driver.setattr(pynvml, "nvmlDeviceGetName", lambda _: released.wait(60))

    with pytest.raises(UnavailableError, match="did not respond"):
        await NvmlProcesses(timeout_s=0.1).sample()
    released.set()

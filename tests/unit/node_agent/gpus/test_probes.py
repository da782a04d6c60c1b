"""Probes of GPUs that hang, fail, change their index, or never respond."""

import asyncio
import threading

import pytest

from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.probes import GpuProber
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid


def gpu(uuid: DeviceUuid, index: int = 0) -> Gpu:
    return Gpu(uuid=uuid, index=index, model="Tesla T4", memory_mib=15360)


async def test_a_hanging_gpu_does_not_delay_others_and_is_not_probed_twice() -> None:
    asked: list[int] = []
    hang, hangs = threading.Event(), False

    def ask(number: int) -> Gpu:
        asked.append(number)
        if number == 0 and hangs:
            hang.wait(30)
        return gpu(DeviceUuid(f"GPU-{number}"), index=number)

    looking = GpuProber(lambda: 2, ask, limit_s=lambda: 0.2)
    await looking.probe()
    hangs = True
    stuck = [await looking.probe() for _ in range(2)]
    hang.set()
    hangs = False
    freed = await looking.probe()
    async with asyncio.timeout(20):
        while any(one.fault for one in freed):
            freed = await looking.probe()

    faults = [[one.fault and one.fault.code for one in found] for found in stuck]
    assert faults == [["NoResponse", None]] * 2
    assert asked.count(0) <= asked.count(1) - 1
    assert len(freed) == 2


async def test_a_gpu_that_was_late_once_is_not_waited_for_again() -> None:
    hang = threading.Event()

    def ask(number: int) -> Gpu:
        if number == 0:
            hang.wait(60)
        return gpu(DeviceUuid(f"GPU-{number}"), index=number)

    looking = GpuProber(lambda: 2, ask, limit_s=lambda: 1.0)
    await looking.probe()
    began = asyncio.get_running_loop().time()
    for _ in range(10):
        assert [one.uuid for one in await looking.probe()] == ["GPU-1"]
    took_s = asyncio.get_running_loop().time() - began
    hang.set()

    assert took_s < 6


async def test_a_gpu_that_never_responded_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def ask(number: int) -> Gpu:
        if number == 1 and not healed:
            raise UnavailableError("NVML: Unknown Error")
        return gpu(DeviceUuid(f"GPU-{number}"), index=number)

    healed = False
    looking = GpuProber(lambda: 2, ask, limit_s=lambda: 30.0)
    for _ in range(3):
        assert [one.uuid for one in await looking.probe()] == ["GPU-0"]

    assert looking.unreadable == {1: "NVML: Unknown Error"}
    assert [one.getMessage() for one in caplog.records] == [
        "the GPU with driver index 1 is not served, as it has never responded: NVML: Unknown Error"
    ]
    healed = True
    assert len(await looking.probe()) == 2
    assert not looking.unreadable


async def test_a_call_that_crashes_raises_and_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: printed.set())

    def ask(number: int) -> Gpu:
        if not asked:
            asked.append(number)
            raise AssertionError("a bug of ours")
        return gpu(DeviceUuid("GPU-a"))

    asked: list[int] = []
    looking = GpuProber(lambda: 1, ask, limit_s=lambda: 30.0)

    with pytest.raises(UnavailableError, match="failed unexpectedly"):
        await looking.probe()
    assert len(await looking.probe()) == 1
    assert await asyncio.to_thread(printed.wait, 20)


async def test_a_gpu_that_takes_anothers_number_is_not_taken_for_it() -> None:
    order = ["a", "b"]

    def ask(number: int) -> Gpu:
        if number >= len(order):
            raise UnavailableError("NVML: GPU is lost")
        return gpu(DeviceUuid(f"GPU-{order[number]}"), index=number)

    looking = GpuProber(lambda: 2, ask, limit_s=lambda: 1.0)
    await looking.probe()
    order = ["b"]
    found = await looking.probe()

    assert [(one.uuid, one.fault) for one in found] == [("GPU-b", None)]

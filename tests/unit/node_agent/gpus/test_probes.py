"""Probes of GPUs that hang, fail, change their index, or never respond."""

import asyncio
import threading
from dataclasses import replace

import pytest

from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.probes import GpuProber
from services.node_agent.gpus.worker_threads import SingleFlight, start_in_thread
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid


def gpu(uuid: DeviceUuid, index: int = 0) -> Gpu:
    return Gpu(uuid=uuid, index=index, model="Tesla T4", memory_mib=15360)


async def test_a_hanging_gpu_does_not_delay_others_and_is_not_probed_twice() -> None:
    calls: list[int] = []
    hang = threading.Event()
    hangs = False

    def read_gpu(number: int) -> Gpu:
        calls.append(number)
        if number == 0 and hangs:
            hang.wait(30)
        return gpu(DeviceUuid(f"GPU-{number}"), index=number)

    prober = GpuProber(lambda: 2, read_gpu, limit_s=lambda: 1.0)
    await prober.probe()
    hangs = True
    hanging_probes = [await prober.probe() for _ in range(2)]
    hang.set()
    hangs = False
    found_later = await prober.probe()
    async with asyncio.timeout(20):
        while any(one.fault for one in found_later):
            found_later = await prober.probe()

    faults = [[one.fault and one.fault.code for one in found] for found in hanging_probes]
    assert faults == [["NoResponse", None]] * 2
    assert calls.count(0) <= calls.count(1) - 1
    assert len(found_later) == 2


async def test_a_gpu_that_timed_out_once_does_not_delay_later_probes() -> None:
    hang = threading.Event()

    def read_gpu(number: int) -> Gpu:
        if number == 0:
            hang.wait(60)
        return gpu(DeviceUuid(f"GPU-{number}"), index=number)

    prober = GpuProber(lambda: 2, read_gpu, limit_s=lambda: 1.0)
    await prober.probe()
    began = asyncio.get_running_loop().time()
    for _ in range(10):
        assert [one.uuid for one in await prober.probe()] == ["GPU-1"]
    took_s = asyncio.get_running_loop().time() - began
    hang.set()

    assert took_s < 6


async def test_a_gpu_that_never_responded_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def read_gpu(number: int) -> Gpu:
        if number == 1 and not healed:
            raise UnavailableError("NVML: Unknown Error")
        return gpu(DeviceUuid(f"GPU-{number}"), index=number)

    healed = False
    prober = GpuProber(lambda: 2, read_gpu, limit_s=lambda: 30.0)
    for _ in range(3):
        assert [one.uuid for one in await prober.probe()] == ["GPU-0"]

    assert prober.unreadable == {1: "NVML: Unknown Error"}
    assert [one.getMessage() for one in caplog.records] == [
        "the GPU with driver index 1 is not served, as it has never responded: NVML: Unknown Error"
    ]
    healed = True
    assert len(await prober.probe()) == 2
    assert not prober.unreadable


async def test_a_gpu_with_a_reused_index_is_not_mistaken_for_another() -> None:
    order = ["a", "b"]

    def read_gpu(number: int) -> Gpu:
        if number >= len(order):
            raise UnavailableError("NVML: GPU is lost")
        return gpu(DeviceUuid(f"GPU-{order[number]}"), index=number)

    prober = GpuProber(lambda: 2, read_gpu, limit_s=lambda: 1.0)
    await prober.probe()
    order = ["b"]
    found = await prober.probe()

    assert [(one.uuid, one.fault) for one in found] == [("GPU-b", None)]


async def test_gpus_that_cannot_be_read_are_named_whether_or_not_they_are_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost: set[int] = {2}

    def read_gpu(number: int) -> Gpu:
        if number in lost:
            raise UnavailableError("NVML: Unknown Error")
        return gpu(DeviceUuid(f"GPU-{number}"), index=number)

    prober = GpuProber(lambda: 3, read_gpu, limit_s=lambda: 30.0)
    await prober.probe()
    lost.add(0)
    found = await prober.probe()

    assert [one.uuid for one in found] == ["GPU-0", "GPU-1"]
    assert sorted(prober.unreadable) == [0, 2]
    assert [one.getMessage() for one in caplog.records] == [
        "the GPU with driver index 2 is not served, as it has never responded: NVML: Unknown Error"
    ]


async def test_of_two_gpus_with_the_same_index_the_first_is_served() -> None:
    prober = GpuProber(
        lambda: 2, lambda number: gpu(DeviceUuid(f"GPU-{number}"), index=5), limit_s=lambda: 5.0
    )

    found = await prober.probe()

    assert [one.fault and one.fault.code for one in found] == [None, "SameIndex"]


async def test_a_gpu_whose_memory_becomes_impossible_keeps_what_is_known_of_it() -> None:
    sizes = iter((15360, -1))
    prober = GpuProber(
        lambda: 1,
        lambda _: replace(gpu(DeviceUuid("GPU-0")), memory_mib=next(sizes)),
        limit_s=lambda: 5.0,
    )
    await prober.probe()

    [found] = await prober.probe()

    assert found.memory_mib == 15360
    assert found.fault is not None
    assert "reports -1 MiB of memory" in found.fault.text


# Calls that start together: one thread, unless one of them takes long


async def test_calls_that_start_together_share_a_thread() -> None:
    threads = await asyncio.gather(*(start_in_thread(threading.get_ident) for _ in range(5)))

    assert len(set(threads)) == 1


async def test_a_call_that_hangs_delays_neither_those_before_nor_those_after_it() -> None:
    hang = threading.Event()
    before, hanging, after = map(start_in_thread, (lambda: 1, lambda: hang.wait(60), lambda: 2))
    async with asyncio.timeout(20):
        returned = [await before, await after]
    is_hanging = not hanging.done()
    hang.set()

    assert (returned, is_hanging, await hanging) == ([1, 2], True, True)


async def test_a_call_that_crashes_does_not_delay_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: printed.set())

    def crash() -> None:
        raise IndexError("a bug of ours")

    crashed = start_in_thread(crash)
    after = start_in_thread(lambda: 2)
    async with asyncio.timeout(20):
        assert await after == 2
    assert "failed unexpectedly" in str(crashed.result())
    assert await asyncio.to_thread(printed.wait, 20)


async def test_a_result_that_was_not_fetched_is_not_returned_by_a_later_call() -> None:
    calls = SingleFlight[int]()
    results = iter([1, 2])
    calls.start({"a": lambda: next(results)})
    await start_in_thread(lambda: None)
    calls.start({"a": lambda: next(results)})

    assert await calls.call_each({"a": lambda: 3}, lambda: 20.0) == {"a": 2}

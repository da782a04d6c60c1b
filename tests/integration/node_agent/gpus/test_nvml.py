"""The node agent's NVML side, with the real pynvml on the simulated GPUs' driver."""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from services.node_agent.gpus.device_faults import ROW_REMAP_FAILED, Xid
from services.node_agent.gpus.inventory import DeviceSample, SharingConfig, devices_of
from services.node_agent.gpus.nvml import processes, xid_listener
from services.node_agent.gpus.nvml.gpus import NvmlGpus
from services.node_agent.gpus.nvml.processes import NvmlProcesses
from services.node_agent.gpus.nvml.xid_listener import XidListener, event_set, wait_for_xid
from services.node_agent.mig.gpu_models import A100_40
from services.node_agent.mig.instances import is_laid_out
from services.node_agent.mig.layouts import KNOWN_GEOMETRIES, layouts_for
from services.node_agent.mig.partitioner import Partitioner
from shared.model.devices.device import Hardware
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid
from tests.support.gpu_driver import CONTEXT, GIB, MIB, DriverGpu, GpuDriver, gpu
from tests.support.kernel_gpus import list_gpu
from tests.support.waiting import until

FIRST, SECOND = gpu(1), gpu(2, memory_mib=81920, name="NVIDIA H100 80GB HBM3")
MIG = gpu(3, memory_mib=40960, mig=True, profiles=A100_40)


def uuid(one: DriverGpu) -> DeviceUuid:
    return DeviceUuid(one.uuid)


async def test_gpus_are_discovered(nvml: GpuDriver) -> None:
    nvml.create(FIRST, SECOND)
    nvml.set(SECOND, "ecc-errors", 3)

    found = await NvmlGpus().discover()

    assert [(one.uuid, one.index, one.memory_mib) for one in found] == [
        (FIRST.uuid, 0, 16384),
        (SECOND.uuid, 1, 81920),
    ]
    assert [(one.model, one.fault, one.mig) for one in found] == [
        ("NVIDIA A100-SXM4-80GB", None, None),
        ("NVIDIA H100 80GB HBM3", None, None),
    ]
    assert [(one.bus, one.driver, one.power_limit_w) for one in found] == [
        ("0000:01:00.0", "570.00", 400),
        ("0000:02:00.0", "570.00", 400),
    ]
    assert [one.ecc_errors for one in found] == [0, 3]
    assert found[0].links.keys() == {SECOND.uuid}


async def test_programs_cannot_get_what_the_driver_keeps(nvml: GpuDriver) -> None:
    nvml.create(replace(FIRST, reserved_mib=600), replace(MIG, reserved_mib=600))
    load = nvml.load()
    given = load.value("fill alloc 16384", "mib") * MIB + CONTEXT

    shared, mig = devices_of(await NvmlGpus().discover(), SharingConfig())
    samples = await NvmlProcesses().sample()

    assert (shared.memory_mib, mig.memory_mib) == (16384 - 640, 40960)
    assert given == (16384 - 600) * MIB
    assert samples[0].used_bytes == given


async def test_more_samples_of_processes_than_there_is_room_for_are_read(
    nvml: GpuDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ROOM", 1)
    nvml.create(FIRST)
    loads = [nvml.load(), nvml.load()]
    for load in loads:
        load.send("burn 60s")

    async def busy() -> list[int | None]:
        (sample,) = await NvmlProcesses().sample()
        return [one.busy_percent for one in sample.processes]

    await until(busy, lambda percents: len(percents) == 2 and all(percents))


async def test_a_lost_gpu_and_one_with_broken_memory_are_faulty_until_they_recover(
    nvml: GpuDriver,
) -> None:
    nvml.create(FIRST, SECOND)
    gpus = NvmlGpus()
    await gpus.discover()

    nvml.set(FIRST, "lost")
    nvml.set(SECOND, "unhealthy")
    first, second = await gpus.discover()
    nvml.set(FIRST, "lost", 0)
    nvml.set(SECOND, "unhealthy", 0)
    recovered = await gpus.discover()

    assert first.fault is not None
    assert "GPU is lost" in str(first.fault)
    assert second.fault == ROW_REMAP_FAILED
    assert [one.fault for one in recovered] == [None, None]


async def test_processes_have_their_memory_and_utilization(nvml: GpuDriver) -> None:
    nvml.create(FIRST)
    idle, busy = nvml.load(), nvml.load()
    assert idle.fits("2g")
    assert busy.fits("1g")
    processes = NvmlProcesses()
    (before,) = await processes.sample()

    busy.send("burn 60s")

    def shown(sample: DeviceSample) -> dict[int, tuple[int | None, int | None]]:
        return {one.pid: (one.memory_bytes, one.busy_percent) for one in sample.processes}

    def is_busy(samples: Sequence[DeviceSample]) -> bool:
        (sample,) = samples
        percents = (sample.busy_percent, shown(sample)[busy.pid][1])
        return min(percent or 0 for percent in percents) > 50

    (sample,) = await until(processes.sample, is_busy)
    assert sample.used_bytes == 3 * GIB + 2 * CONTEXT
    assert shown(sample)[idle.pid] == (2 * GIB + CONTEXT, 0)
    assert before.hardware is not None
    assert before.hardware == Hardware(
        device=before.device,
        at=before.hardware.at,
        temperature_c=31,
        power_w=55,
        power_limit_w=400,
        sm_clock_mhz=210,
        memory_clock_mhz=1593,
        busy_percent=0,
    )
    assert sample.hardware is not None
    assert sample.hardware.sm_clock_mhz == 1410
    assert (sample.hardware.power_w or 0) > 200
    busy.kill()
    (sample,) = await processes.sample()
    assert shown(sample).keys() == {idle.pid}


async def test_xid_events_belong_to_their_gpu(nvml: GpuDriver) -> None:
    nvml.create(FIRST, SECOND)
    listener = XidListener()
    listener.listen([uuid(FIRST), uuid(SECOND)])
    found: list[Xid] = []

    async def received() -> set[Xid]:
        nvml.report_xid(FIRST, 79)
        nvml.report_xid(SECOND, 13)
        found.extend(listener.drain())
        return set(found)

    await until(received, lambda xids: len(xids) == 2)
    assert set(found) == {Xid(uuid(FIRST), 79), Xid(uuid(SECOND), 13)}


async def test_the_events_of_a_gpu_that_is_no_longer_listed_are_not_awaited(
    nvml: GpuDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.create(FIRST, SECOND)
    monkeypatch.setattr(xid_listener, "WAIT_MS", 20)
    listener = XidListener()
    before = set(threading.enumerate())
    listener.listen([uuid(FIRST), uuid(SECOND)])
    threads = set(threading.enumerate()) - before

    listener.listen([uuid(SECOND)])

    await until(lambda: sum(thread.is_alive() for thread in threads) == 1)
    listener.listen([])
    await until(lambda: not any(thread.is_alive() for thread in threads))


def test_xid_events_are_awaited_until_the_driver_fails(
    nvml: GpuDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.create(FIRST)
    answers: list[Any] = [
        SimpleNamespace(eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=79),
        SimpleNamespace(eventType=pynvml.nvmlEventTypePState, eventData=2),
        pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT),
        pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST),
    ]

    def wait(*_: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(pynvml, "nvmlEventSetWait_v2", wait)
    with event_set(uuid(FIRST)) as events:
        assert [wait_for_xid(events) for _ in range(3)] == [79, None, None]
        with pytest.raises(pynvml.NVMLError, match="lost"):
            wait_for_xid(events)


def test_a_gpu_without_xid_events_is_not_supported_and_its_event_set_is_freed(
    nvml: GpuDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.create(FIRST)
    freed: list[Any] = []
    monkeypatch.setattr(pynvml, "nvmlDeviceGetSupportedEventTypes", lambda _: 0)
    monkeypatch.setattr(pynvml, "nvmlEventSetFree", freed.append)

    with pytest.raises(pynvml.NVMLError, match="Not Supported"), event_set(uuid(FIRST)):
        pass
    assert len(freed) == 1


async def test_a_hanging_gpu_does_not_block_events_of_others(
    nvml: GpuDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.create(FIRST, SECOND)
    find = pynvml.nvmlDeviceGetHandleByUUID
    released = threading.Event()

    def hanging(name: str) -> Any:
        if name == FIRST.uuid:
            released.wait(60)
        return find(name)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", hanging)
    listener = XidListener()
    listener.listen([uuid(FIRST), uuid(SECOND)])

    async def received() -> tuple[Xid, ...]:
        nvml.report_xid(SECOND, 48)
        return listener.drain()

    assert set(await until(received)) == {Xid(uuid(SECOND), 48)}
    released.set()


def test_a_flood_of_equal_events_does_not_drop_others() -> None:
    listener = XidListener()
    listener.add(Xid(uuid(SECOND), 79))
    for _ in range(100_000):
        listener.add(Xid(uuid(FIRST), 31))

    assert listener.drain() == (Xid(uuid(SECOND), 79), Xid(uuid(FIRST), 31))
    assert listener.drain() == ()


async def test_mig_instances_are_made_used_and_destroyed(nvml: GpuDriver) -> None:
    nvml.create(MIG)
    gpus = NvmlGpus()
    (found,) = await gpus.discover()
    assert found.mig is not None
    assert found.mig.profiles == A100_40
    two = next(one for one in A100_40 if one.name == "2g.10gb")

    gi = await gpus.create_instance(uuid(MIG), two.id, 2)
    (unusable,) = await gpus.instances(uuid(MIG))
    await gpus.create_compute(uuid(MIG), gi)
    (made,) = await gpus.instances(uuid(MIG))
    load = nvml.load(NVIDIA_VISIBLE_DEVICES=made.uuid)

    assert (unusable.compute_ids, unusable.uuid) == ((), "")
    assert (made.profile, made.start, made.compute_slices) == ("2g.10gb", 2, 2)
    assert load.value("info", "total") == 10240 * MIB
    assert load.fits("9g")
    assert not load.fits("2g")
    assert [one.busy for one in await gpus.instances(uuid(MIG))] == [True]
    with pytest.raises(UnavailableError, match="Insufficient Resources"):
        await gpus.create_instance(uuid(MIG), two.id, 2)
    with pytest.raises(UnavailableError, match=r"NVML: (Not Found|.*code 6)"):
        await gpus.create_instance(uuid(MIG), two.id, 3)
    with pytest.raises(UnavailableError, match="In use"):
        await gpus.destroy_compute(uuid(MIG), gi, made.compute_ids[0])
    load.end()
    await gpus.destroy_compute(uuid(MIG), gi, made.compute_ids[0])
    await gpus.destroy_instance(uuid(MIG), gi)
    assert await gpus.instances(uuid(MIG)) == ()


async def test_every_layout_is_made_and_listed_by_place(nvml: GpuDriver) -> None:
    nvml.create(MIG)
    gpus = NvmlGpus()
    layouts, _ = layouts_for(MIG.name, A100_40, KNOWN_GEOMETRIES)

    for layout in (*layouts, *layouts):
        made = await Partitioner(gpus).partition(uuid(MIG), layout, A100_40, frozenset())

        assert is_laid_out(layout, made)
        assert len({one.uuid for one in made}) == len(made)


async def test_drivers_that_do_not_name_profiles_are_understood(
    nvml: GpuDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.create(MIG)
    read = pynvml.nvmlDeviceGetGpuInstanceProfileInfo

    def unnamed(handle: Any, number: int, version: int = 2) -> Any:
        if version == 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return read(handle, number, version)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetGpuInstanceProfileInfo", unnamed)
    (found,) = await NvmlGpus().discover()

    assert found.mig is not None
    assert {one.id: one.name for one in found.mig.profiles} == {
        one.id: one.name.partition("+")[0] for one in A100_40
    }


async def test_a_gpu_that_only_the_kernel_driver_lists_is_unread(
    nvml: GpuDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml.create(FIRST, SECOND)
    list_gpu(tmp_path, "0000:01:00.0", FIRST.uuid)
    list_gpu(tmp_path, "0000:02:00.0", SECOND.uuid, minor=1)
    by_index = pynvml.nvmlDeviceGetHandleByIndex
    hangs = True

    def handle(number: int) -> Any:
        if number == 1 and hangs:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return by_index(number)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    gpus = NvmlGpus(proc=tmp_path)
    lost = await gpus.discover()
    (unread,) = gpus.unread
    hangs = False
    found = await gpus.discover()

    assert [gpu.uuid for gpu in lost] == [FIRST.uuid]
    assert (unread.uuid, unread.bus, unread.index) == (SECOND.uuid, "0000:02:00.0", 1)
    assert len(found) == 2
    assert gpus.unread == ()


async def test_a_hanging_call_times_out_and_no_second_call_starts_beside_it(
    nvml: GpuDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.create(MIG)
    create = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement
    came_back = threading.Event()

    def hanging(*arguments: Any) -> Any:
        came_back.wait(30)
        return create(*arguments)

    monkeypatch.setattr(pynvml, "nvmlDeviceCreateGpuInstanceWithPlacement", hanging)
    gpus = NvmlGpus(timeout_s=0.1)
    with pytest.raises(UnavailableError, match=r"did not respond within 0\.1 s"):
        await gpus.create_instance(uuid(MIG), A100_40[0].id, A100_40[0].starts[0])
    gpus.timeout_s = 10.0
    began = asyncio.get_running_loop().time()
    with pytest.raises(UnavailableError, match="did not respond"):
        await gpus.instances(uuid(MIG))
    assert asyncio.get_running_loop().time() - began < 5, "the hanging call is not awaited again"
    came_back.set()

    async def listed() -> int:
        with contextlib.suppress(UnavailableError):
            return len(await gpus.instances(uuid(MIG)))
        return 0

    assert await until(listed) == 1, "called once the first call has returned"

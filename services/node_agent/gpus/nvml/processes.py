"""Processes on GPUs and how busy these are, as NVML reports them."""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pynvml

from services.node_agent.gpus.inventory import DeviceSample, GpuProcess
from services.node_agent.gpus.nvml.calls import (
    TIMEOUT_S,
    count_gpus,
    index_of,
    memory_of,
    model_of,
    text_of,
    value_or,
    with_nvml,
)
from services.node_agent.gpus.probes import GpuReader
from shared.model.devices.device import TEMPERATURE, Hardware
from shared.model.errors import LeaseholdError
from shared.model.names import DeviceUuid

UTILIZATION_WINDOW_S = 5.0
"""The driver's samples of a process are averaged over this time."""
NO_INSTANCE = 0xFFFFFFFF
MOST_READING = 1e6
ROOM = 1024
"""As in HAMi-core."""
THROTTLE = {
    0x2: "application clocks",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: TEMPERATURE,
    0x40: f"{TEMPERATURE} (hardware)",
    0x80: "power brake",
    0x100: "display clock",
}


class NvmlProcesses:
    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._reader = GpuReader(count_gpus, _sample, limit_s=lambda: timeout_s)

    async def sample(self) -> tuple[DeviceSample, ...]:
        results = (await self._reader.read_all()).values()
        errors = [result for result in results if isinstance(result, LeaseholdError)]
        if errors and len(errors) == len(results):
            raise errors[0]
        return tuple(result for result in results if isinstance(result, DeviceSample))


def _sample(number: int) -> DeviceSample | None:
    return with_nvml(lambda: value_or(lambda: _read_sample(number), None))


def _read_sample(number: int) -> DeviceSample:
    sampled_at_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    rates: Any = value_or(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle), None)
    listed = _listed(handle)
    busy_percents = _busy_percents(handle) if listed else {}
    instances = _instances(listed)
    memory = _memory_bytes(listed)
    uuid = DeviceUuid(text_of(pynvml.nvmlDeviceGetUUID(handle)))
    info: Any = value_or(lambda: memory_of(handle), None)
    of_processes = sum(used or 0 for used in memory.values())  # of unified memory
    return DeviceSample(
        device=uuid,
        index=index_of(handle, number),
        model=model_of(handle),
        used_bytes=int(info.used) if info else of_processes,
        memory_bytes=int(info.total) if info else None,
        busy_percent=None if rates is None else int(rates.gpu),
        memory_busy_percent=None if rates is None else int(rates.memory),
        processes=tuple(
            GpuProcess(
                pid=pid,
                memory_bytes=memory,
                busy_percent=None if busy_percents is None else busy_percents.get(pid, 0),
                instance=instances.get(pid),
            )
            for pid, memory in sorted(memory.items())
        ),
        hardware=_hardware(handle, uuid, None if rates is None else int(rates.gpu)),
        sampled_at_s=sampled_at_s,
    )


def _hardware(handle: Any, uuid: DeviceUuid, busy_percent: int | None) -> Hardware:
    def read(function: Callable[..., Any], *of: int, scale: float = 1.0) -> float | None:
        value = value_or(lambda: float(function(handle, *of)) * scale, None)
        return None if value is None else min(max(value, 0.0), MOST_READING)

    reasons = int(read(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0)
    return Hardware(
        device=uuid,
        at=time.time(),
        temperature_c=read(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        power_w=read(pynvml.nvmlDeviceGetPowerUsage, scale=0.001),
        power_limit_w=read(pynvml.nvmlDeviceGetEnforcedPowerLimit, scale=0.001),
        sm_clock_mhz=read(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        memory_clock_mhz=read(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
        busy_percent=busy_percent,
        throttle=tuple(name for bit, name in THROTTLE.items() if reasons & bit),
    )


def _listed(handle: Any) -> list[Any]:
    """A process that uses compute and graphics is listed twice."""
    return [
        *value_or(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle), []),
        *value_or(lambda: pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle), []),
    ]


def _memory_bytes(listed: list[Any]) -> dict[int, int | None]:
    memory: dict[int, int | None] = {}
    for process in listed:
        counted = memory.get(process.pid)
        used = None if process.usedGpuMemory is None else int(process.usedGpuMemory)
        memory[int(process.pid)] = used if counted is None else max(counted, used or 0)
    return memory


def _instances(listed: list[Any]) -> dict[int, int]:
    ids = ((int(process.pid), getattr(process, "gpuInstanceId", None)) for process in listed)
    return {pid: int(number) for pid, number in ids if number not in (None, NO_INSTANCE)}


def utilization_samples(handle: Any, since_us: int) -> list[Any]:
    """Do as pynvml's function, with one call of the driver instead of two."""
    samples = (pynvml.c_nvmlProcessUtilizationSample_t * ROOM)()
    count = ctypes.c_uint(ROOM)
    since = ctypes.c_ulonglong(since_us)
    code = pynvml.nvmlLib.nvmlDeviceGetProcessUtilization(
        handle, samples, ctypes.byref(count), since
    )
    if code == pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
        many: list[Any] = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
        return many
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
    return list(samples[: count.value])


def _busy_percents(handle: Any) -> dict[int, int] | None:
    since_us = int((time.time() - UTILIZATION_WINDOW_S) * 1_000_000)
    try:
        samples = utilization_samples(handle, since_us)
    except pynvml.NVMLError_NotFound:
        return {}
    except (pynvml.NVMLError, AttributeError):
        return None
    percents: dict[int, list[int]] = {}
    for sample in samples:
        if sample.timeStamp >= since_us and sample.smUtil <= 100:
            percents.setdefault(int(sample.pid), []).append(int(sample.smUtil))
    return {pid: round(sum(values) / len(values)) for pid, values in percents.items()}

"""What the NVIDIA driver says of processes on its GPUs; each is asked in a thread of its own."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from services.node_agent.gpus.worker_threads import SingleFlight
from services.node_agent.usage.snapshot import DeviceSample, GpuProcess
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid

TIMEOUT_S = 20.0
_SILENT = f"the NVIDIA driver did not name processes within {TIMEOUT_S:g} s"
UTILIZATION_WINDOW_S = 5.0
"""A process is as busy as the driver's samples of this time are on average."""

T = TypeVar("T")


class NvmlProcesses:
    """The processes of this machine's GPUs; of each GPU one question at a time."""

    def __init__(self) -> None:
        self._counting: SingleFlight[int] = SingleFlight(pynvml.NVMLError)
        self._looking: SingleFlight[DeviceSample | None] = SingleFlight(pynvml.NVMLError)

    async def sample(self) -> tuple[DeviceSample, ...]:
        """Return all devices that answer. Raises UnavailableError if the driver does not."""
        try:
            count = await self._counting.call("count", _count, _limit_s)
        except TimeoutError as error:
            raise UnavailableError(_SILENT) from error
        except pynvml.NVMLError as error:
            raise UnavailableError(f"NVML: {error}") from error
        seen = await asyncio.gather(*(self._one(number) for number in range(count)))
        if seen and all(isinstance(one, TimeoutError) for one in seen):
            raise UnavailableError(_SILENT)
        return tuple(one for one in seen if isinstance(one, DeviceSample))

    async def _one(self, number: int) -> DeviceSample | TimeoutError | None:
        """Return what one GPU says; None: it has nothing to say."""
        try:
            return await self._looking.call(number, lambda: _look(number), _limit_s)
        except TimeoutError as error:
            return error
        except pynvml.NVMLError:
            return None


def _limit_s() -> float:
    return TIMEOUT_S


def _count() -> int:
    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def _look(number: int) -> DeviceSample | None:
    pynvml.nvmlInit()
    try:
        return _asked(lambda: _sample(number), None)
    finally:
        pynvml.nvmlShutdown()


def _sample(number: int) -> DeviceSample:
    asked_at_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    rates: Any = _asked(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle), None)
    busy = _busy(handle)
    return DeviceSample(
        device=DeviceUuid(_text(pynvml.nvmlDeviceGetUUID(handle))),
        index=_asked(lambda: int(pynvml.nvmlDeviceGetMinorNumber(handle)), number),
        model=_text(pynvml.nvmlDeviceGetName(handle)),
        used_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
        busy_percent=None if rates is None else int(rates.gpu),
        memory_busy_percent=None if rates is None else int(rates.memory),
        processes=tuple(
            GpuProcess(pid=pid, memory_bytes=memory, busy_percent=busy.get(pid, 0))
            for pid, memory in sorted(_memory(handle).items())
        ),
        sampled_at_s=asked_at_s,
    )


def _memory(handle: Any) -> dict[int, int | None]:
    """Return what each process holds; one that computes and draws is named twice, with one sum."""
    named: list[Any] = [
        *_asked(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle), []),
        *_asked(lambda: pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle), []),
    ]
    held: dict[int, int | None] = {}
    for one in named:
        known = held.get(one.pid)
        used = None if one.usedGpuMemory is None else int(one.usedGpuMemory)
        held[int(one.pid)] = used if known is None else max(known, used or 0)
    return held


def _busy(handle: Any) -> dict[int, int]:
    since_us = int((time.time() - UTILIZATION_WINDOW_S) * 1_000_000)
    samples: list[Any] = _asked(
        lambda: pynvml.nvmlDeviceGetProcessUtilization(handle, since_us), []
    )
    seen: dict[int, list[int]] = {}
    for sample in samples:
        if sample.timeStamp >= since_us and sample.smUtil <= 100:
            seen.setdefault(int(sample.pid), []).append(int(sample.smUtil))
    return {pid: round(sum(found) / len(found)) for pid, found in seen.items()}


def _asked(question: Callable[[], T], otherwise: T) -> T:
    """Return the answer, or `otherwise` where this device or driver has none."""
    try:
        return question()
    except (pynvml.NVMLError, AttributeError):
        return otherwise


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name

"""NVML, the NVIDIA driver's own account of its GPUs. The only door to `pynvml`.

NVML blocks, and a sick driver blocks for ever: a question runs in a thread of its own, under a time
limit, and no second one is put before the first has come back.
"""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from services.node_agent import nvml_mig
from services.node_agent.inventory import Gpu
from services.node_agent.mig import MigInstance
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid

TIMEOUT_S = 20.0
MIB = 1024 * 1024

T = TypeVar("T")


class NvmlGpus:
    """The GPUs of this machine."""

    def __init__(self) -> None:
        self._asked: asyncio.Future[tuple[Gpu, ...]] | None = None
        self._last: dict[DeviceUuid, asyncio.Future[Any]] = {}

    async def discover(self) -> tuple[Gpu, ...]:
        """Return all GPUs with their health.

        Raises UnavailableError, saying what to do, while there is no driver or it does not answer.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if self._asked is None or self._asked.done():
                    self._asked = in_own_thread(_discover)
                return await asyncio.shield(self._asked)
        except TimeoutError as error:
            raise UnavailableError(
                f"the NVIDIA driver did not answer within {TIMEOUT_S:g} s: look at `nvidia-smi` "
                "and at the kernel log for Xid messages"
            ) from error
        except pynvml.NVMLError as error:
            raise UnavailableError(
                f"NVML: {error}. Install the NVIDIA driver on this node and mount its libraries "
                "here, or give --gpus a layout such as 8xA100-80GB to simulate GPUs"
            ) from error

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        """Return the instances of a device in MIG mode."""
        return await self._ask(device, lambda: nvml_mig.instances(device))

    async def create_instance(self, device: DeviceUuid, profile: int, start: int) -> int:
        """Make an instance at a place; return its id."""
        return await self._ask(device, lambda: nvml_mig.create_instance(device, profile, start))

    async def create_compute(self, device: DeviceUuid, gi: int) -> None:
        """Make the compute instance that takes all of an instance."""
        await self._ask(device, lambda: nvml_mig.create_compute(device, gi))

    async def destroy_compute(self, device: DeviceUuid, gi: int, compute: int) -> None:
        """Remove a compute instance."""
        await self._ask(device, lambda: nvml_mig.destroy_compute(device, gi, compute))

    async def destroy_instance(self, device: DeviceUuid, gi: int) -> None:
        """Remove an instance without compute instances."""
        await self._ask(device, lambda: nvml_mig.destroy_instance(device, gi))

    async def _ask(self, device: DeviceUuid, question: Callable[[], T]) -> T:
        """Put a question about one device, after the last one has come back.

        Raises UnavailableError in NVML's words, or if it takes longer than `TIMEOUT_S`.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                last = self._last.get(device)
                if last is not None and not last.done():
                    await asyncio.wait([last])
                asked = in_own_thread(lambda: _initialised(question))
                self._last[device] = asked
                return await asyncio.shield(asked)
        except TimeoutError as error:
            raise UnavailableError(
                f"the NVIDIA driver did not answer within {TIMEOUT_S:g} s"
            ) from error
        except pynvml.NVMLError as error:
            raise UnavailableError(f"NVML: {error}") from error


def _initialised(question: Callable[[], T]) -> T:
    pynvml.nvmlInit()
    try:
        return question()
    finally:
        pynvml.nvmlShutdown()


def in_own_thread(question: Callable[[], T]) -> asyncio.Future[T]:
    """Begin in a thread that keeps neither the other threads busy nor the process alive."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def ask() -> None:
        try:
            found = question()
        except pynvml.NVMLError as error:
            settle = functools.partial(_settle_wrong, answer, error)
        else:
            settle = functools.partial(_settle, answer, found)
        with contextlib.suppress(RuntimeError):  # the loop ended in the meantime
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=ask, name="nvml", daemon=True).start()
    return answer


def _settle(answer: asyncio.Future[T], found: T) -> None:
    if not answer.done():
        answer.set_result(found)


def _settle_wrong(answer: asyncio.Future[T], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _discover() -> tuple[Gpu, ...]:
    """Ask for each GPU; one that is lost is left out as long as another answers."""
    pynvml.nvmlInit()
    found: list[Gpu] = []
    lost: list[pynvml.NVMLError] = []
    try:
        for number in range(pynvml.nvmlDeviceGetCount()):
            try:
                found.append(_gpu(number))
            except pynvml.NVMLError as error:
                lost.append(error)
    finally:
        pynvml.nvmlShutdown()
    if lost and not found:
        raise lost[0]
    return tuple(found)


def _gpu(number: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    numa = _asked(lambda: pynvml.nvmlDeviceGetNumaNodeId(handle), None)
    mig = nvml_mig.state_of(handle)
    return Gpu(
        uuid=DeviceUuid(_text(pynvml.nvmlDeviceGetUUID(handle))),
        index=_asked(lambda: int(pynvml.nvmlDeviceGetMinorNumber(handle)), number),
        model=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_mib=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // MIB,
        healthy=_is_healthy(handle),
        numa=numa,
        driver=_asked(lambda: _text(pynvml.nvmlSystemGetDriverVersion()), ""),
        mig=mig,
        instances=_asked(lambda: nvml_mig.instances_of(handle, mig.profiles), ())
        if mig is not None and mig.enabled
        else (),
    )


def _is_healthy(handle: Any) -> bool:
    """Return whether the GPU answers and needs no reset: what a lost or broken one does not."""
    pending = _asked(lambda: pynvml.nvmlDeviceGetRemappedRows(handle), None)
    if pending is not None and pending[3]:
        return False
    try:
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except pynvml.NVMLError as error:
        return bool(error.value == pynvml.NVML_ERROR_NOT_SUPPORTED)
    return True


def _asked(question: Callable[[], T], otherwise: T) -> T:
    """Return the answer, or `otherwise` where this model or driver does not know it."""
    try:
        return question()
    except (pynvml.NVMLError, AttributeError):
        return otherwise


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name

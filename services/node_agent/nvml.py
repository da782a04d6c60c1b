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

from services.node_agent.inventory import Gpu
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid

TIMEOUT_S = 20.0
MIB = 1024 * 1024

T = TypeVar("T")


class NvmlGpus:
    """The GPUs of this machine."""

    def __init__(self) -> None:
        self._asked: asyncio.Future[tuple[Gpu, ...]] | None = None

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
    return Gpu(
        uuid=DeviceUuid(_text(pynvml.nvmlDeviceGetUUID(handle))),
        index=_asked(lambda: int(pynvml.nvmlDeviceGetMinorNumber(handle)), number),
        model=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_mib=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // MIB,
        healthy=_is_healthy(handle),
        numa=numa,
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

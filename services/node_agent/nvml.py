"""NVML, the NVIDIA driver's own account of its GPUs. The only door to `pynvml`.

NVML blocks, and a sick driver blocks for long: every question runs in a thread, under a time limit.
"""

import asyncio
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

    async def discover(self) -> tuple[Gpu, ...]:
        """Return all GPUs with their health.

        Raises UnavailableError, saying what to do, while there is no driver or it does not answer.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await asyncio.to_thread(_discover)
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

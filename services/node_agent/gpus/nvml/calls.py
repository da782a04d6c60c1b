"""Calls of NVML: initialised for each call, with defaults for what a driver does not report.

A faulty driver blocks forever, so call these in worker threads.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from shared.model.bounds import HIGHEST_INDEX, LONGEST_MODEL
from shared.model.errors import UnavailableError

T = TypeVar("T")
D = TypeVar("D")

TIMEOUT_S = 20.0
"""A call of the driver that takes longer hangs: the device counts as sick, and its calls wait."""


NOT_AVAILABLE = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    }
)
"""A working driver does not report a value. Any other error is a fault of the GPU."""
ODD = (ValueError, LookupError)
"""The library cannot represent a value, such as text that is not UTF-8."""
UNNAMED = "NVIDIA GPU"


def with_nvml(function: Callable[[], T]) -> T:
    """Raises UnavailableError with NVML's message, also for what the library cannot represent."""
    try:
        pynvml.nvmlInit()
        try:
            return function()
        finally:
            with contextlib.suppress(pynvml.NVMLError):  # what was called is done
                pynvml.nvmlShutdown()
    except (pynvml.NVMLError, *ODD) as error:
        raise UnavailableError(f"NVML: {error}") from error


def count_gpus() -> int:
    """Raises UnavailableError, with a remedy, without a driver."""
    try:
        return int(with_nvml(pynvml.nvmlDeviceGetCount))
    except UnavailableError as error:
        raise UnavailableError(
            f"{error}. Install the NVIDIA driver on this node and mount its libraries here"
        ) from error


def value_or(function: Callable[[], T], default: D) -> T | D:
    try:
        return function()
    except (pynvml.NVMLError, AttributeError, *ODD):
        return default


def if_available(function: Callable[[], T], default: D) -> T | D:
    try:
        return function()
    except (AttributeError, *ODD):
        return default
    except pynvml.NVMLError as error:
        if error.value in NOT_AVAILABLE:
            return default
        raise


def memory_of(handle: Any) -> Any:
    """Before 510, drivers do not report `reserved`, which is a part of `used`."""
    latest = value_or(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2), None)
    return latest or pynvml.nvmlDeviceGetMemoryInfo(handle)


def model_of(handle: Any) -> str:
    name = value_or(lambda: text_of(pynvml.nvmlDeviceGetName(handle)), "")
    return name[:LONGEST_MODEL] or UNNAMED


def index_of(handle: Any, number: int) -> int:
    minor = value_or(lambda: int(pynvml.nvmlDeviceGetMinorNumber(handle)), number)
    return minor if 0 <= minor <= HIGHEST_INDEX else number


def text_of(name: str | bytes) -> str:
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return "".join(filter(str.isprintable, text))

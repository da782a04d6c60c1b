"""Calls of NVML: initialised for each call, with defaults for what a driver does not report.

NVML blocks, and a faulty driver blocks forever. So every function of this folder that blocks runs
in a worker thread with a time limit.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

T = TypeVar("T")
D = TypeVar("D")

TIMEOUT_S = 20.0


NOT_AVAILABLE = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    }
)
"""Errors of a working driver that does not report a value: of this model, to us, or at all.

Any other error is a fault of the GPU, unless the value can be done without."""
UNNAMED = "NVIDIA GPU"
"""Model of a GPU whose name the driver does not report."""


def with_nvml(function: Callable[[], T]) -> T:
    """Call a function between `nvmlInit` and `nvmlShutdown`."""
    pynvml.nvmlInit()
    try:
        return function()
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # what was called is done
            pynvml.nvmlShutdown()


def value_or(function: Callable[[], T], default: D) -> T | D:
    """Return the function's value, or `default` if this model or driver does not support it."""
    try:
        return function()
    except (pynvml.NVMLError, AttributeError):
        return default


def if_available(function: Callable[[], T], default: D) -> T | D:
    """Return the function's value, or `default` if a working driver does not report it."""
    try:
        return function()
    except AttributeError:
        return default
    except pynvml.NVMLError as error:
        if error.value in NOT_AVAILABLE:
            return default
        raise


def model_of(handle: Any) -> str:
    """Return the name of a GPU's model."""
    return value_or(lambda: text_of(pynvml.nvmlDeviceGetName(handle)), UNNAMED)


def text_of(name: str | bytes) -> str:
    """Return text that NVML gives as bytes or as text, depending on its version."""
    return name.decode() if isinstance(name, bytes) else name

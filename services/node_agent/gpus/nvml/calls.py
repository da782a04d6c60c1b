"""Calls of NVML: initialised for each call, with defaults for what a driver does not report.

NVML blocks, and a faulty driver blocks forever. So every function of this folder that blocks runs
in a worker thread with a time limit.
"""

from collections.abc import Callable
from typing import TypeVar

import pynvml

T = TypeVar("T")
D = TypeVar("D")

TIMEOUT_S = 20.0


def with_nvml(function: Callable[[], T]) -> T:
    """Call a function between `nvmlInit` and `nvmlShutdown`."""
    pynvml.nvmlInit()
    try:
        return function()
    finally:
        pynvml.nvmlShutdown()


def value_or(function: Callable[[], T], default: D) -> T | D:
    """Return the function's value, or `default` if this model or driver does not support it."""
    try:
        return function()
    except (pynvml.NVMLError, AttributeError):
        return default


def text_of(name: str | bytes) -> str:
    """Return text that NVML gives as bytes or as text, depending on its version."""
    return name.decode() if isinstance(name, bytes) else name

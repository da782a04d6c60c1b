"""Bounds of a process's log: lines of one statement, and bytes of a line."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 10.0
"""The time over which lines of one statement are counted."""
MOST_LINES = 50
"""Within `WINDOW_S`."""
LONGEST_TEXT = 4096
LONGEST_TRACEBACK = 16_384


def shortened(text: str, longest: int) -> str:
    """Leave out the middle of a text that is too long.

    >>> shortened("0123456789", 4)
    '01 ...6 characters... 89'
    """
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} ...{len(text) - 2 * half} characters... {text[-half:]}"


@dataclass(slots=True)
class _Window:
    began_at: float
    lines: int = 0


class StatementLimit(logging.Filter):
    """The first line that passes later has the number left out."""

    def __init__(self, ticks: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._ticks = ticks
        self._windows: dict[tuple[str, int], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        now = self._ticks()
        statement = (record.pathname, record.lineno)
        window = self._windows.get(statement)
        if window is None or now - window.began_at >= WINDOW_S:
            if window is not None and window.lines > MOST_LINES:
                record.left_out = window.lines - MOST_LINES
            window = self._windows[statement] = _Window(now)
        window.lines += 1
        return window.lines <= MOST_LINES

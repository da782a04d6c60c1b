"""Log lines about what others send: of bounded length, and at a bounded rate for each sender."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from shared.model.bounds import cut

EVERY_S = 10.0
"""A line of one cause and sender is written this often; the next one has the number between."""
MOST_KEYS = 1_000
OTHERS = ""


@dataclass(slots=True)
class _Series:
    written_at: float
    left_out: int = 0


class LimitedLog:
    def __init__(self, logger: logging.Logger, ticks: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._ticks = ticks
        self._series: dict[str, _Series] = {}

    def write(self, level: int, cause: str, text: str, bug: BaseException | None = None) -> None:
        """`cause` is what happened, and its sender."""
        now = self._ticks()
        if cause not in self._series and len(self._series) >= MOST_KEYS:
            self._forget_old(now)
            cause = cause if len(self._series) < MOST_KEYS else OTHERS
        series = self._series.get(cause)
        if series is not None and now - series.written_at < EVERY_S:
            series.left_out += 1
            return
        left_out = series.left_out if series else 0
        more = f" ({left_out} more since the last line)" if left_out else ""
        self._series[cause] = _Series(now)
        self._logger.log(level, "%s%s", cut(text), more, exc_info=bug)

    def _forget_old(self, now: float) -> None:
        for cause, series in list(self._series.items()):
            if now - series.written_at >= EVERY_S:
                del self._series[cause]

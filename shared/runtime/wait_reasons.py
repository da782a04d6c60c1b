"""Reasons for waiting; each is logged as a warning once."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

STEADY_S = 30.0
"""A reason that was not met for so long is news again."""
KEPT = 1_000


class WaitReasons:
    """The reasons of one service."""

    def __init__(self, ticks: Callable[[], float] = time.monotonic) -> None:
        self._ticks = ticks
        self._met: dict[str, float] = {}

    def report(self, who: str, why: str) -> None:
        """Log why `who` waits; as a warning unless it was met within the last `STEADY_S`."""
        now = self._ticks()
        is_news = now - self._met.pop(why, -STEADY_S) >= STEADY_S
        self._met[why] = now
        if len(self._met) > KEPT:
            del self._met[next(iter(self._met))]
        logger.log(logging.WARNING if is_news else logging.DEBUG, "%s waits: %s", who, why)

"""Reasons for waiting; each is logged as a warning once."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

STEADY_S = 30.0
"""A reason that did not occur for this time is logged as a warning again."""
MAX_REASONS = 1_000


class WaitReasons:
    """The reasons of one service."""

    def __init__(self, ticks: Callable[[], float] = time.monotonic) -> None:
        self._ticks = ticks
        self._met: dict[str, float] = {}

    def report(self, what: str, why: str) -> None:
        """Log why `what` waits; as a warning unless that was logged within the last `STEADY_S`."""
        now = self._ticks()
        is_new = now - self._met.pop(why, -STEADY_S) >= STEADY_S
        self._met[why] = now
        if len(self._met) > MAX_REASONS:
            del self._met[next(iter(self._met))]
        logger.log(logging.WARNING if is_new else logging.DEBUG, "%s waits: %s", what, why)

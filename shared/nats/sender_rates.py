"""The rate of each node's agent on one connection: what exceeds it is dropped unread.

nats-server has no rate of a user.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable

from prometheus_client import Counter as Metric

from shared.model.events.event import Event
from shared.nats import subjects
from shared.nats.limited_log import LimitedLog

_limited = LimitedLog(logging.getLogger(__name__))

OVER_RATE = Metric(
    "leasehold_nats_messages_over_rate",
    "Received messages that were dropped unread, since their sender sends more than its rate.",
    ["subject"],
)
MOST_BYTES = 8 * 2**20
"""Of an agent in a second; its largest report has less than 1 MiB."""
LEAST_BYTES = 4096
"""What a smaller message counts as, since handling costs more than reading."""


def _ignore(user: str) -> None:
    """Excess is dropped in any case."""


class SenderRates:
    def __init__(self, ticks: Callable[[], float] = time.monotonic) -> None:
        self.on_excess: Callable[[str], None] = _ignore
        self._ticks = ticks
        self._kinds: dict[int, type[Event]] = {}
        self._second = -1.0
        self._bytes: Counter[str] = Counter()

    def watch(self, subscription: int, kind: type[Event]) -> None:
        self._kinds[subscription] = kind

    def allows(self, subscription: int, subject: bytes, size: int) -> bool:
        kind = self._kinds.get(subscription)
        user = subjects.agent_in(kind, subject.decode(errors="replace")) if kind else ""
        if kind is None or not user:
            return True
        second = self._ticks() // 1
        if second != self._second:
            self._second = second
            self._bytes.clear()
        before = self._bytes[user]
        self._bytes[user] += max(size, LEAST_BYTES)
        if self._bytes[user] < MOST_BYTES:
            return True
        OVER_RATE.labels(kind.subject).inc()
        if before // MOST_BYTES != self._bytes[user] // MOST_BYTES:
            text = f"{user} floods NATS: it has sent more than {MOST_BYTES} bytes within a second"
            _limited.write(logging.WARNING, user, text)
            self.on_excess(user)
        return False

"""How many messages of each sender wait at one receiver, so that none leaves no room to others."""

import logging
from collections.abc import Callable

from prometheus_client import Counter

from shared.model.events.event import Event
from shared.nats import subjects
from shared.nats.limited_log import LimitedLog

_limited = LimitedLog(logging.getLogger(__name__))

OVER_SHARE = Counter(
    "leasehold_nats_messages_over_share",
    "Received messages that were dropped unread, since as many of their sender waited already.",
    ["subject"],
)
MOST_OF_SENDER = 64
"""An agent sends up to 256 events in a message, and sends again what is not handled."""
MOST_OF_OTHERS = 65_536


class SenderShares:
    def __init__(self, most_of_others: int = MOST_OF_OTHERS) -> None:
        self._most_of_others = most_of_others
        self._counts: dict[str, int] = {}

    def take(self, kind: type[Event], subject: str) -> Callable[[], None] | None:
        """Count a message until the returned function is called, or return None beyond a share."""
        sender = subjects.sender_in(kind, subject)
        count = self._counts.get(sender, 0)
        if count >= (MOST_OF_SENDER if sender else self._most_of_others):
            OVER_SHARE.labels(kind.subject).inc()
            text = f"{sender or 'services'}: {count} messages of {kind.subject} wait already"
            _limited.write(logging.WARNING, f"{kind.subject} {sender}", text)
            return None
        self._counts[sender] = count + 1
        return lambda: self._leave(sender)

    def _leave(self, sender: str) -> None:
        count = self._counts.get(sender, 0)
        if count > 1:
            self._counts[sender] = count - 1
        else:
            self._counts.pop(sender, None)

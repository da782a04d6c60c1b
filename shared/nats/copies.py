"""Copies of events for observers. None are sent while nobody observes.

NATS reports at once that a message with a reply subject has no subscriber (the status 503, "no
responders"). https://docs.nats.io/nats-concepts/core-nats/reqreply#no-responders
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import nats.errors

from shared.nats import subjects

QUIET_S = 5.0
"""Pause after a copy that nobody received; an observer that begins meanwhile misses copies."""


class Copies:
    """The copies that one connection sends."""

    def __init__(self, client: Any, *, ticks: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._ticks = ticks
        self._prefix = str(client.new_inbox())
        self._numbers: dict[str, int] = {}
        self._quiet_until: dict[int, float] = {}

    async def start(self) -> None:
        """Subscribe to what NATS reports about copies without a subscriber."""
        await self._client.subscribe(f"{self._prefix}.*", cb=self._receive)

    def wants(self, subject: str) -> bool:
        """Return whether somebody observes the subject, as far as is known."""
        number = self._numbers.get(subject)
        return number is None or self._ticks() >= self._quiet_until.get(number, 0.0)

    async def send(self, subject: str, data: bytes) -> None:
        """Send a copy, which may be lost."""
        number = self._numbers.setdefault(subject, len(self._numbers))
        with contextlib.suppress(nats.errors.Error):
            await self._client.publish(subject, data, reply=f"{self._prefix}.{number}")

    async def _receive(self, message: Any) -> None:
        number = subjects.number_of(message.subject)
        if number is not None and subjects.has_no_responders(message.headers):
            self._quiet_until[number] = self._ticks() + QUIET_S

"""Received NATS messages, their buffer per handler, and their acknowledgement."""

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

MAX_BUFFERED = 65_536
EVENTS_PER_MESSAGE = 256


@dataclass(slots=True)
class DeliveredMessage:
    """One message of work or a broadcast, and its acknowledgement."""

    events: list[Any]
    """Events of one type."""
    message: Msg
    work: bool

    @property
    def attempts(self) -> int:
        """Number of deliveries of the message, this one included."""
        return self.message.metadata.num_delivered if self.work else 1

    async def ack(self) -> None:
        """Acknowledge the message."""
        if self.work:
            await self._respond(self.message.ack())

    async def nak(self, after_s: float = 0.0) -> None:
        """Request redelivery of the message after `after_s` seconds."""
        if self.work:
            await self._respond(self.message.nak(delay=after_s or None))

    async def in_progress(self) -> None:
        """Reset the acknowledgement timeout of the message."""
        if self.work:
            await self._respond(self.message.in_progress())

    async def terminate(self) -> None:
        """Drop the message: it is not delivered again."""
        if self.work:
            await self._respond(self.message.term())

    async def _respond(self, telling: Any) -> None:
        with contextlib.suppress(nats.errors.Error):  # unacknowledged work simply comes again
            await telling


@dataclass(slots=True)
class Inbox:
    """Buffered messages for one handler, read in batches.

    Work that waits here is not handed to another replica meanwhile, however long the line is. Of
    news, the oldest is lost when the line is full.
    """

    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: deque[DeliveredMessage] = field(default_factory=lambda: deque(maxlen=MAX_BUFFERED))
    subscriptions: list[Subscription] = field(default_factory=list)

    def put(self, delivered: DeliveredMessage) -> None:
        """Add a message to the buffer."""
        self.waiting.append(delivered)
        self.arrived.set()

    async def batch(self, limit: int = EVENTS_PER_MESSAGE) -> list[DeliveredMessage]:
        """Wait for one message, then return all buffered ones, up to about `limit` events."""
        while not self.waiting:
            self.arrived.clear()
            await self.arrived.wait()
        batch, size = [], 0
        while size < limit and self.waiting:
            batch.append(self.waiting.popleft())
            size += len(batch[-1].events)
        return batch

    async def keep(self) -> None:
        """Reset the acknowledgement timeout of buffered work."""
        for delivered in list(self.waiting):
            await delivered.in_progress()

    async def close(self) -> None:
        """End the subscriptions."""
        for subscription in self.subscriptions:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

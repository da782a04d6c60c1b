"""Received NATS messages, their buffer per handler, and their acknowledgement."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.model.errors import RequestError
from shared.model.events.event import Event
from shared.nats import subjects, wire

logger = logging.getLogger(__name__)

MAX_BUFFERED = 65_536
EVENTS_PER_MESSAGE = 256

E = TypeVar("E", bound=Event)


@dataclass(slots=True)
class DeliveredMessage:
    """One message. A broadcast, which this class represents, is delivered once."""

    events: list[Any]
    """Events of one type."""

    @property
    def attempts(self) -> int:
        """Number of deliveries of the message, this one included."""
        return 1

    async def ack(self) -> None:
        """Acknowledge the message."""

    async def nak(self, after_s: float = 0.0) -> None:
        """Request redelivery of the message after `after_s` seconds."""

    async def in_progress(self) -> None:
        """Reset the acknowledgement timeout of the message."""

    async def terminate(self) -> None:
        """Drop the message: it is not delivered again."""


@dataclass(slots=True)
class StoredMessage(DeliveredMessage):
    """A message of work that JetStream stores until it is acknowledged."""

    message: Msg

    @property
    def attempts(self) -> int:
        """Number of deliveries, to any replica."""
        count: int = self.message.metadata.num_delivered
        return count

    async def ack(self) -> None:
        """Remove the message from the stream."""
        await self._respond(self.message.ack())

    async def nak(self, after_s: float = 0.0) -> None:
        """Request redelivery to any replica."""
        await self._respond(self.message.nak(delay=after_s or None))

    async def in_progress(self) -> None:
        """Prevent redelivery while the message is handled."""
        await self._respond(self.message.in_progress())

    async def terminate(self) -> None:
        """Remove the message from the stream."""
        await self._respond(self.message.term())

    async def _respond(self, response: Any) -> None:
        with contextlib.suppress(nats.errors.Error):  # unacknowledged work is redelivered
            await response


@dataclass(slots=True)
class DirectMessage(DeliveredMessage):
    """A message of work that came without JetStream: it is only in this process."""

    inbox: "Inbox"
    deliveries: int = 1

    @property
    def attempts(self) -> int:
        """Number of deliveries to this replica."""
        return self.deliveries

    async def nak(self, after_s: float = 0.0) -> None:
        """Put the message into the inbox again."""
        again = DirectMessage(self.events, self.inbox, self.deliveries + 1)
        asyncio.get_running_loop().call_later(after_s, self.inbox.put, again)


@dataclass(slots=True)
class Inbox:
    """Buffered messages for one handler, read in batches.

    Buffered work is not redelivered to another replica. If the buffer is full, the oldest message
    is dropped.
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

    async def in_progress(self) -> None:
        """Reset the acknowledgement timeout of buffered work."""
        for delivered in list(self.waiting):
            await delivered.in_progress()

    async def close(self) -> None:
        """End the subscriptions."""
        for subscription in self.subscriptions:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    def receive_broadcasts(self, kind: type[Event]) -> Callable[[Msg], Awaitable[None]]:
        """Return the callback of a subscription to broadcasts, or to copies, of one type."""

        async def receive(message: Msg) -> None:
            if events := _decode([kind], message):
                self.put(DeliveredMessage(events))

        return receive

    def receive_stored(self, kinds: Sequence[type[Event]]) -> Callable[[Msg], Awaitable[None]]:
        """Return the callback of a durable consumer. It terminates what it cannot decode."""

        async def receive(message: Msg) -> None:
            events = _decode(kinds, message)
            if events is None:  # for a replica of another version
                return
            delivered = StoredMessage(events, message)
            if events:
                self.put(delivered)
            else:
                await delivered.terminate()

        return receive

    def receive_direct(self, kinds: Sequence[type[Event]]) -> Callable[[Msg], Awaitable[None]]:
        """Return the callback for work without JetStream. Its reply confirms the receipt."""

        async def receive(message: Msg) -> None:
            events = _decode(kinds, message)
            if events is None:
                return
            if events:
                self.put(DirectMessage(events, self))
            await message.respond(b"")

        return receive


def _decode(kinds: Sequence[type[E]], message: Msg) -> list[E] | None:
    """Return the events of a message, or None if its subject names none of `kinds`.

    A message that cannot be decoded is logged and has no events.
    """
    subject = message.subject.split(".", 2)[2]
    kind = next((kind for kind in kinds if subject.startswith(kind.subject)), None)
    if kind is None:
        return None
    try:
        return of_its_node(wire.decode(message.data, kind), message.subject)
    except RequestError as error:
        logger.error("dropped a message: %s", error)  # noqa: TRY400 - the text is enough
        return []


def of_its_node(events: list[E], subject: str) -> list[E]:
    """Drop events about another node than the last token of the subject."""
    if not events or not subjects.is_routed(type(events[0])):
        return events
    ours = [event for event in events if subject.endswith(subjects.token(event.route))]
    if len(ours) < len(events):
        logger.error("dropped %d events on %s about other nodes", len(events) - len(ours), subject)
    return ours

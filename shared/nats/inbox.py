"""Received NATS messages, their buffer per handler, and their confirmation."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from prometheus_client import Counter

from shared.model.bounds import cut
from shared.model.events.event import Event
from shared.model.events.plausible import implausible
from shared.nats import subjects, wire
from shared.nats.confirmations import Confirmations, Receipt
from shared.nats.limited_log import LimitedLog
from shared.nats.sender_shares import SenderShares
from shared.nats.wire import EVENTS_PER_MESSAGE

_limited = LimitedLog(logging.getLogger(__name__))

REFUSED = Counter(
    "leasehold_events_refused_total",
    "Received events that are invalid or out of bounds; the others of their message are handled",
    ["subject"],
)
MAX_BUFFERED = 65_536
SHOWN = 100
SHOWN_REASON = 400

E = TypeVar("E", bound=Event)
OnRefused = Callable[[str, str], None]


def _ignore(node: str, reason: str) -> None:
    """Refusals are logged in any case."""


def _leave_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class DeliveredMessage:
    """A broadcast has no receipt."""

    events: list[Any]
    inbox: "Inbox | None" = None
    receipt: Receipt | None = None
    attempts: int = 1
    leave: Callable[[], None] = _leave_nothing
    """Frees its place in its sender's share: of work when it is settled, else when read."""

    def confirm(self) -> None:
        if self.receipt:
            self.receipt.confirm()
            self.leave()

    def retry(self, after_s: float) -> None:
        """Put work into the inbox again later; meanwhile it is held."""
        if self.inbox:
            again = replace(self, attempts=self.attempts + 1)
            asyncio.get_running_loop().call_later(after_s, self.inbox.put, again)

    def give_back(self) -> None:
        """Have work sent to any replica after a pause."""
        if self.receipt:
            self.receipt.give_back()
            self.leave()


@dataclass(slots=True)
class Inbox:
    """If the buffer is full, the oldest broadcast is dropped, and work is left to its sender."""

    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: deque[DeliveredMessage] = field(default_factory=deque)
    subscriptions: list[Subscription] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_closed: bool = False
    on_refused: OnRefused = _ignore
    shares: SenderShares = field(default_factory=SenderShares)

    def put(self, delivered: DeliveredMessage) -> None:
        if len(self.waiting) >= MAX_BUFFERED:
            self._pop().give_back()
        self.waiting.append(delivered)
        self.arrived.set()

    @property
    def takes_more(self) -> bool:
        """Whether less than a full batch waits; other replicas should share the rest."""
        return not self.is_closed and len(self.waiting) < EVENTS_PER_MESSAGE

    async def batch(self) -> list[DeliveredMessage]:
        """Wait for one message, then return all buffered ones, up to about a full message."""
        async with self.turn:
            while not self.waiting:
                self.arrived.clear()
                await self.arrived.wait()
            batch = []
            size = 0
            while size < EVENTS_PER_MESSAGE and self.waiting:
                batch.append(self._pop())
                size += len(batch[-1].events)
            return batch

    def _pop(self) -> DeliveredMessage:
        delivered = self.waiting.popleft()
        if delivered.receipt is None:
            delivered.leave()
        return delivered

    async def gather(self, seconds: float, limit: int = EVENTS_PER_MESSAGE) -> None:
        if seconds and len(self.waiting) < limit:
            await asyncio.sleep(seconds)

    async def close(self) -> None:
        self.is_closed = True
        for subscription in self.subscriptions:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    def receive_broadcasts(self, kind: type[Event]) -> Callable[[Msg], Awaitable[None]]:
        count_refused(kind, 0)

        async def receive(message: Msg) -> None:
            leave = self.shares.take(kind, message.subject)
            if leave is None:
                return
            if events := decode_checked(kind, message, self.on_refused):
                self.put(DeliveredMessage(events, leave=leave))
            else:
                leave()

        return receive

    def receive_work(
        self, kind: type[Event], confirmations: Confirmations
    ) -> Callable[[Msg], Awaitable[None]]:
        count_refused(kind, 0)

        async def receive(message: Msg) -> None:
            if len(self.waiting) >= MAX_BUFFERED:
                return
            if not is_from_own_inbox(kind, message, self.on_refused):
                return
            leave = self.shares.take(kind, message.subject)
            if leave is None:
                return
            receipt = confirmations.take(message.reply)
            if receipt is None:
                leave()
                return
            delivered = DeliveredMessage([], self, receipt, leave=leave)
            if events := decode_checked(kind, message, self.on_refused):
                self.put(replace(delivered, events=events))
            else:
                delivered.confirm()

        return receive


LocalHandlers = dict[type[Event], Inbox]


def is_from_own_inbox(kind: type[Event], message: Msg, on_refused: OnRefused = _ignore) -> bool:
    """Refuse a message if replies to it do not go to its sender."""
    if subjects.is_inbox_of_sender(kind, message.subject, message.reply):
        return True
    reply = f"{message.reply[:SHOWN]!r}" if message.reply else "missing"
    _refuse(kind, message, [f"its reply subject, {reply}, is no inbox of its sender"], on_refused)
    return False


def decode_checked(kind: type[E], message: Msg, on_refused: OnRefused = _ignore) -> list[E]:
    """Refuse events that NATS' authenticated node, the last token of the subject, may not send."""
    node = subjects.node_in(kind, message.subject)
    events, errors = wire.decode_each(message.data, kind)
    reasons = [str(error) for error in errors]
    accepted: list[E] = []
    for event in events:
        if reason := _refusal(event, node):
            reasons.append(reason)
        else:
            accepted.append(event)
    if reasons:
        _refuse(kind, message, reasons, on_refused)
    return accepted


def _refuse(kind: type[Event], message: Msg, reasons: Sequence[str], on_refused: OnRefused) -> None:
    node = subjects.node_in(kind, message.subject)
    reason = cut(reasons[0])
    more = f", and {len(reasons) - 1} more of the same message" if len(reasons) > 1 else ""
    text = f"refused an event on {message.subject[:SHOWN]!r}: {reason[:SHOWN_REASON]}{more}"
    _limited.write(logging.ERROR, f"{kind.subject} {node}", text)
    if node:
        on_refused(node, f"{kind.subject}: {reason}")
    count_refused(kind, len(reasons))


def count_refused(kind: type[Event], count: int) -> None:
    """0 exports the series, so that the first refusal is an increase."""
    REFUSED.labels(kind.subject).inc(count)


def _refusal(event: Event, node: str) -> str:
    if subjects.is_routed(type(event)) and event.route != node:
        return "it is about another sender than its subject names"
    return implausible(event)

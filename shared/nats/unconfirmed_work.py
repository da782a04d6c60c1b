"""Work that this connection has sent, kept until a receiver reports it as handled.

It is sent again, to any replica, if none reports it within `receipt_s`, or if the one that has it
is silent for `silent_s`. While no replica receives a type of work, only its oldest message is sent.

Nothing is stored: what is lost with its sender is in Kubernetes and is listed again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import nats.errors
from prometheus_client import Counter, Gauge

from shared.model.clock import wait_for_event
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.event import Event
from shared.nats import subjects, wire
from shared.nats.confirmations import Receipt
from shared.nats.inbox import DeliveredMessage, Inbox
from shared.nats.limited_log import LimitedLog

_limited = LimitedLog(logging.getLogger(__name__))

NEVER = float("-inf")
FOREVER = float("inf")

UNCONFIRMED = Gauge(
    "leasehold_unconfirmed_events",
    "Events of work that were sent and that no replica has handled yet.",
    ["service", "subject"],
)
RESENT = Counter(
    "leasehold_resent_messages",
    "Messages of work sent again: no replica received them, or the one that did was silent.",
    ["service", "subject"],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResendPolicy:
    receipt_s: float = 1.5
    """A message that no replica has reported as received by then is sent again."""
    silent_s: float = 4.0
    """A message whose receiver has not reported it for this long is sent again."""
    return_s: float = 1.0
    """The pause before a message is sent again that a replica has returned."""
    probe_s: float = 0.25
    """The interval of attempts while no replica receives a type of work."""
    tick_s: float = 0.25
    """The interval of looks at messages that are not confirmed."""
    room_s: float = 3.0
    """The longest wait for room while receivers are slower than this sender."""
    unready_s: float = 5.0
    """The sender is not ready after no replica has received a type of work for this long."""
    max_messages: int = 2048
    max_bytes: int = 64 * 1024 * 1024


@dataclass(slots=True)
class _Kind:
    event: type[Event]
    unconfirmed: Gauge
    messages: dict[int, "_Message"] = field(default_factory=dict)
    size: int = 0
    heard_at: float = 0.0
    probe_at: float = 0.0
    unheard_since: float | None = None
    has_lost: bool = False


@dataclass(slots=True)
class _Message:
    number: int
    kind: _Kind
    subject: str
    data: bytes
    events: int
    sent_at: float = NEVER
    due_at: float = NEVER
    is_received: bool = False
    handed_over: Sequence[Event] = ()
    """Its events if a handler of this process has them."""


class UnconfirmedWork:
    def __init__(
        self,
        client: Any,
        *,
        service: str,
        policy: ResendPolicy,
        has_lost_work: asyncio.Event,
        encode: Callable[[Sequence[Event]], Iterator[tuple[Sequence[Event], bytes]]],
    ) -> None:
        self._client = client
        self._service = service
        self._policy = policy
        self._has_lost_work = has_lost_work
        self._encode = encode
        self._prefix = str(client.new_inbox())
        self._kinds: dict[type[Event], _Kind] = {}
        self._messages: dict[int, _Message] = {}
        self._next = 1
        self._added = asyncio.Event()
        self._confirmed = asyncio.Event()

    async def start(self) -> None:
        await self._client.subscribe(f"{self._prefix}.*", cb=self._receive)

    async def send(self, event: type[Event], subject: str, data: bytes, *, events: int) -> None:
        """Keep a message until it is handled; send it later if NATS is away.

        Raises UnavailableError if receivers have left no room for it within `room_s`. While no
        replica receives this type of work, the oldest message is dropped instead.
        """
        kind = self._kind(event)
        if self._is_full(kind):
            await self._make_room(kind)
        message = self._keep(kind, subject, data, events)
        if self._client.is_connected and kind.unheard_since is None:
            await self._write(message)

    def hand_over(
        self, event: type[Event], subject: str, events: Sequence[Event], inbox: Inbox
    ) -> bool:
        """Return False if too much work is not handled yet."""
        kind = self._kind(event)
        if self._is_full(kind):
            return False
        message = self._keep(kind, subject, b"", len(events))
        message.due_at = FOREVER
        message.is_received = True
        message.handed_over = events
        number = message.number
        receipt = Receipt(partial(self._settle, number), partial(self._send_later, number))
        inbox.put(DeliveredMessage(list(events), inbox, receipt))
        return True

    def _settle(self, number: int) -> None:
        if number in self._messages:
            self._forget(number)

    def _send_later(self, number: int, after_s: float | None = None) -> None:
        message = self._messages.get(number)
        if message is None:
            return
        self._forget(number)
        due_at = time.monotonic() + (self._policy.return_s if after_s is None else after_s)
        for some, data in self._encode(message.handed_over):
            kept = self._keep(message.kind, message.subject, data, len(some))
            kept.due_at = due_at
            kept.is_received = True

    def _kind(self, event: type[Event]) -> _Kind:
        kind = self._kinds.get(event)
        if kind is None:
            unconfirmed = UNCONFIRMED.labels(self._service, event.subject)
            kind = self._kinds[event] = _Kind(event, unconfirmed)
        return kind

    def _keep(self, kind: _Kind, subject: str, data: bytes, events: int) -> _Message:
        message = _Message(self._next, kind, subject, data, events)
        self._next += 1
        self._messages[message.number] = message
        kind.messages[message.number] = message
        kind.size += len(data)
        kind.unconfirmed.inc(events)
        self._added.set()
        return message

    async def run(self) -> None:
        while True:
            await self._added.wait()
            while self._messages:
                await asyncio.sleep(self._policy.tick_s)
                if self._client.is_connected:
                    for kind in self._kinds.values():
                        await self._send_due(kind)
            self._added.clear()

    async def drain(self, limit_s: float) -> None:
        end_at = time.monotonic() + limit_s
        for message in list(self._messages.values()):
            if message.handed_over:
                self._send_later(message.number, after_s=0)
        while (left_s := end_at - time.monotonic()) > 0 and self._client.is_connected:
            kinds = self._kinds.values()
            if all(kind.unheard_since is not None or not kind.messages for kind in kinds):
                return
            await self._next_report(left_s)

    def unready_reason(self) -> str:
        now = time.monotonic()
        for kind in self._kinds.values():
            if kind.unheard_since is not None and now - kind.unheard_since > self._policy.unready_s:
                return (
                    f"no replica receives {kind.event.subject}, {len(kind.messages)} messages wait "
                    f"for {now - kind.unheard_since:.0f} s: check that a service that handles it "
                    "runs (`leasehold topology` lists them) and is connected to NATS"
                )
        return ""

    def _is_full(self, kind: _Kind) -> bool:
        is_long = len(kind.messages) >= self._policy.max_messages
        return is_long or kind.size >= self._policy.max_bytes

    async def _next_report(self, timeout_s: float) -> None:
        self._confirmed.clear()
        await wait_for_event(self._confirmed, timeout_s)

    async def _make_room(self, kind: _Kind) -> None:
        end_at = time.monotonic() + self._policy.room_s
        while self._is_full(kind):
            left_s = end_at - time.monotonic()
            if kind.unheard_since is not None or not self._client.is_connected:
                kind.has_lost = True
                self._forget(next(iter(kind.messages)))
            elif left_s <= 0:
                raise UnavailableError(
                    f"{len(kind.messages)} messages of {kind.event.subject} are not handled yet"
                )
            else:
                await self._next_report(left_s)

    async def _write(self, message: _Message) -> None:
        now = time.monotonic()
        message.sent_at = now
        message.due_at = now + self._policy.receipt_s
        message.is_received = False
        with contextlib.suppress(nats.errors.Error):  # it is sent again when it is due
            await self._client.publish(
                message.subject, message.data, reply=f"{self._prefix}.{message.number}"
            )

    async def _send_due(self, kind: _Kind) -> None:
        now = time.monotonic()
        due = [message for message in kind.messages.values() if message.due_at <= now]
        for message in due:
            is_unheard = not message.is_received and kind.heard_at < message.sent_at
            if is_unheard and kind.unheard_since is None:
                self._mark_unheard(kind)
            if kind.unheard_since is not None and now < kind.probe_at:
                return
            if message.sent_at != NEVER:
                RESENT.labels(self._service, kind.event.subject).inc()
            await self._write(message)
            kind.probe_at = now + self._policy.probe_s

    def _mark_unheard(self, kind: _Kind) -> None:
        if kind.unheard_since is None:
            kind.unheard_since = time.monotonic()

    async def _receive(self, message: Any) -> None:
        number = subjects.number_of(message.subject)
        if number is None:
            try:
                self._apply(wire.decode_confirmation(message.data))
            except RequestError as error:
                _limited.write(logging.ERROR, "confirmation", f"dropped a confirmation: {error}")
        elif subjects.has_no_responders(message.headers) and number in self._messages:
            kept = self._messages[number]
            self._mark_unheard(kept.kind)
            kept.due_at = NEVER

    def _apply(self, report: wire.Confirmation) -> None:
        now = time.monotonic()
        for numbers, after_s in (
            (report.held, self._policy.silent_s),
            (report.returned, self._policy.return_s),
        ):
            for number in numbers:
                if message := self._messages.get(number):
                    self._hear(message.kind, now)
                    message.due_at = now + after_s
                    message.is_received = True
        for number in report.handled:
            if message := self._messages.get(number):
                self._hear(message.kind, now)
                self._forget(number)
        self._confirmed.set()

    def _hear(self, kind: _Kind, now: float) -> None:
        kind.heard_at = now
        if kind.unheard_since is None:
            return
        kind.unheard_since = None
        for message in kind.messages.values():
            if not message.is_received:
                message.due_at = min(message.due_at, message.sent_at + self._policy.receipt_s)
        if kind.has_lost:
            kind.has_lost = False
            self._has_lost_work.set()

    def _forget(self, number: int) -> None:
        message = self._messages.pop(number)
        del message.kind.messages[number]
        message.kind.size -= len(message.data)
        message.kind.unconfirmed.dec(message.events)

"""The bus on NATS: work with confirmation, broadcasts and request-reply.

Work goes to one replica of the service that handles it. Events about another node than their
subject names are refused: the server restricts a node's agent to its node's subjects.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import nats.errors
from nats.aio.subscription import Subscription

from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.model.clock import ExpiringMap, in_background
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.event import Delivery, Event, is_work
from shared.nats import subjects, wire
from shared.nats.client import NatsClient
from shared.nats.confirmations import Confirmations, ConfirmationTiming
from shared.nats.connection import ConnectWait, connected
from shared.nats.inbox import Inbox, LocalHandlers, OnRefused
from shared.nats.replies import Replies, Reply
from shared.nats.unconfirmed_work import UNCONFIRMED, ResendPolicy, UnconfirmedWork
from shared.nats.wire import EVENTS_PER_MESSAGE

QUIET_S = 5.0
"""The pause after a copy without a subscriber; an observer that begins meanwhile misses copies."""
MOST_QUIET = 65_536


class CopySender:
    def __init__(self, client: Any, *, ticks: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._prefix = str(client.new_inbox())
        self._quiet: ExpiringMap[int, None] = ExpiringMap(ticks, expires_s=QUIET_S, most=MOST_QUIET)

    async def start(self) -> None:
        await self._client.subscribe(f"{self._prefix}.*", cb=self._receive)

    def wants(self, subject: str) -> bool:
        return _number_of(subject) not in self._quiet

    async def send(self, subject: str, data: bytes) -> None:
        reply = f"{self._prefix}.{_number_of(subject)}"
        with contextlib.suppress(nats.errors.Error):
            await self._client.publish(subject, data, reply=reply)

    async def _receive(self, message: Any) -> None:
        number = subjects.number_of(message.subject)
        if number is not None and subjects.has_no_responders(message.headers):
            self._quiet.set(number, None)


def _number_of(subject: str) -> int:
    return int.from_bytes(hashlib.blake2s(subject.encode(), digest_size=7).digest(), "big")


logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""The time limit of an attempt to connect: a busy server takes seconds for TLS and login."""
AGAIN_S = 0.5
"""The pause between attempts to connect for the first time."""
RESERVED_BYTES = 1024
"""Part of a message's maximum size that is not for data."""
DEFAULT_POLICY = ResendPolicy()
DEFAULT_CONFIRMATION = ConfirmationTiming()
DRAIN_S = 1.0
"""The longest wait at the end until work that was sent is handled."""

E = TypeVar("E", bound=Event)


class NoRespondersError(UnavailableError):
    pass


class Bus:
    """A connection that reconnects. Publishing raises UnavailableError while it is down.

    For example::

        async with Bus.connect("nats://127.0.0.1:4222", name="watcher") as bus:
            await bus.publish([PodQueued(...)])
            reply = await bus.request(LeasesRequest(node=node), LeasesReply)
    """

    def __init__(
        self,
        name: str,
        policy: ResendPolicy,
        confirmation_timing: ConfirmationTiming,
        handlers: LocalHandlers | None = None,
    ) -> None:
        self.client: Any = None
        self.has_lost_work = asyncio.Event()
        self.on_refused: OnRefused = lambda _node, _reason: None
        self._handlers = handlers
        self._name = name
        self._policy = policy
        self._confirmation_timing = confirmation_timing
        self._work: UnconfirmedWork
        self._confirmations: Confirmations
        self._copies: CopySender
        self._replies: Replies
        self._reached = asyncio.Event()
        self._wait = ConnectWait()

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        credentials: ClientCredentials = NO_CREDENTIALS,
        patience_s: float = PATIENCE_S,
        policy: ResendPolicy = DEFAULT_POLICY,
        confirmation_timing: ConfirmationTiming = DEFAULT_CONFIRMATION,
    ) -> AsyncIterator["Bus"]:
        """Connect, and stay connected until the context exits.

        Raises UnavailableError if no server accepts the login within `patience_s`, RequestError if
        a file cannot be read.
        """
        client = await connected(url, name=name, credentials=credentials, patience_s=patience_s)
        bus = cls(name, policy, confirmation_timing)
        await bus._take(client)
        async with bus._running(bus._run()):
            yield bus

    @classmethod
    @contextlib.asynccontextmanager
    async def connect_later(
        cls,
        url: str,
        *,
        name: str,
        credentials: ClientCredentials = NO_CREDENTIALS,
        handlers: LocalHandlers | None = None,
    ) -> AsyncIterator["Bus"]:
        """Yield at once and connect in the background like `connect`, without a time limit.

        Refusals and unreadable files are retried: users and secrets may be created later.
        """
        bus = cls(name, DEFAULT_POLICY, DEFAULT_CONFIRMATION, handlers)
        async with bus._running(bus._reach(url, credentials)):
            yield bus

    @contextlib.asynccontextmanager
    async def _running(self, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        try:
            async with in_background(work):
                try:
                    yield
                finally:
                    await self._finish()
        finally:
            await self._leave()

    async def _reach(self, url: str, credentials: ClientCredentials) -> None:
        while not self.is_connected:
            try:
                client = await connected(
                    url,
                    name=self._name,
                    credentials=credentials,
                    patience_s=PATIENCE_S,
                    on_failure=self._wait.note,
                )
            except LeaseholdError as error:
                self._wait.note(str(error))
                await asyncio.sleep(AGAIN_S)
            else:
                await self._take(client)
        self._wait.over()
        await self._run()

    async def _take(self, client: NatsClient) -> None:
        self.client = client
        self._confirmations = Confirmations(client, self._confirmation_timing)
        self._work = UnconfirmedWork(
            client,
            service=self._name,
            policy=self._policy,
            has_lost_work=self.has_lost_work,
            encode=self._messages,
        )
        self._copies = CopySender(client)
        self._replies = Replies(client, self._note_refused)
        await self._work.start()
        await self._copies.start()
        self._reached.set()

    async def _run(self) -> None:
        async with (
            in_background(self._work.run()),
            in_background(self._confirmations.run()),
            in_background(self._replies.run()),
        ):
            await self.client.has_failed.wait()
        raise UnavailableError(self._failure())

    async def _finish(self) -> None:
        if self.is_connected and not self.client.fault:
            await self._replies.drain(DRAIN_S)
            await self._confirmations.return_all()
            await self._work.drain(DRAIN_S)

    async def _leave(self) -> None:
        if self.client is None:
            return
        with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
            async with asyncio.timeout(3):
                await self.client.drain()
        await self.client.close()

    @property
    def connected(self) -> bool:
        return self.client is not None and self.client.is_connected and not self.client.fault

    def unready_reason(self) -> str | None:
        if self.is_connected:
            if self.client.fault:
                return self._failure()
            return (self._work.unready_reason() or None) if self.connected else "not connected"
        return self._wait.reason or "not connected yet"

    def _failure(self) -> str:
        return (
            f"the connection to NATS has failed: {self.client.fault}. The process ends, so that it "
            "is started again"
        )

    @property
    def is_connected(self) -> bool:
        """Whether the server was reached at least once, so that subscriptions are possible."""
        return self._reached.is_set()

    async def wait_connected(self) -> None:
        await self._reached.wait()

    async def publish(self, events: Sequence[Event]) -> None:
        """Publish events, many per message. Work is kept until it is handled.

        Raises UnavailableError if NATS was never reached, or receivers of work leave no room: the
        caller may publish again, since repetitions are harmless. An event that cannot be encoded or
        exceeds the maximum size is logged and skipped.
        """
        if self.client is None:
            raise UnavailableError("NATS is not connected yet")
        groups: dict[tuple[type[Event], str], list[Event]] = {}
        for event in events:
            groups.setdefault((type(event), event.route), []).append(event)
        try:
            for (kind, route), group in groups.items():
                for first in range(0, len(group), EVENTS_PER_MESSAGE):
                    await self._send(kind, route, group[first : first + EVENTS_PER_MESSAGE])
        except nats.errors.Error as error:
            raise UnavailableError(
                f"NATS has not accepted {len(events)} events: {error!r}"
            ) from error

    def announce(self, kinds: Sequence[type[Event]]) -> None:
        for kind in filter(is_work, kinds):
            UNCONFIRMED.labels(self._name, kind.subject)

    async def request(self, request: Event, reply_type: type[E], *, timeout_s: float = 2.0) -> E:
        """Send a request to one replica of the service that replies to it.

        Raises UnavailableError if there is no valid reply within `timeout_s`; NoRespondersError at
        once if no service is subscribed.
        """
        if self.client is None:
            raise UnavailableError("NATS is not connected yet")
        subject = subjects.request_subject(type(request), request.route)
        try:
            reply = await self.client.request(subject, wire.encode([request]), timeout=timeout_s)
        except nats.errors.NoRespondersError as error:
            raise NoRespondersError(f"no responders for {request.subject}") from error
        except (nats.errors.Error, TimeoutError) as error:
            raise UnavailableError(
                f"no reply to {request.subject} within {timeout_s:g} s"
            ) from error
        return self._first_reply(request, reply.data, reply_type)

    def _first_reply(self, request: Event, data: bytes, reply_type: type[E]) -> E:
        try:
            replies = wire.decode(data, reply_type)
        except RequestError as error:
            if request.route:
                self._note_refused(request.route, str(error))
            raise UnavailableError(f"the reply to {request.subject} is none: {error}") from error
        if not replies:
            raise UnavailableError(f"the reply to {request.subject} was empty")
        return replies[0]

    async def reply(
        self,
        kind: type[Event],
        group: str,
        route: str,
        reply: Reply,
        *,
        concurrency: int = 1,
    ) -> Subscription:
        """Reply to requests of `kind` (for `route` only, if given) as one replica of `group`."""
        return await self._replies.subscribe(kind, group, route, reply, concurrency=concurrency)

    async def reply_raw(
        self, subject: str, group: str, reply: Callable[[bytes], Awaitable[bytes]]
    ) -> Subscription:
        """Reply to all raw requests that wait at once: `reply` has them take turns."""
        return await self._replies.subscribe_raw(subject, group, reply)

    async def subscribe(
        self, kinds: Sequence[type[Event]], *, group: str, route: str = ""
    ) -> Inbox:
        """Receive work as one replica of `group`, and all broadcasts, or those for `route`."""
        inbox = Inbox(on_refused=self._note_refused)
        for kind in kinds:
            if is_work(kind):
                queue = group
                subject = subjects.subscribe_subject(kind)
                callback = inbox.receive_work(kind, self._confirmations)
                if self._handlers is not None:
                    self._handlers[kind] = inbox
            else:
                queue = ""
                subject = subjects.subscribe_subject(kind, route)
                callback = inbox.receive_broadcasts(kind)
            await self._receive(inbox, kind, subject, queue, callback)
        return inbox

    async def observe(self, kinds: Sequence[type[Event]]) -> Inbox:
        """Receive copies, work included, without consuming it."""
        inbox = Inbox()
        for kind in kinds:
            callback = inbox.receive_broadcasts(kind)
            for subject in subjects.observed_subjects(kind):
                await self._receive(inbox, kind, subject, "", callback)
        return inbox

    async def _receive(
        self, inbox: Inbox, kind: type[Event], subject: str, queue: str, callback: Any
    ) -> None:
        subscription = await self.client.subscribe(subject, queue=queue, cb=callback)
        self.client.rates.watch(subscription._id, kind)  # noqa: SLF001 - it has no other name
        inbox.subscriptions.append(subscription)

    async def receive_raw(self, subject: str, receive: Callable[[bytes], None]) -> Subscription:
        async def pass_on(message: Any) -> None:
            receive(message.data)

        return await self.client.subscribe(subject, cb=pass_on)

    def _note_refused(self, node: str, reason: str) -> None:
        self.on_refused(node, reason)

    def _messages(self, events: Sequence[Event]) -> Iterator[tuple[Sequence[Event], bytes]]:
        try:
            data = wire.encode(events)
        except RequestError as error:
            why = str(error)
        else:
            most = self.client.max_payload - RESERVED_BYTES
            if len(data) <= most:
                yield events, data
                return
            why = f"{len(data)} bytes exceed the limit of {most}; increase max_payload of NATS"
        if len(events) > 1:
            half = len(events) // 2
            yield from self._messages(events[:half])
            yield from self._messages(events[half:])
        else:
            logger.error("skipped an event: %s: %.200r", why, events[0])

    async def _send(self, kind: type[Event], route: str, events: list[Event]) -> None:
        if self._hand_over(kind, route, events) or kind.delivery is Delivery.COPY:
            await self._copy(subjects.copy_subject(kind, route), events)
            return
        subject = subjects.publish_subject(kind, route)
        for some, data in self._messages(events):
            if is_work(kind):
                await self._work.send(kind, subject, data, events=len(some))
            else:
                await self.client.publish(subject, data)

    def _hand_over(self, kind: type[Event], route: str, events: list[Event]) -> bool:
        """Return False if work must be sent."""
        inbox = self._handlers.get(kind) if self._handlers and is_work(kind) else None
        if inbox is None or not inbox.takes_more:
            return False
        return self._work.hand_over(kind, subjects.publish_subject(kind, route), events, inbox)

    async def _copy(self, subject: str, events: list[Event]) -> None:
        if self._copies.wants(subject):
            for _, data in self._messages(events):
                await self._copies.send(subject, data)

"""The bus on NATS: durable work queues, broadcasts and request-reply.

Work travels on one JetStream stream with explicit acknowledgement; each durable consumer pushes to
the queue group of its service's replicas. `WorkQueue` describes what happens without JetStream.
Events about another node than their subject names are dropped, since the server restricts a node's
agent to the subjects of its node.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.model.clock import end
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.event import Delivery, Event
from shared.nats import subjects, wire
from shared.nats.connection import ConnectWait, connected
from shared.nats.inbox import EVENTS_PER_MESSAGE, Inbox, of_its_node
from shared.nats.work_queue import WorkQueue

logger = logging.getLogger(__name__)

AGAIN_S = 0.5
"""Seconds between attempts to connect for the first time."""
HEADERS_BYTES = 1024
"""Reserved for headers in a message of the maximum size."""

E = TypeVar("E", bound=Event)


class NoRespondersError(UnavailableError):
    """No service is subscribed that could reply to a request."""


class Bus:
    """A connection that reconnects. Publishing raises UnavailableError while it is down."""

    def __init__(
        self,
        client: Client | None,
        *,
        name: str,
        creates_stream: bool,
        replaces_stream: bool,
        copies: int,
    ) -> None:
        self.client: Any = None
        self.work: WorkQueue
        self._new_work_queue = partial(
            WorkQueue,
            service=name,
            creates_stream=creates_stream,
            replaces_stream=replaces_stream,
            copies=copies,
        )
        self._reached = asyncio.Event()
        self._wait = ConnectWait()
        if client is not None:
            self._take(client)
            self._reached.set()

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        credentials: ClientCredentials = NO_CREDENTIALS,
        creates_stream: bool = True,
        replaces_stream: bool = False,
        copies: int = 1,
        patience_s: float = 30.0,
    ) -> AsyncIterator["Bus"]:
        """Connect, and stay connected until the context exits.

        `creates_stream`: create a missing stream, with `copies` replicas on a NATS cluster;
        `replaces_stream`: replace one that stores nothing. JetStream may be unavailable. Raises
        UnavailableError if no server accepts the login within `patience_s` seconds, RequestError if
        a file cannot be read.
        """
        client = await connected(url, name=name, credentials=credentials, patience_s=patience_s)
        bus = cls(
            client,
            name=name,
            creates_stream=creates_stream,
            replaces_stream=replaces_stream,
            copies=copies,
        )
        watch = asyncio.create_task(bus.work.watch())
        try:
            await bus.work.ensure(first=True)
            yield bus
        finally:
            await end(watch)
            await bus._leave()

    @classmethod
    @contextlib.asynccontextmanager
    async def connect_later(
        cls,
        url: str,
        *,
        name: str,
        credentials: ClientCredentials = NO_CREDENTIALS,
        creates_stream: bool = False,
        replaces_stream: bool = False,
        copies: int = 1,
        patience_s: float = 30.0,
    ) -> AsyncIterator["Bus"]:
        """Yield at once and connect in the background like `connect`, without a time limit.

        Refusals and unreadable files are retried, too: users and secrets may be created later.
        Until `wait_connected` returns, publishing and requests raise UnavailableError. Each reason
        is logged once; `unready_reason` returns it. An attempt times out after `patience_s`
        seconds.
        """
        bus = cls(
            None,
            name=name,
            creates_stream=creates_stream,
            replaces_stream=replaces_stream,
            copies=copies,
        )
        async with asyncio.TaskGroup() as tasks:
            reaching = tasks.create_task(bus._reach(url, name, credentials, patience_s))
            try:
                yield bus
            finally:
                await end(reaching)
                await bus._leave()

    async def _reach(
        self, url: str, name: str, credentials: ClientCredentials, patience_s: float
    ) -> None:
        while not self.is_connected:
            try:
                self._take(
                    await connected(
                        url,
                        name=name,
                        credentials=credentials,
                        patience_s=patience_s,
                        on_failure=self._wait.note,
                    )
                )
            except LeaseholdError as error:
                self._wait.note(str(error))
                await asyncio.sleep(AGAIN_S)
            else:
                await self.work.ensure(first=True)
                self._reached.set()
        self._wait.over()
        await self.work.watch()

    def _take(self, client: Client) -> None:
        self.client, self.work = client, self._new_work_queue(client)

    async def _leave(self) -> None:
        if self.client is None:
            return
        with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
            async with asyncio.timeout(3):
                await self.client.drain()
        await self.client.close()

    @property
    def connected(self) -> bool:
        """Whether the connection is up now."""
        return self.client is not None and bool(self.client.is_connected)

    def unready_reason(self) -> str | None:
        """Return why NATS cannot be used now, or None."""
        if self.is_connected:
            return (self.work.fault or None) if self.connected else "not connected"
        return self._wait.reason or "not connected yet"

    @property
    def is_connected(self) -> bool:
        """Whether the server was reached at least once, so that subscriptions are possible."""
        return self._reached.is_set()

    async def wait_connected(self) -> None:
        """Wait until the first connection."""
        await self._reached.wait()

    async def publish(self, events: Sequence[Event], *, traceparent: str = "") -> None:
        """Publish events, many per message; return when the work among them is stored or received.

        Order is preserved within one type and route. Raises UnavailableError if NATS did not
        confirm: the caller may publish again, since repetitions are dropped or harmless. An event
        that cannot be encoded or exceeds the maximum size is logged and skipped, so that it does
        not block others.
        """
        if self.client is None:
            raise UnavailableError("NATS is not connected yet")
        groups: dict[tuple[type[Event], str], list[Event]] = {}
        for event in events:
            groups.setdefault((type(event), event.route), []).append(event)
        sending = [
            self._send(kind, route, some, data, traceparent)
            for (kind, route), group in groups.items()
            for at in range(0, len(group), EVENTS_PER_MESSAGE)
            for some, data in self._messages(group[at : at + EVENTS_PER_MESSAGE])
        ]
        try:
            if len(sending) == 1:
                await sending[0]
            else:
                await asyncio.gather(*sending)
        except (nats.errors.Error, TimeoutError) as error:
            raise UnavailableError(
                f"NATS has not confirmed {len(events)} events: {error!r}"
            ) from error

    async def request(self, request: Event, reply_type: type[E], *, timeout_s: float = 2.0) -> E:
        """Send a request to one replica of the service that replies to it.

        Raises UnavailableError if there is no reply within `timeout_s` seconds; NoRespondersError
        at once if no service is subscribed.
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
        replies = wire.decode(reply.data, reply_type)
        if not replies:
            raise UnavailableError(f"the reply to {request.subject} was empty")
        return replies[0]

    async def reply(
        self, kind: type[Event], group: str, route: str, reply: Callable[[Any], Any]
    ) -> Subscription:
        """Reply to requests of `kind` (for `route` only, if given) as one replica of `group`."""

        async def receive(message: Msg) -> None:
            try:
                requests = of_its_node(wire.decode(message.data, kind), message.subject)
                response = await reply(requests[0]) if requests else None
            except LeaseholdError as error:
                logger.warning("no reply to %s: %s", kind.subject, error)
                return
            if response is not None:
                await message.respond(wire.encode([response]))

        subject = subjects.reply_subject(kind, route)
        return await self.client.subscribe(subject, queue=group, cb=receive)

    async def reply_raw(
        self, subject: str, group: str, reply: Callable[[bytes], Awaitable[bytes]]
    ) -> Subscription:
        """Reply to raw requests on a subject as one replica of `group`, one after the other.

        A known error is logged, and no reply is sent.
        """

        async def receive(message: Msg) -> None:
            try:
                await message.respond(await reply(message.data))
            except LeaseholdError as error:
                logger.warning("no reply on %s: %s", subject, error)

        return await self.client.subscribe(subject, queue=group, cb=receive)

    async def subscribe(
        self, kinds: Sequence[type[Event]], *, durable: str, route: str = ""
    ) -> Inbox:
        """Subscribe to events of `kinds`: to work as one replica of `durable`, to every broadcast.

        With a `route`, only broadcasts for that route are received.
        """
        inbox = Inbox()
        work = [kind for kind in kinds if kind.delivery is Delivery.WORK]
        broadcasts = [kind for kind in kinds if kind.delivery is Delivery.BROADCAST]
        if work:
            await self.work.subscribe(inbox, work, durable)
        for kind in broadcasts:
            subject = subjects.subscribe_subject(kind, route)
            callback = inbox.receive_broadcasts(kind)
            inbox.subscriptions.append(await self.client.subscribe(subject, cb=callback))
        return inbox

    async def observe(self, kinds: Sequence[type[Event]]) -> Inbox:
        """Subscribe to copies of events of `kinds`, work included, without consuming it."""
        inbox = Inbox()
        for kind in kinds:
            subject = subjects.subscribe_subject(kind)
            callback = inbox.receive_broadcasts(kind)
            inbox.subscriptions.append(await self.client.subscribe(subject, cb=callback))
        return inbox

    def _messages(self, events: list[Event]) -> Iterator[tuple[list[Event], bytes]]:
        """Encode events of one type, in one message if it is small enough for the server.

        An event that is too large or cannot be encoded is logged and skipped.
        """
        try:
            data = wire.encode(events)
        except RequestError as error:
            why = str(error)
        else:
            most = self.client.max_payload - HEADERS_BYTES
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

    async def _send(
        self, kind: type[Event], route: str, events: list[Event], data: bytes, traceparent: str
    ) -> None:
        headers = {"traceparent": traceparent} if traceparent else {}
        if kind.delivery is Delivery.BROADCAST:
            subject = subjects.publish_subject(kind, route)
            await self.client.publish(subject, data, headers=headers or None)
            return
        ids = [event.event_id for event in events]
        if all(ids):
            digest = hashlib.blake2s("\n".join(ids).encode(), digest_size=16).hexdigest()
            headers["Nats-Msg-Id"] = digest
        await self.work.send(kind, route, data, headers)

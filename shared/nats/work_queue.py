"""The queue of work: on JetStream, or directly between services while JetStream stores nothing.

Work that JetStream does not confirm within `CONFIRM_S` is sent by core NATS request to one replica
of the service that handles it. From then on all work of this connection goes this way, until
JetStream stores a probe, which is sent every `WATCH_S`. Work that came directly is only in the
process that received it, so both changes are followed by a resync: the probe is a
`StreamRecovered`. A node agent may not cause a resync, and its probe is a message without events.
So is the probe of a service that has received direct work and has no fault of its own.

A stream or consumer that is missing (a server lost its disk) is created again. A stream that exists
and stores nothing (its files are gone, its disk was full) stays so: the binder replaces it when a
probe fails.
"""

import asyncio
import contextlib
import datetime
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, StorageType
from prometheus_client import Counter

from shared.model.errors import UnavailableError
from shared.model.events.event import Event
from shared.model.events.pod_events import ResyncRequested, StreamRecovered
from shared.nats import subjects, wire
from shared.nats.inbox import Inbox
from shared.nats.stream import durable_config, ensured, replace_stream, stream_created_at
from shared.nats.subjects import STREAM

logger = logging.getLogger(__name__)

CONFIRM_S = 3.0
"""A message that is not stored within this time is sent directly."""
DIRECT_S = 2.0
"""Time for a replica to confirm the receipt of a direct message."""
WATCH_S = 2.0

DIRECT = Counter(
    "leasehold_direct_messages",
    "Messages of work sent without JetStream, because it did not store them.",
    ["service"],
)


class WorkQueue:
    """The work that one connection sends and receives.

    `creates_stream`: create what is missing; `replaces_stream`: also replace what stores nothing.
    """

    def __init__(
        self,
        client: Any,
        *,
        service: str,
        creates_stream: bool,
        replaces_stream: bool,
        copies: int,
    ) -> None:
        self.stream: JetStreamContext = client.jetstream(timeout=CONFIRM_S)
        self.fault = ""
        """Why JetStream does not store work; empty: it does."""
        self._client = client
        self._service = service
        self._creates_stream = creates_stream
        self._replaces_stream = replaces_stream
        self._copies = copies
        self._durables: dict[str, ConsumerConfig] = {}
        self._outdated: set[str] = set()
        """Consumers whose configuration was not yet sent to JetStream."""
        self._inboxes: list[Inbox] = []
        self._replacements = 0
        self._replacing = asyncio.Lock()
        self._is_suspect = False
        """Whether another service sent work directly since the last probe."""
        self._probe_subject = subjects.publish_subject(StreamRecovered)
        self._stored_probes = 0

    async def send(
        self, kind: type[Event], route: str, data: bytes, headers: dict[str, str]
    ) -> None:
        """Send a message of work; return when it is stored, or received by a replica.

        Raises UnavailableError if neither is so.
        """
        subject = subjects.publish_subject(kind, route)
        if not self._creates_stream:
            self._probe_subject = subject
        store = partial(self._store, subject, data, headers)
        send_directly = partial(self._send_directly, kind, route, data, headers)
        for attempt in (send_directly, store) if self.fault else (store, send_directly, store):
            try:
                await attempt()
            except (nats.errors.Error, TimeoutError) as error:
                if not self._client.is_connected:
                    raise UnavailableError(f"NATS has not confirmed work: {error!r}") from error
                failure = error
                if attempt is store:
                    await self._begin_fault(error)
            else:
                return
        reason = f"{self.fault}; no service received {kind.subject} directly: {failure!r}"
        raise UnavailableError(reason) from failure

    async def subscribe(self, inbox: Inbox, kinds: Sequence[type[Event]], durable: str) -> None:
        """Receive work of `kinds` as one replica of `durable`, from the stream and directly."""
        deliver = subjects.deliver(durable)
        filters = [subjects.subscribe_subject(kind) for kind in kinds]
        self._durables[durable] = durable_config(durable, deliver, filters)
        self._inboxes.append(inbox)
        receive_direct = inbox.receive_direct(kinds)

        async def receive(message: Any) -> None:
            self._is_suspect = True
            await receive_direct(message)

        subscriptions = [(deliver, inbox.receive_stored(kinds))]
        subscriptions += [(subjects.direct_subscribe_subject(kind), receive) for kind in kinds]
        for subject, callback in subscriptions:
            inbox.subscriptions.append(
                await self._client.subscribe(subject, queue=durable, cb=callback)
            )
        self._outdated.add(durable)
        await self.ensure(first=True)

    async def ensure(self, *, first: bool = False) -> None:
        """Create the stream and consumers if they are missing, and update new subscriptions.

        Unless it is the `first` time, what was missing is followed by a resync.
        """
        if not self._creates_stream:
            return
        try:
            missing = await ensured(self.stream, self._durables.values(), copies=self._copies)
            for durable in list(self._outdated):
                await self.stream.add_consumer(STREAM, self._durables[durable])
                self._outdated.discard(durable)
        except (nats.errors.Error, TimeoutError) as error:
            if self._client.is_connected:
                await self._begin_fault(error)
            return
        if missing and not first:
            logger.warning("a NATS stream or consumer was missing and was created again")
            await self._request_resync("work may have been lost with NATS")

    async def watch(self) -> None:
        """Keep stream and consumers, and find out when JetStream stores work again.

        A probe does not wait for the one before, whose stream may have been replaced since.
        """
        async with asyncio.TaskGroup() as probes:
            while True:
                await asyncio.sleep(WATCH_S)
                for inbox in self._inboxes:
                    await inbox.in_progress()
                await self.ensure()
                if self.fault or self._is_suspect:
                    self._is_suspect = False
                    probes.create_task(self._probe())

    async def _probe(self) -> None:
        """Store a message in the stream: only this shows that JetStream stores work.

        A failure means nothing if a later probe was stored meanwhile.
        """
        had_fault, stored_before = bool(self.fault), self._stored_probes
        recovered = [StreamRecovered(service=self._service)]
        data = wire.encode(recovered if had_fault and self._creates_stream else [])
        created_at: datetime.datetime | None = None
        try:
            if self._replaces_stream:
                created_at = await stream_created_at(self.stream)
            await self._store(self._probe_subject, data, {})
        except (nats.errors.Error, TimeoutError) as error:
            if self._client.is_connected and self._stored_probes == stored_before:
                await self._begin_fault(error)
                await self._replace(created_at)
        else:
            self._stored_probes += 1
            if had_fault:
                self._end_fault()

    async def _replace(self, created_at: datetime.datetime | None) -> None:
        """Replace the stream that was created then and stores nothing; every second time in memory.

        None: there is none. Another binder may have replaced it meanwhile.
        """
        if not self._replaces_stream:
            return
        async with self._replacing:
            try:
                if await stream_created_at(self.stream) != created_at:
                    return
                in_memory = self._replacements % 2 == 1
                self._replacements += 1
                storage = StorageType.MEMORY if in_memory else StorageType.FILE
                await replace_stream(self.stream, copies=self._copies, storage=storage)
            except (nats.errors.Error, TimeoutError) as error:
                logger.debug("the stream was not replaced: %r", error)
            else:
                where = " in memory" if in_memory else ""
                logger.warning("replaced the stream %s%s, because it stored nothing", STREAM, where)

    def _end_fault(self) -> None:
        if self.fault:
            logger.info("JetStream stores work again")
            self.fault, self._replacements = "", 0

    async def _begin_fault(self, error: Exception) -> None:
        if self.fault:
            return
        why = (
            f"no answer within {CONFIRM_S:g} s" if isinstance(error, TimeoutError) else repr(error)
        )
        self.fault = (
            f"JetStream is not available on NATS ({why}), services send work to each other "
            "directly: start nats-server with -js, check its disk and its log, and restart it if "
            "it has disabled JetStream"
        )
        logger.warning("%s", self.fault)
        if self._creates_stream:
            await self._request_resync("work may be stuck in JetStream")

    async def _request_resync(self, reason: str) -> None:
        data = wire.encode([ResyncRequested(reason=reason)])
        with contextlib.suppress(nats.errors.Error):  # the connection was lost
            await self._client.publish(subjects.publish_subject(ResyncRequested), data)

    async def _store(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        await self.stream.publish(subject, data, stream=STREAM, headers=dict(headers))

    async def _send_directly(
        self, kind: type[Event], route: str, data: bytes, headers: dict[str, str]
    ) -> None:
        subject = subjects.direct_publish_subject(kind, route)
        await self._client.request(subject, data, timeout=DIRECT_S, headers=headers or None)
        DIRECT.labels(self._service).inc()

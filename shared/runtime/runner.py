"""One service on one bus: hears, handles, publishes, acknowledges.

What a handler raises decides what becomes of its message: RequestError gives it up, ConflictError
asks for it again at once, UnavailableError after a pause; anything else is a bug, logged with its
traceback, tried a few times and then set aside.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from opentelemetry.trace import Span, SpanKind
from prometheus_client import Counter, Histogram

from shared.model.errors import ConflictError, LeaseholdError, RequestError, UnavailableError
from shared.model.events.event import Event
from shared.nats.bus import Bus
from shared.nats.inbox import DeliveredMessage, Inbox
from shared.nats.stream import ACK_WAIT_S
from shared.nats.subjects import durable_of
from shared.runtime import telemetry
from shared.runtime.service import Role, roles_of
from shared.runtime.wait_reasons import WaitReasons

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
ATTEMPTS = 5
NOT_HEARING = "nothing is heard yet"
GC_THRESHOLD = (20_000, 20, 50)
"""Collections are rare: a batch makes tens of thousands of objects, and hardly any cycles."""

HANDLED = Counter(
    "leasehold_events_handled",
    "Events handled, by what became of them; for loops and sources, how often a bug ended them.",
    ["service", "handler", "outcome"],
)
PUBLISHED = Counter("leasehold_events_published", "Events published.", ["service", "subject"])
HANDLING = Histogram(
    "leasehold_handling_seconds",
    "Time to handle one batch, publishing included.",
    ["service", "handler"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
BATCH = Histogram(
    "leasehold_batch_events",
    "Events in one batch.",
    ["service", "handler"],
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
)


T = TypeVar("T")


class Runner:
    """One service on one bus."""

    def __init__(
        self,
        name: str,
        service: object,
        bus: Bus,
        tracing: telemetry.Tracing,
        *,
        goes_ahead: bool = False,
        begin: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self.service = service
        self.bus = bus
        self.tracing = tracing
        self.goes_ahead = goes_ahead
        self.begin = begin
        self.route = str(getattr(service, "route", ""))
        self.waits = NOT_HEARING
        """Why it does not hear, or cannot say, what it should; empty: it does."""
        self.tasks: list[asyncio.Task[None]] = []
        self._reasons = WaitReasons()

    async def run(self, started: asyncio.Event) -> None:
        """Run every role of the service until cancelled, once NATS is reached.

        Who goes ahead has its loops begin at once: what they do must not wait. `begin` is done
        once everything is heard, and again if NATS does not take what it says.
        """
        inboxes: list[tuple[Role, Inbox]] = []
        async with asyncio.TaskGroup() as tasks:
            try:
                if self.goes_ahead:
                    self._keep(tasks, "loops", self._loop)
                await self.bus.wait_connected()
                for role in roles_of(self.service):
                    if role.kind in {"handles", "observes"}:
                        inboxes.append(
                            (role, await self._surely(role.method, partial(self._inbox, role)))
                        )
                    elif role.kind == "answers":
                        await self._answer(role)
                if self.begin is not None:
                    await self._surely("the start", self.begin)
                for role, inbox in inboxes:
                    for _ in range(role.concurrency):
                        self.tasks.append(tasks.create_task(self._handle(role, inbox)))
                self._keep(tasks, "emits", self._emit)
                if not self.goes_ahead:
                    self._keep(tasks, "loops", self._loop)
                self.waits = ""
                started.set()
                await asyncio.get_running_loop().create_future()
            finally:
                for _, inbox in inboxes:
                    await inbox.close()

    def _keep(
        self, tasks: asyncio.TaskGroup, kind: str, once: Callable[[Role], Awaitable[None]]
    ) -> None:
        for role in roles_of(self.service):
            if role.kind == kind:
                self.tasks.append(tasks.create_task(self._forever(role, once)))

    async def _inbox(self, role: Role) -> Inbox:
        if role.kind == "observes":
            return await self.bus.observe(role.consumes)
        return await self.bus.subscribe(
            role.consumes, durable=durable_of(self.name, role.method), route=self.route
        )

    async def _answer(self, role: Role) -> None:
        method = getattr(self.service, role.method)

        async def reply(question: Event) -> Event:
            (inside,), spans = self.tracing.start(
                f"{self.name} {role.method}", [question], kind=SpanKind.SERVER
            )
            try:
                answer: Event = await method(inside)
            except LeaseholdError:
                raise
            except Exception as error:
                logger.exception("%s met a bug", role.method)
                raise UnavailableError(f"{role.method} met a bug: {error!r}") from error
            finally:
                telemetry.end(spans)
            return answer

        await self.bus.reply(role.consumes[0], self.name, self.route, reply)

    async def _handle(self, role: Role, inbox: Inbox) -> None:
        while True:
            await self._handle_batch(role, await inbox.batch())

    async def _handle_batch(self, role: Role, batch: list[DeliveredMessage]) -> None:
        """Handle messages together; if that meets a refusal or a bug, each one alone."""
        error = await self._try_batch(role, batch)
        if error is None or len(batch) == 1 or isinstance(error, UnavailableError):
            await self._settle(role, batch, error)
            return
        for delivered in batch:
            await self._settle(role, [delivered], await self._try_batch(role, [delivered]))

    async def _settle(
        self, role: Role, batch: list[DeliveredMessage], error: Exception | None
    ) -> None:
        if isinstance(error, UnavailableError):
            self._reasons.report(role.method, str(error))
        outcome = await _settle(batch, role, error)
        events = sum(len(delivered.events) for delivered in batch)
        HANDLED.labels(self.name, role.method, outcome).inc(events)

    async def _try_batch(self, role: Role, batch: list[DeliveredMessage]) -> Exception | None:
        events = [event for delivered in batch for event in delivered.events]
        inside: Sequence[Event] = events
        spans: list[Span] = []
        if role.kind == "handles":
            inside, spans = self.tracing.start(
                f"{self.name} {role.method}", events, kind=SpanKind.CONSUMER
            )
        began = time.perf_counter()
        error: Exception | None = None
        try:
            await self._busy_while(batch, self._say(getattr(self.service, role.method)(inside)))
        except Exception as raised:  # noqa: BLE001 - the runtime's one loop
            error = raised
        telemetry.end(spans, error)
        _log(role, inside, error)
        HANDLING.labels(self.name, role.method).observe(time.perf_counter() - began)
        BATCH.labels(self.name, role.method).observe(len(events))
        return error

    async def _busy_while(
        self, batch: list[DeliveredMessage], working: Coroutine[Any, Any, None]
    ) -> None:
        """Wait for the work; keep its messages ours while it takes long."""
        task = asyncio.ensure_future(working)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=ACK_WAIT_S / 2)
                if done:
                    return task.result()
                for delivered in batch:
                    await delivered.in_progress()
        finally:
            task.cancel()

    async def _say(self, answering: Awaitable[Sequence[Event] | None]) -> None:
        await self._publish(list(await answering or ()))

    async def _publish(self, events: Sequence[Event]) -> None:
        if not events:
            return
        first = next((trace for event in events if (trace := getattr(event, "trace", ""))), "")
        await self.bus.publish(events, traceparent=first)
        for event in events:
            PUBLISHED.labels(self.name, event.subject).inc()

    async def _emit(self, role: Role) -> None:
        async for events in getattr(self.service, role.method)():
            inside, spans = self.tracing.start(
                f"{self.name} {role.method}", list(events), kind=SpanKind.PRODUCER
            )
            try:
                await self._surely(role.method, partial(self._publish, inside))
            finally:
                telemetry.end(spans)

    async def _surely(self, who: str, act: Callable[[], Awaitable[T]]) -> T:
        """Do it, again and again while NATS is away: a source's facts, for one, are told once."""
        while True:
            try:
                return await act()
            except UnavailableError as error:
                self._reasons.report(who, str(error))
                if self.waits:
                    self.waits = str(error)
                await asyncio.sleep(PAUSE_S)

    async def _loop(self, role: Role) -> None:
        await getattr(self.service, role.method)()

    async def _forever(self, role: Role, once: Callable[[Role], Awaitable[None]]) -> None:
        while True:
            try:
                await once(role)
            except LeaseholdError as error:
                self._reasons.report(role.method, str(error))
            except Exception:
                HANDLED.labels(self.name, role.method, "bug").inc()
                logger.exception("%s ended by a bug; again in %g s", role.method, PAUSE_S)
            await asyncio.sleep(PAUSE_S)


def _log(role: Role, events: Sequence[Event], error: Exception | None) -> None:
    """Write a line per event, with its pod and trace, where such lines are wanted."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    outcome = "is done" if error is None else f"failed: {error}"
    for event in events:
        about = {
            "pod": telemetry.pod_attributes(event).get("k8s.pod.uid", ""),
            "trace": getattr(event, "trace", ""),
        }
        logger.debug("%s of %s %s", role.method, event.subject, outcome, extra=about)


async def _settle(batch: list[DeliveredMessage], role: Role, error: Exception | None) -> str:
    """Tell the queue what became of a batch, and return that in one word."""
    match error:
        case None:
            outcome, telling = "done", [delivered.ack() for delivered in batch]
        case RequestError():
            logger.info("%s gives up %d messages: %s", role.method, len(batch), error)
            outcome, telling = "refused", [delivered.terminate() for delivered in batch]
        case ConflictError():
            logger.debug("%s asks again: %s", role.method, error)
            outcome, telling = "conflict", [delivered.nak() for delivered in batch]
        case UnavailableError():
            outcome, telling = "unavailable", [delivered.nak(PAUSE_S) for delivered in batch]
        case _:
            logger.error("%s met a bug", role.method, exc_info=error)
            outcome, telling = "bug", [_after_bug(delivered) for delivered in batch]
    for told in telling:
        await told
    return outcome


async def _after_bug(delivered: DeliveredMessage) -> None:
    if delivered.attempts < ATTEMPTS:
        return await delivered.nak(PAUSE_S)
    logger.error("set aside after %d attempts: %r", delivered.attempts, delivered.events)
    return await delivered.terminate()

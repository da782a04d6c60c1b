"""Running a service: hears, handles, publishes, acknowledges, until told to stop.

What a handler raises decides what becomes of its message: RequestError gives it up, ConflictError
asks for it again at once, UnavailableError after a pause; anything else is a bug, logged with its
traceback, tried a few times and then set aside.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from opentelemetry.trace import Span, SpanKind
from prometheus_client import Counter, Histogram

from shared.clients.bus import Bus
from shared.clients.bus_inbox import Delivered, Inbox
from shared.clients.bus_stream import ACK_WAIT_S
from shared.clients.cancelling import end
from shared.clients.subjects import durable_of
from shared.model.errors import ConflictError, LeaseholdError, RequestError, UnavailableError
from shared.model.event import Event
from shared.runtime import health, telemetry
from shared.runtime.reporting import reporting
from shared.runtime.service import Role, roles_of
from shared.runtime.settings import ServiceSettings

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
ATTEMPTS = 5
GC_THRESHOLD = (20_000, 20, 50)
"""Collections are rare: a batch makes tens of thousands of objects, and hardly any cycles."""

HANDLED = Counter(
    "leasehold_events_handled",
    "Events handled, by what became of them.",
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


class Runner:
    """One service on one bus."""

    def __init__(self, name: str, service: object, bus: Bus, tracing: telemetry.Tracing) -> None:
        self.name = name
        self.service = service
        self.bus = bus
        self.tracing = tracing
        self.route = str(getattr(service, "route", ""))
        self.tasks: list[asyncio.Task[None]] = []

    async def run(self, started: asyncio.Event) -> None:
        """Run every role of the service until cancelled.

        Where NATS was not reached yet, loops begin without it: what they do must not wait.
        """
        inboxes: list[tuple[Role, Inbox]] = []
        goes_ahead = not self.bus.is_reached
        async with asyncio.TaskGroup() as tasks:
            try:
                if goes_ahead:
                    self._begin(tasks, "loops", self._loop)
                    await self.bus.reached()
                for role in roles_of(self.service):
                    if role.kind in {"handles", "overhears"}:
                        inboxes.append((role, await self._inbox(role)))
                    elif role.kind == "answers":
                        await self._answer(role)
                for role, inbox in inboxes:
                    for _ in range(role.concurrency):
                        self.tasks.append(tasks.create_task(self._handle(role, inbox)))
                self._begin(tasks, "emits", self._emit)
                if not goes_ahead:
                    self._begin(tasks, "loops", self._loop)
                started.set()
                await asyncio.get_running_loop().create_future()
            finally:
                for _, inbox in inboxes:
                    await inbox.close()

    def _begin(
        self, tasks: asyncio.TaskGroup, kind: str, once: Callable[[Role], Awaitable[None]]
    ) -> None:
        for role in roles_of(self.service):
            if role.kind == kind:
                self.tasks.append(tasks.create_task(self._forever(role, once)))

    async def _inbox(self, role: Role) -> Inbox:
        if role.kind == "overhears":
            return await self.bus.overhear(role.hears)
        return await self.bus.hear(
            role.hears, durable=durable_of(self.name, role.method), route=self.route
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

        await self.bus.answer(role.hears[0], self.name, self.route, reply)

    async def _handle(self, role: Role, inbox: Inbox) -> None:
        while True:
            await self._handle_batch(role, await inbox.batch())

    async def _handle_batch(self, role: Role, batch: list[Delivered]) -> None:
        """Handle messages together; if that meets a refusal or a bug, each one alone."""
        error = await self._try_batch(role, batch)
        if error is None or len(batch) == 1 or isinstance(error, UnavailableError):
            await self._settle(role, batch, error)
            return
        for delivered in batch:
            await self._settle(role, [delivered], await self._try_batch(role, [delivered]))

    async def _settle(self, role: Role, batch: list[Delivered], error: Exception | None) -> None:
        outcome = await _settle(batch, role, error)
        events = sum(len(delivered.events) for delivered in batch)
        HANDLED.labels(self.name, role.method, outcome).inc(events)

    async def _try_batch(self, role: Role, batch: list[Delivered]) -> Exception | None:
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

    async def _busy_while(self, batch: list[Delivered], working: Coroutine[Any, Any, None]) -> None:
        """Wait for the work; keep its messages ours while it takes long."""
        task = asyncio.ensure_future(working)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=ACK_WAIT_S / 2)
                if done:
                    return task.result()
                for delivered in batch:
                    await delivered.busy()
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
                await self._publish_surely(inside)
            finally:
                telemetry.end(spans)

    async def _publish_surely(self, events: Sequence[Event]) -> None:
        """Publish, again and again while NATS is away: a source's facts are told once."""
        while True:
            try:
                return await self._publish(events)
            except UnavailableError as error:
                logger.warning("%s; trying again", error)
                await asyncio.sleep(PAUSE_S)

    async def _loop(self, role: Role) -> None:
        await getattr(self.service, role.method)()

    async def _forever(self, role: Role, once: Callable[[Role], Awaitable[None]]) -> None:
        while True:
            try:
                await once(role)
            except LeaseholdError as error:
                logger.warning("%s: %s; again in %g s", role.method, error, PAUSE_S)
            except Exception:
                logger.exception("%s ended by a bug; again in %g s", role.method, PAUSE_S)
            await asyncio.sleep(PAUSE_S)


def _log(role: Role, events: Sequence[Event], error: Exception | None) -> None:
    """Write a line per event, with its pod and trace, where such lines are wanted."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    outcome = "is done" if error is None else f"failed: {error}"
    for event in events:
        about = {
            "pod": telemetry.facts_of(event).get("k8s.pod.uid", ""),
            "trace": getattr(event, "trace", ""),
        }
        logger.debug("%s of %s %s", role.method, event.subject, outcome, extra=about)


async def _settle(batch: list[Delivered], role: Role, error: Exception | None) -> str:
    """Tell the queue what became of a batch, and return that in one word."""
    match error:
        case None:
            outcome, telling = "done", [delivered.done() for delivered in batch]
        case RequestError():
            logger.info("%s gives up %d messages: %s", role.method, len(batch), error)
            outcome, telling = "refused", [delivered.give_up() for delivered in batch]
        case ConflictError():
            logger.debug("%s asks again: %s", role.method, error)
            outcome, telling = "conflict", [delivered.again() for delivered in batch]
        case UnavailableError():
            logger.warning("%s waits: %s", role.method, error)
            outcome, telling = "unavailable", [delivered.again(PAUSE_S) for delivered in batch]
        case _:
            logger.error("%s met a bug", role.method, exc_info=error)
            outcome, telling = "bug", [_after_bug(delivered) for delivered in batch]
    for told in telling:
        await told
    return outcome


async def _after_bug(delivered: Delivered) -> None:
    if delivered.attempts < ATTEMPTS:
        return await delivered.again(PAUSE_S)
    logger.error("set aside after %d attempts: %r", delivered.attempts, delivered.events)
    return await delivered.give_up()


async def serve(
    name: str,
    service: object,
    *,
    bus: Bus,
    settings: ServiceSettings,
    tracing: telemetry.Tracing | None = None,
    probes: Mapping[str, health.Probe] | None = None,
    leave: Callable[[], Awaitable[None]] | None = None,
    needs_nats: bool = True,
) -> None:
    """Run a service until SIGTERM or SIGINT: health pages, handlers, sources and loops.

    Told to stop, it first waits for `leave`, with everything still running. Who does not need NATS
    is ready without it.
    `settings.run_file` is written once everything is heard and every probe is content.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    checks = dict(probes or {})
    if needs_nats:
        checks = {"nats": lambda: None if bus.connected else "not connected", **checks}
    tracing = tracing or telemetry.open_tracing(name, settings)
    try:
        instance = telemetry.instance_of(name, settings)
        route = str(getattr(service, "route", ""))
        async with (
            health.served(health.application(checks), settings.http) as address,
            reporting(bus, checks, service=name, instance=instance, node=route),
        ):
            runner = Runner(name, service, bus, tracing)
            await _until(stop, runner, checks, settings, address, leave=leave)
    finally:
        await asyncio.to_thread(tracing.close)
        if settings.run_file is not None:
            settings.run_file.unlink(missing_ok=True)


async def _until(
    stop: asyncio.Event,
    runner: Runner,
    checks: Mapping[str, health.Probe],
    settings: ServiceSettings,
    address: str,
    *,
    leave: Callable[[], Awaitable[None]] | None,
) -> None:
    started = asyncio.Event()
    running = asyncio.create_task(runner.run(started))
    stopping = asyncio.create_task(stop.wait())
    announcing = asyncio.create_task(_announce(started, checks, settings, address))
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        elif leave is not None and started.is_set():
            await leave()
    finally:
        await end(announcing)
        await end(running, runner.tasks)
        await end(stopping)


async def _announce(
    started: asyncio.Event,
    checks: Mapping[str, health.Probe],
    settings: ServiceSettings,
    address: str,
) -> None:
    await started.wait()
    while health.unready(checks):  # noqa: ASYNC110 - probes are asked, they do not tell
        await asyncio.sleep(0.05)
    logger.info("ready on http://%s", address)
    if settings.run_file is not None:
        settings.run_file.parent.mkdir(parents=True, exist_ok=True)
        draft = settings.run_file.with_suffix(".new")
        draft.write_text(json.dumps({"pid": os.getpid(), "http": address}))
        draft.replace(settings.run_file)


def run(entry: Callable[[], Coroutine[Any, Any, None]], *, service: str, log_level: str) -> None:
    """Run a service's `entry` to its end; a known error is one line and exit code 1."""
    telemetry.open_logs(service, log_level)
    gc.set_threshold(*GC_THRESHOLD)
    try:
        _runner()(entry())
    except KeyboardInterrupt:
        sys.exit(130)
    except (LeaseholdError, BaseExceptionGroup) as error:
        for known in _known_errors(error):
            sys.stderr.write(f"leasehold {service}: {known}\n")
        sys.exit(1)


def _known_errors(error: BaseException) -> list[BaseException]:
    """Return the errors raised on purpose. Raises `error` itself if there are others in it."""
    if isinstance(error, LeaseholdError):
        return [error]
    if isinstance(error, BaseExceptionGroup):
        return [known for inner in error.exceptions for known in _known_errors(inner)]
    raise error


def _runner() -> Callable[[Coroutine[Any, Any, None]], None]:
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.run
    run_loop: Callable[[Coroutine[Any, Any, None]], None] = uvloop.run
    return run_loop

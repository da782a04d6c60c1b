"""Runs one service on the bus: subscribes, handles, publishes, confirms.

The error that a handler raises decides what happens to its message: RequestError drops it,
ConflictError redelivers it to this replica, UnavailableError to any replica after a pause. Any
other error is a bug: the message is dropped after a few attempts. After drops, `ResyncRequested`
has events published again.
"""

import asyncio
import collections
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from opentelemetry.trace import Span, SpanKind
from prometheus_client import Counter, Histogram

from shared.model.clock import until_tick
from shared.model.errors import ConflictError, LeaseholdError, RequestError, UnavailableError
from shared.model.events.event import Event
from shared.model.events.pod_events import ResyncRequested
from shared.nats.bus import Bus
from shared.nats.inbox import DeliveredMessage, Inbox
from shared.nats.limited_log import LimitedLog
from shared.nats.subjects import group_of
from shared.runtime import telemetry
from shared.runtime.service import Publish, Role, roles_of
from shared.runtime.span_attributes import holder_of, pod_attributes

logger = logging.getLogger(__name__)
_limited = LimitedLog(logger)

STEADY_S = 30.0
"""A reason that did not occur for this time is logged as a warning again."""
MAX_REASONS = 1_000
PAUSE_S = 1.0
"""The pause before a loop that ended with an error starts again."""
CONFLICT_PAUSE_S = 0.01
"""The pause before a message is handled again that another writer was faster with."""
ATTEMPTS = 5
RESYNC_S = 30.0
"""A service requests a resync because of dropped messages at most once in this time."""
NOT_SUBSCRIBED = "not subscribed yet"
BUG = "bug"


class WaitReasons:
    def __init__(self, ticks: Callable[[], float] = time.monotonic) -> None:
        self._ticks = ticks
        self._met: dict[str, float] = {}

    def report(self, what: str, why: str) -> None:
        """Log a warning, unless that was logged within the last `STEADY_S`."""
        now = self._ticks()
        is_new = now - self._met.pop(why, -STEADY_S) >= STEADY_S
        self._met[why] = now
        if len(self._met) > MAX_REASONS:
            del self._met[next(iter(self._met))]
        logger.log(logging.WARNING if is_new else logging.DEBUG, "%s waits: %s", what, why)


HANDLED = Counter(
    "leasehold_events_handled",
    "Events handled, by outcome; for loops and sources, how often a bug ended them.",
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
M = TypeVar("M", Counter, Histogram)


class Runner:
    def __init__(
        self,
        name: str,
        service: object,
        bus: Bus,
        tracing: telemetry.Tracing,
        *,
        beside: object | None = None,
        loops_before_nats: bool = False,
        begin: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self.roles = [*roles_of(service), *(roles_of(beside) if beside else ())]
        self.bus = bus
        self.tracing = tracing
        self.loops_before_nats = loops_before_nats
        self.begin = begin
        self.route = str(getattr(service, "route", ""))
        self.unready_reason = NOT_SUBSCRIBED
        self.tasks: list[asyncio.Task[None]] = []
        self._reasons = WaitReasons()
        self._known_series: dict[tuple[object, ...], Any] = {}
        self._dropped = bus.has_lost_work

    async def run(self, started: asyncio.Event) -> None:
        """Run every role of the service until cancelled, after NATS is connected.

        With `loops_before_nats` the loops start at once.
        """
        inboxes: list[tuple[Role, Inbox]] = []
        async with asyncio.TaskGroup() as tasks:
            try:
                if self.loops_before_nats:
                    self._start_all(tasks, "loops", self._loop)
                await self.bus.wait_connected()
                for role in self.roles:
                    self.bus.announce(role.publishes)
                    if role.kind in {"handles", "observes"}:
                        inboxes.append(
                            (role, await self._retry(role.method, partial(self._inbox, role)))
                        )
                    elif role.kind == "answers":
                        await self._reply(role)
                if self.begin is not None:
                    await self._retry("the start", self.begin)
                for role, inbox in inboxes:
                    for _ in range(role.concurrency):
                        self.tasks.append(tasks.create_task(self._handle(role, inbox)))
                self.tasks.append(tasks.create_task(self._resync_after_drops()))
                self._start_all(tasks, "emits", self._emit)
                if not self.loops_before_nats:
                    self._start_all(tasks, "loops", self._loop)
                self.unready_reason = ""
                started.set()
                await asyncio.get_running_loop().create_future()
            finally:
                for _, inbox in inboxes:
                    await inbox.close()

    def _start_all(
        self, tasks: asyncio.TaskGroup, kind: str, once: Callable[[Role], Awaitable[None]]
    ) -> None:
        for role in self.roles:
            if role.kind == kind:
                self.tasks.append(tasks.create_task(self._forever(role, once)))

    async def _inbox(self, role: Role) -> Inbox:
        if role.kind == "observes":
            return await self.bus.observe(role.consumes)
        return await self.bus.subscribe(
            role.consumes, group=group_of(self.name, role.method), route=self.route
        )

    async def _reply(self, role: Role) -> None:
        method = role.bound()

        async def reply(question: Event) -> Event:
            (inside,), spans = self.tracing.start(_title(role), [question], kind=SpanKind.SERVER)
            try:
                answer: Event = await method(inside)
            except LeaseholdError:
                raise
            except Exception as error:
                _log_bug(role, error)
                raise UnavailableError(f"{role.method} failed with a bug: {error!r}") from error
            finally:
                telemetry.end(spans)
            return answer

        await self.bus.reply(
            role.consumes[0], self.name, self.route, reply, concurrency=role.concurrency
        )

    async def _handle(self, role: Role, inbox: Inbox) -> None:
        while True:
            await self._handle_batch(role, await inbox.batch())
            await inbox.gather(role.gather_s)

    async def _handle_batch(self, role: Role, batch: list[DeliveredMessage]) -> None:
        """Handle each message alone after an error."""
        error = await self._try_batch(role, batch)
        if error is None or len(batch) == 1 or isinstance(error, UnavailableError):
            self._settle(role, batch, error)
            return
        for delivered in batch:
            self._settle(role, [delivered], await self._try_batch(role, [delivered]))

    def _settle(self, role: Role, batch: list[DeliveredMessage], error: Exception | None) -> None:
        if isinstance(error, UnavailableError):
            self._reasons.report(role.method, str(error))
        outcome, dropped = _settle(batch, role, error)
        if dropped:
            self._dropped.set()
        events = sum(len(delivered.events) for delivered in batch)
        self._series(HANDLED, role.method, outcome).inc(events)

    async def _resync_after_drops(self) -> None:
        """A bug may drop the same events again after the resync."""
        while True:
            await self._dropped.wait()
            self._dropped.clear()
            request = ResyncRequested(reason=f"{self.name} has dropped events")
            await self._retry("the resync", partial(self._publish, [request]))
            await asyncio.sleep(RESYNC_S)

    async def _try_batch(self, role: Role, batch: list[DeliveredMessage]) -> Exception | None:
        events = [event for delivered in batch for event in delivered.events]
        inside: Sequence[Event] = events
        spans: list[Span] = []
        if role.kind == "handles":
            inside, spans = self.tracing.start(_title(role), events, kind=SpanKind.CONSUMER)
        began = time.perf_counter()
        error: Exception | None = None
        try:
            await self._publish(list(await role.bound()(inside) or ()))
        except Exception as raised:  # noqa: BLE001 - the runtime's one loop
            error = raised
        telemetry.end(spans, error)
        _log(role, inside, error)
        exemplar = telemetry.exemplar_of(telemetry.context_of(spans[0])) if spans else None
        self._series(HANDLING, role.method).observe(time.perf_counter() - began, exemplar)
        self._series(BATCH, role.method).observe(len(events))
        return error

    async def _publish(self, events: Sequence[Event]) -> None:
        if not events:
            return
        await self.bus.publish(events)
        for subject, count in collections.Counter(event.subject for event in events).items():
            self._series(PUBLISHED, subject).inc(count)

    def _series(self, metric: M, *labels: str) -> M:
        """The library looks up `metric.labels` slowly."""
        key = (metric, *labels)
        series: M | None = self._known_series.get(key)
        if series is None:
            series = self._known_series[key] = metric.labels(self.name, *labels)
        return series

    async def _emit(self, role: Role) -> None:
        async for events in role.bound()():
            inside, spans = self.tracing.start("", list(events), kind=SpanKind.PRODUCER)
            try:
                await self._retry(role.method, partial(self._publish, inside))
            finally:
                telemetry.end(spans)

    async def _retry(self, what: str, act: Callable[[], Awaitable[T]]) -> T:
        """Retry while NATS is down, so that no event of a source is lost."""
        while True:
            try:
                return await act()
            except UnavailableError as error:
                self._reasons.report(what, str(error))
                if self.unready_reason:
                    self.unready_reason = str(error)
                await asyncio.sleep(PAUSE_S)

    async def _loop(self, role: Role) -> None:
        async def publish(events: Sequence[Event]) -> None:
            try:
                await self._publish(events)
            except UnavailableError as error:  # the next step does not wait for NATS
                self._reasons.report(role.method, str(error))
                self._dropped.set()

        await run_loop(role, publish)

    async def _forever(self, role: Role, once: Callable[[Role], Awaitable[None]]) -> None:
        while True:
            try:
                await once(role)
            except LeaseholdError as error:
                self._reasons.report(role.method, str(error))
            except Exception:
                self._series(HANDLED, role.method, BUG).inc()
                logger.exception("%s ended with a bug; restarted in %g s", role.method, PAUSE_S)
            await asyncio.sleep(PAUSE_S)


async def run_loop(role: Role, publish: Publish) -> None:
    """Run until a loop raises; publish what each step of a periodic one returns."""
    method = role.bound()
    if not role.is_periodic:
        await method()
        return
    if role.waits_first:
        await _pause(role)
    while True:
        events = await method()
        if events:
            await publish(events)
        await _pause(role)


async def _pause(role: Role) -> None:
    if role.wait is not None:
        await role.wait(role.owner())
        return
    every_s = role.every_s(role.owner()) if callable(role.every_s) else role.every_s
    await asyncio.sleep(until_tick(every_s or PAUSE_S))


def _title(role: Role) -> str:
    return role.method.replace("_", " ")


def _log(role: Role, events: Sequence[Event], error: Exception | None) -> None:
    if not logger.isEnabledFor(logging.DEBUG):
        return
    outcome = "is done" if error is None else f"failed: {error}"
    for event in events:
        about = {
            "pod": holder_of(pod_attributes(event)),
            "trace": getattr(event, "trace", ""),
        }
        logger.debug("%s of %s %s", role.method, event.subject, outcome, extra=about)


def _settle(batch: list[DeliveredMessage], role: Role, error: Exception | None) -> tuple[str, bool]:
    """Return the outcome for metrics, and whether a message was dropped because of a bug."""
    outcome = _log_outcome(len(batch), role, error)
    for delivered in batch:
        _confirm(delivered, error)
    return outcome, outcome == BUG and any(message.attempts >= ATTEMPTS for message in batch)


def _log_outcome(messages: int, role: Role, error: Exception | None) -> str:
    match error:
        case None:
            return "done"
        case RequestError():
            text = f"{role.method} drops {messages} messages: {error}"
            _limited.write(logging.INFO, f"refused by {role.method}", text)
            return "refused"
        case ConflictError():
            logger.debug("%s retries: %s", role.method, error)
            return "conflict"
        case UnavailableError():
            return "unavailable"
        case _:
            _log_bug(role, error)
            return BUG


def _log_bug(role: Role, error: Exception | None) -> None:
    """Log at a limited rate: a repeated message may be the bug's cause."""
    cause = f"bug {type(error).__name__} in {role.method}"
    _limited.write(logging.ERROR, cause, f"{role.method} failed with a bug", error)


def _confirm(delivered: DeliveredMessage, error: Exception | None) -> None:
    match error:
        case None | RequestError():
            delivered.confirm()
        case ConflictError():
            delivered.retry(CONFLICT_PAUSE_S)
        case UnavailableError():
            delivered.give_back()
        case _:
            _after_bug(delivered)


def _after_bug(delivered: DeliveredMessage) -> None:
    if delivered.attempts < ATTEMPTS:
        delivered.retry(PAUSE_S)
    else:
        events = delivered.events
        text = f"dropped after {delivered.attempts} attempts: {len(events)} events: {events[:1]!r}"
        _limited.write(logging.ERROR, f"dropped {events[0].subject if events else ''}", text)
        delivered.confirm()

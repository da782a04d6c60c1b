"""Writes Events and conditions of pods in the background; Events are merged and rate-limited.

Warnings go first, so that no burst of bindings delays the explanation of a waiting pod.
"""

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from services.binder.clients import PodClient
from services.binder.metrics import count_anomaly
from services.binder.report.explanations import (
    KubernetesEvent,
    condition_patch,
    count_patch,
    event_body,
)
from shared.model.clock import Clock, wait_for_event
from shared.model.errors import ConflictError, RequestError, UnavailableError
from shared.model.names import PodUid
from shared.runtime.service import loops

MAX_QUEUED = 16384
MAX_REMEMBERED = 8192
WRITERS = 8
EVENTS_PER_S = 500.0
BURST = 100.0
COST_WHILE_BUSY = 10.0
"""Events that a normal one counts as while Bindings wait for the API server."""
POD_BURST = 25.0
POD_EVENTS_PER_S = 1 / 60
RETRY_S = 1.0
"""Pause after the API server did not take an Event."""
MAX_QUEUED_CONDITIONS = 16384
MAX_REMEMBERED_CONDITIONS = 16384
CONDITION_WRITERS = 8
MIN_INTERVAL_S = 5.0
"""A pod's message changes at most this often."""
REPEAT_S = 60.0
"""An equal message about a pod is written again after this time."""
CONFLICT_RETRY_S = 0.2
"""Pause before a pod's condition is written again that somebody else has changed."""


class EventRecorder(Protocol):
    def record(self, event: KubernetesEvent, *, once: bool = False) -> None:
        """With `once`, do not count an equal Event up."""
        ...


class NoEvents:
    """kube-scheduler writes the Events of its pods, with our reasons."""

    def record(self, event: KubernetesEvent, *, once: bool = False) -> None:
        """Do nothing."""


@dataclass(slots=True)
class TokenBucket:
    per_s: float
    burst: float
    at: float
    tokens: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.burst

    def take(self, now: float, count: float = 1) -> bool:
        self._fill(now)
        if self.tokens < count:
            return False
        self.tokens -= count
        return True

    def wait_s(self, now: float, count: float = 1) -> float:
        self._fill(now)
        return max(0.0, (count - self.tokens) / self.per_s)

    def _fill(self, now: float) -> None:
        self.tokens = min(self.burst, self.tokens + max(0.0, now - self.at) * self.per_s)
        self.at = max(self.at, now)


@dataclass(slots=True)
class _Occurrences:
    count: int
    first_at: float
    last_at: float
    once: bool = False
    """An equal Event of another replica, or from before a restart, stays as it is."""


@dataclass(eq=False)
class EventWriter:
    api: PodClient
    clock: Clock
    _: KW_ONLY
    per_s: float = EVENTS_PER_S
    burst: float = BURST
    is_busy: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        now = self.clock.ticks()
        self.rate_limit = TokenBucket(self.per_s, self.burst, now)
        self._warnings: OrderedDict[KubernetesEvent, _Occurrences] = OrderedDict()
        self._others: OrderedDict[KubernetesEvent, _Occurrences] = OrderedDict()
        self._counts: OrderedDict[KubernetesEvent, int] = OrderedDict()
        self._pod_rate_limits: OrderedDict[PodUid, TokenBucket] = OrderedDict()
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()

    def record(self, event: KubernetesEvent, *, once: bool = False) -> None:
        if once and (event in self._queue_of(event) or event in self._counts):
            return
        now = self.clock.now()
        ticks = self.clock.ticks()
        if once or self._pod_rate_limit(event.pod, ticks).take(ticks):
            self._add(event, _Occurrences(1, now, now, once))
        else:
            count_anomaly("events_dropped")

    @loops
    async def write_events(self) -> None:
        async with asyncio.TaskGroup() as writers:
            for _ in range(WRITERS):
                writers.create_task(self._write_all())

    def _queue_of(self, event: KubernetesEvent) -> OrderedDict[KubernetesEvent, _Occurrences]:
        return self._warnings if event.warning else self._others

    def _add(self, event: KubernetesEvent, new: _Occurrences) -> None:
        queue = self._queue_of(event)
        queued = queue.get(event)
        if queued is not None:
            queued.count += new.count
            queued.last_at = max(queued.last_at, new.last_at)
        elif len(queue) >= MAX_QUEUED:
            count_anomaly("events_dropped", new.count)
        else:
            queue[event] = new
            self._wake.set()

    async def _write_all(self) -> None:
        while True:
            event, occurrences = await self._next()
            try:
                await self._write(event, occurrences)
            except (UnavailableError, ConflictError):
                self._add(event, occurrences)
                await self.clock.sleep(RETRY_S)
            except RequestError:  # the namespace is being deleted, or RBAC forbids it
                count_anomaly("events_dropped", occurrences.count)

    async def _next(self) -> tuple[KubernetesEvent, _Occurrences]:
        async with self._turn:
            while True:
                now = self.clock.ticks()
                queue = self._warnings or self._others
                cost = COST_WHILE_BUSY if not self._warnings and self.is_busy() else 1
                if not queue:
                    self._wake.clear()
                    await self._wake.wait()
                elif self.rate_limit.take(now, cost):
                    return queue.popitem(last=False)
                else:
                    await self.clock.sleep(self.rate_limit.wait_s(now, cost))

    async def _write(self, event: KubernetesEvent, new: _Occurrences) -> None:
        namespace, name = event.namespace, event.event_name
        count = self._counts.get(event, 0)
        if count:
            try:
                patch = count_patch(count + new.count, new.last_at)
                await self.api.patch_event(namespace, name, patch)
                return self._remember(event, count + new.count)
            except RequestError:  # it has expired
                count = 0
        body = event_body(event, count=new.count, first_at=new.first_at, last_at=new.last_at)
        try:
            await self.api.create_event(namespace, body)
        except ConflictError:  # written by another replica, or before this one was started
            if new.once:
                return self._remember(event, 1)
            count = await self.api.get_event_count(namespace, name)
            if not count:  # it has expired meanwhile, or there was another conflict
                raise
            patch = count_patch(count + new.count, new.last_at)
            await self.api.patch_event(namespace, name, patch)
        self._remember(event, count + new.count)
        return None

    def _remember(self, event: KubernetesEvent, count: int) -> None:
        self._counts[event] = count
        while len(self._counts) > MAX_REMEMBERED:
            self._counts.popitem(last=False)

    def _pod_rate_limit(self, pod: PodUid, now: float) -> TokenBucket:
        rate_limit = self._pod_rate_limits.get(pod)
        if rate_limit is None:
            rate_limit = TokenBucket(POD_EVENTS_PER_S, POD_BURST, now)
            self._pod_rate_limits[pod] = rate_limit
            if len(self._pod_rate_limits) > MAX_REMEMBERED:
                self._pod_rate_limits.popitem(last=False)
        return rate_limit


_MessageKey = tuple[PodUid, bool]
"""A pod, and whether the message is about its planned start."""


@dataclass(slots=True)
class _Message:
    explanation: KubernetesEvent
    events: EventRecorder | None = None
    due: float = 0.0

    @property
    def key(self) -> _MessageKey:
        return self.explanation.pod, self.explanation.is_of_start


@dataclass(eq=False)
class ConditionWriter:
    """The condition PodScheduled=False of waiting pods, written when its message changes.

    It has the newest reason and the newest planned start. A written message is an Event, too.
    """

    conditions: PodClient
    clock: Clock

    def __post_init__(self) -> None:
        self._queued: dict[_MessageKey, _Message] = {}
        self._due: list[tuple[float, _MessageKey]] = []
        self._written: OrderedDict[_MessageKey, tuple[str, float]] = OrderedDict()
        self._wake = asyncio.Event()

    def explain(
        self,
        explanation: KubernetesEvent,
        events: EventRecorder | None = None,
        *,
        after_s: float = 0.0,
    ) -> None:
        """Queue a message, which replaces a queued one about the same.

        An equal one is written, too: another replica may have written since.
        """
        message = _Message(explanation, events)
        _, at = self._written.get(message.key, ("", 0.0))
        self._add(message, max(self.clock.ticks() + after_s, at + MIN_INTERVAL_S))

    def repeat(self, explanation: KubernetesEvent, events: EventRecorder) -> None:
        """Queue a message that may come often: an equal one waits for `REPEAT_S`."""
        key = _Message(explanation).key
        written, at = self._written.get(key, ("", 0.0))
        is_recent = self.clock.ticks() - at < REPEAT_S
        if key in self._queued or written != explanation.message or not is_recent:
            self.explain(explanation, events)

    def forget(self, pod: PodUid) -> None:
        for key in ((pod, False), (pod, True)):
            self._queued.pop(key, None)
            self._written.pop(key, None)

    @loops
    async def write_conditions(self) -> None:
        async with asyncio.TaskGroup() as writers:
            for _ in range(CONDITION_WRITERS):
                writers.create_task(self._write_all())

    def _add(self, message: _Message, due: float) -> None:
        key = message.key
        queued = self._queued.get(message.key)
        if queued is None and len(self._queued) >= MAX_QUEUED_CONDITIONS:
            count_anomaly("conditions_dropped")
            return
        message.due = due if queued is None else min(due, queued.due)
        self._queued[key] = message
        if queued is None or message.due < queued.due:
            heapq.heappush(self._due, (due, key))
            self._wake.set()

    def _again(self, message: _Message, after_s: float) -> None:
        if message.key not in self._queued:
            self._add(message, self.clock.ticks() + after_s)

    async def _write_all(self) -> None:
        while True:
            message = await self._next()
            try:
                is_new = await self._write(message.explanation)
                if is_new and message.events is not None:
                    message.events.record(message.explanation)
            except ConflictError:
                self._again(message, CONFLICT_RETRY_S)
            except UnavailableError:
                self._again(message, RETRY_S)
            except RequestError:
                count_anomaly("conditions_dropped")

    async def _next(self) -> _Message:
        while True:
            now = self.clock.ticks()
            if self._due and self._due[0][0] <= now:
                queued = self._queued.pop(heapq.heappop(self._due)[1], None)
                if queued is not None:
                    return queued
                continue
            self._wake.clear()
            await wait_for_event(self._wake, self._due[0][0] - now if self._due else None)

    async def _write(self, explanation: KubernetesEvent) -> bool:
        """Return whether the condition has changed."""
        namespace, name = explanation.namespace, explanation.name
        observed = await self.conditions.get(namespace, name)
        patch = condition_patch(explanation, observed, self.clock.now())
        if patch is not None:
            await self.conditions.patch_status(namespace, name, patch)
        key = _Message(explanation).key
        self._written[key] = (explanation.message, self.clock.ticks())
        self._written.move_to_end(key)
        while len(self._written) > MAX_REMEMBERED_CONDITIONS:
            self._written.popitem(last=False)
        return patch is not None

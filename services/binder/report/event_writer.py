"""Writes core/v1 Events in the background: merged, rate-limited, and dropped if there are too many.

Equal Events about one pod are one Event with a count. Warnings go first, so that no burst of
bindings can delay the explanation of a waiting pod.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from services.binder.metrics import count_anomaly
from services.binder.pod_client import PodClient
from services.binder.report.explanations import KubernetesEvent, count_patch, event_body
from shared.model.clock import Clock
from shared.model.errors import ConflictError, RequestError, UnavailableError
from shared.model.names import PodUid

MAX_QUEUED = 4096
MAX_REMEMBERED = 8192
WRITERS = 4
EVENTS_PER_S = 50.0
BURST = 100.0
POD_BURST = 25.0
POD_EVENTS_PER_S = 1 / 60
RETRY_S = 1.0


class EventRecorder(Protocol):
    """Writes Kubernetes Events in the background."""

    def record(self, event: KubernetesEvent, *, once: bool = False) -> None:
        """Queue an Event; `once`: do not count an equal one up."""
        ...


class NoEvents:
    """Records nothing: kube-scheduler writes the Events of its pods, with our reasons."""

    def record(self, event: KubernetesEvent, *, once: bool = False) -> None:
        """Do nothing."""


@dataclass(slots=True)
class TokenBucket:
    """A token bucket, full at first: at most `burst` tokens, and `per_s` new ones a second."""

    per_s: float
    burst: float
    tokens: float
    at: float

    @classmethod
    def full(cls, *, per_s: float, burst: float, now: float) -> "TokenBucket":
        """Return a full bucket."""
        return cls(per_s=per_s, burst=burst, tokens=burst, at=now)

    def take(self, now: float) -> bool:
        """Take a token if there is one."""
        self._fill(now)
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True

    def wait_s(self, now: float) -> float:
        """Return how long until there is a token."""
        self._fill(now)
        return max(0.0, (1 - self.tokens) / self.per_s)

    def _fill(self, now: float) -> None:
        self.tokens = min(self.burst, self.tokens + max(0.0, now - self.at) * self.per_s)
        self.at = max(self.at, now)


@dataclass(slots=True)
class _Occurrences:
    """How often something happened since it was last written."""

    count: int
    first_at: float
    last_at: float
    once: bool = False
    """One that another replica wrote, or this one before its restart, stays as it is."""


class EventWriter:
    """Queued Events; `run` writes them."""

    def __init__(
        self,
        api: PodClient,
        clock: Clock,
        *,
        per_s: float = EVENTS_PER_S,
        burst: float = BURST,
    ) -> None:
        self.api = api
        self.clock = clock
        self.rate_limit = TokenBucket.full(per_s=per_s, burst=burst, now=clock.ticks())
        self._warnings: OrderedDict[KubernetesEvent, _Occurrences] = OrderedDict()
        self._others: OrderedDict[KubernetesEvent, _Occurrences] = OrderedDict()
        self._counts: OrderedDict[KubernetesEvent, int] = OrderedDict()
        self._pod_rate_limits: OrderedDict[PodUid, TokenBucket] = OrderedDict()
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        """Held by the one writer that the next Event wakes."""

    def record(self, event: KubernetesEvent, *, once: bool = False) -> None:
        """Queue an Event; `once`: do not count an equal one up."""
        if once and (event in self._queue_of(event) or event in self._counts):
            return
        now, ticks = self.clock.now(), self.clock.ticks()
        if once or self._pod_rate_limit(event.pod, ticks).take(ticks):
            self._add(event, _Occurrences(1, now, now, once))
        else:
            count_anomaly("events_dropped")

    async def run(self) -> None:
        """Write queued Events until cancelled."""
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
                if not queue:
                    self._wake.clear()
                    await self._wake.wait()
                elif self.rate_limit.take(now):
                    return queue.popitem(last=False)
                else:
                    await self.clock.sleep(self.rate_limit.wait_s(now))

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
            rate_limit = TokenBucket.full(per_s=POD_EVENTS_PER_S, burst=POD_BURST, now=now)
            self._pod_rate_limits[pod] = rate_limit
            if len(self._pod_rate_limits) > MAX_REMEMBERED:
                self._pod_rate_limits.popitem(last=False)
        return rate_limit

"""Writes core/v1 Events off the hot path: merged, limited, and dropped rather than piled up.

Equal notes about one pod are one Event with a count. Warnings go before the rest, so that no burst
of bindings can delay the explanation of a pod that waits.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.binder.ports.metrics import Tally
from services.binder.report.explanations import KubernetesEvent, event_body, recount
from services.binder.report.token_bucket import TokenBucket
from shared.model.clock import Clock
from shared.model.errors import ConflictError, RequestError, UnavailableError
from shared.model.names import PodUid

WAITING_MAX = 4096
REMEMBERED = 8192
WRITERS = 4
PER_S = 50.0
BURST = 100.0
POD_BURST = 25.0
POD_PER_S = 1 / 60
PAUSE_S = 1.0


class EventApi(Protocol):
    """Events at the API server."""

    async def create_event(self, namespace: str, body: Mapping[str, Any]) -> None:
        """Create one. Raises ConflictError if there is one of that name."""
        ...

    async def patch_event(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Change one. Raises RequestError if there is none (any more)."""
        ...

    async def event_count(self, namespace: str, name: str) -> int:
        """Return how often it happened so far, as stored; 0 if there is none."""
        ...


@dataclass(slots=True)
class _Tale:
    """How often something happened since it was last written."""

    count: int
    first_at: float
    last_at: float


class EventWriter:
    """Notes that wait to be written; `work` writes them."""

    def __init__(
        self,
        log: EventApi,
        clock: Clock,
        tally: Tally,
        *,
        per_s: float = PER_S,
        burst: float = BURST,
    ) -> None:
        self.log = log
        self.clock = clock
        self.tally = tally
        self.bucket = TokenBucket.full(per_s=per_s, burst=burst, now=clock.ticks())
        self._lanes: tuple[
            OrderedDict[KubernetesEvent, _Tale], OrderedDict[KubernetesEvent, _Tale]
        ] = (
            OrderedDict(),
            OrderedDict(),
        )
        self._counts: OrderedDict[KubernetesEvent, int] = OrderedDict()
        self._buckets: OrderedDict[PodUid, TokenBucket] = OrderedDict()
        self._wake = asyncio.Event()

    def note(self, note: KubernetesEvent, *, once: bool = False) -> None:
        """Ask for a note to be written; a note `once` said is not counted up."""
        lane = self._lanes[0 if note.warning else 1]
        if once and (note in lane or note in self._counts):
            return
        now, ticks = self.clock.now(), self.clock.ticks()
        if once or self._bucket_of(note.pod, ticks).take(ticks):
            self._add(note, _Tale(1, now, now))
        else:
            self.tally.count("events_dropped")

    async def work(self) -> None:
        """Write what is asked for until cancelled."""
        async with asyncio.TaskGroup() as writers:
            for _ in range(WRITERS):
                writers.create_task(self._write_all())

    def _add(self, note: KubernetesEvent, tale: _Tale) -> None:
        lane = self._lanes[0 if note.warning else 1]
        there = lane.get(note)
        if there is not None:
            there.count += tale.count
            there.last_at = max(there.last_at, tale.last_at)
        elif len(lane) >= WAITING_MAX:
            self.tally.count("events_dropped", tale.count)
        else:
            lane[note] = tale
            self._wake.set()

    async def _write_all(self) -> None:
        while True:
            note, tale = await self._next()
            try:
                await self._write(note, tale)
            except (UnavailableError, ConflictError):
                self._add(note, tale)
                await self.clock.sleep(PAUSE_S)
            except RequestError:  # the namespace is going, or Events are not ours to write
                self.tally.count("events_dropped", tale.count)

    async def _next(self) -> tuple[KubernetesEvent, _Tale]:
        while True:
            now = self.clock.ticks()
            if not any(self._lanes):
                self._wake.clear()
                await self._wake.wait()
            elif self.bucket.take(now):
                return next(lane for lane in self._lanes if lane).popitem(last=False)
            else:
                await self.clock.sleep(self.bucket.wait_s(now))

    async def _write(self, note: KubernetesEvent, tale: _Tale) -> None:
        namespace, name = note.namespace, note.event_name
        known = self._counts.get(note, 0)
        if known:
            try:
                await self.log.patch_event(
                    namespace, name, recount(known + tale.count, tale.last_at)
                )
                return self._remember(note, known + tale.count)
            except RequestError:  # it was too old and is gone
                known = 0
        body = event_body(note, count=tale.count, first_at=tale.first_at, last_at=tale.last_at)
        try:
            await self.log.create_event(namespace, body)
        except ConflictError:  # written by another replica, or before we were started
            known = await self.log.event_count(namespace, name)
            await self.log.patch_event(namespace, name, recount(known + tale.count, tale.last_at))
        self._remember(note, known + tale.count)
        return None

    def _remember(self, note: KubernetesEvent, count: int) -> None:
        self._counts[note] = count
        while len(self._counts) > REMEMBERED:
            self._counts.popitem(last=False)

    def _bucket_of(self, pod: PodUid, now: float) -> TokenBucket:
        bucket = self._buckets.get(pod)
        if bucket is None:
            bucket = TokenBucket.full(per_s=POD_PER_S, burst=POD_BURST, now=now)
            self._buckets[pod] = bucket
            if len(self._buckets) > REMEMBERED:
                self._buckets.popitem(last=False)
        return bucket

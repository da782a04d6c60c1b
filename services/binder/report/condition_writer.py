"""Writes the condition PodScheduled=False of pods that wait, when its text changes.

Off the hot path, the newest text only, and never over a binding: the pod is read first, and the
patch holds only for the version that was read.
"""

import asyncio
import contextlib
import heapq
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

from services.binder.ports.metrics import Tally
from services.binder.report.explanations import Explanation, ObservedCondition, condition_patch
from shared.model.clock import Clock
from shared.model.errors import ConflictError, RequestError, UnavailableError
from shared.model.names import PodUid

WAITING_MAX = 16384
REMEMBERED = 16384
WRITERS = 8
EVERY_S = 5.0
"""A pod's text is changed at most this often."""
PAUSE_S = 1.0
CONFLICT_PAUSE_S = 0.2


class Statuses(Protocol):
    """Pods' conditions at the API server."""

    async def get_condition(self, namespace: str, name: str) -> ObservedCondition | None:
        """Return the condition PodScheduled of the pod, or None if there is no such pod."""
        ...

    async def patch_status(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Apply a strategic patch to `pods/status`. Raises ConflictError if the pod moved on."""
        ...


class ConditionWriter:
    """Texts that wait to be written; `work` writes them."""

    def __init__(self, statuses: Statuses, clock: Clock, tally: Tally) -> None:
        self.statuses = statuses
        self.clock = clock
        self.tally = tally
        self._waiting: dict[PodUid, Explanation] = {}
        self._due: list[tuple[float, PodUid]] = []
        self._said: OrderedDict[PodUid, tuple[str, float]] = OrderedDict()
        self._wake = asyncio.Event()

    def explain(self, why: Explanation) -> bool:
        """Ask for a text to be written; it replaces one of the same pod that still waits.

        Tells whether it differs from what was asked for last.
        """
        said, at = self._said.get(why.pod, ("", 0.0))
        if why.pod in self._waiting:
            known = self._waiting[why.pod].message
            self._waiting[why.pod] = why
            return known != why.message
        if said != why.message:
            self._add(why, max(self.clock.ticks(), at + EVERY_S))
        return said != why.message

    def forget(self, pod: PodUid) -> None:
        """Say no more of this pod: it waits no longer."""
        self._waiting.pop(pod, None)
        self._said.pop(pod, None)

    async def work(self) -> None:
        """Write what is asked for until cancelled."""
        async with asyncio.TaskGroup() as writers:
            for _ in range(WRITERS):
                writers.create_task(self._write_all())

    def _add(self, why: Explanation, due: float) -> None:
        if why.pod not in self._waiting and len(self._waiting) >= WAITING_MAX:
            self.tally.count("conditions_dropped")
        elif self._waiting.setdefault(why.pod, why) is why:
            heapq.heappush(self._due, (due, why.pod))
            self._wake.set()

    async def _write_all(self) -> None:
        while True:
            why = await self._next()
            try:
                await self._write(why)
            except ConflictError:
                self._add(why, self.clock.ticks() + CONFLICT_PAUSE_S)
            except UnavailableError:
                self._add(why, self.clock.ticks() + PAUSE_S)
            except RequestError:
                self.tally.count("conditions_dropped")

    async def _next(self) -> Explanation:
        while True:
            now = self.clock.ticks()
            if self._due and self._due[0][0] <= now:
                why = self._waiting.pop(heapq.heappop(self._due)[1], None)
                if why is not None:
                    return why
                continue
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._due[0][0] - now if self._due else None):
                    await self._wake.wait()

    async def _write(self, why: Explanation) -> None:
        seen = await self.statuses.get_condition(why.namespace, why.name)
        patch = condition_patch(why, seen, self.clock.now())
        if patch is not None:
            await self.statuses.patch_status(why.namespace, why.name, patch)
        self._said[why.pod] = (why.message, self.clock.ticks())
        self._said.move_to_end(why.pod)
        while len(self._said) > REMEMBERED:
            self._said.popitem(last=False)

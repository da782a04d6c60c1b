"""Writes the condition PodScheduled=False of waiting pods, when its message changes.

In the background, the newest message only, and never over a binding: the patch applies only to the
resource version that was read.
"""

import asyncio
import heapq
from collections import OrderedDict
from dataclasses import dataclass

from services.binder.metrics import count_anomaly
from services.binder.pod_client import PodClient
from services.binder.report.explanations import KubernetesEvent, condition_patch
from shared.model.clock import Clock, wait_for_event
from shared.model.errors import ConflictError, RequestError, UnavailableError
from shared.model.names import PodUid

MAX_QUEUED = 16384
MAX_REMEMBERED = 16384
WRITERS = 8
MIN_INTERVAL_S = 5.0
"""A pod's message changes at most this often."""
REPEAT_S = 60.0
RETRY_S = 1.0
CONFLICT_RETRY_S = 0.2


@dataclass(eq=False)
class ConditionWriter:
    """Queued messages; `run` writes them."""

    conditions: PodClient
    clock: Clock

    def __post_init__(self) -> None:
        self._queued: dict[PodUid, KubernetesEvent] = {}
        self._due: list[tuple[float, PodUid]] = []
        self._written: OrderedDict[PodUid, tuple[str, float]] = OrderedDict()
        self._wake = asyncio.Event()

    def explain(self, explanation: KubernetesEvent) -> bool:
        """Queue a message; it replaces a queued one of the same pod.

        Returns whether it differs from this replica's previous message about the pod. It is written
        even if it does not: another replica may have written one since.
        """
        pod = explanation.pod
        queued = self._queued.get(pod)
        if queued is not None:
            self._queued[pod] = explanation
            return queued.message != explanation.message
        written, at = self._written.get(pod, ("", 0.0))
        self._add(explanation, max(self.clock.ticks(), at + MIN_INTERVAL_S))
        return written != explanation.message

    def repeat(self, explanation: KubernetesEvent) -> bool:
        """Do the same for a message that may come often: an equal one waits for `REPEAT_S`."""
        written, at = self._written.get(explanation.pod, ("", 0.0))
        is_recent = self.clock.ticks() - at < REPEAT_S
        if explanation.pod not in self._queued and written == explanation.message and is_recent:
            return False
        return self.explain(explanation)

    def forget(self, pod: PodUid) -> None:
        """Write nothing more about this pod: it no longer waits."""
        self._queued.pop(pod, None)
        self._written.pop(pod, None)

    async def run(self) -> None:
        """Write queued messages until cancelled."""
        async with asyncio.TaskGroup() as writers:
            for _ in range(WRITERS):
                writers.create_task(self._write_all())

    def _add(self, explanation: KubernetesEvent, due: float) -> None:
        pod = explanation.pod
        if pod not in self._queued and len(self._queued) >= MAX_QUEUED:
            count_anomaly("conditions_dropped")
        elif self._queued.setdefault(pod, explanation) is explanation:
            heapq.heappush(self._due, (due, pod))
            self._wake.set()

    async def _write_all(self) -> None:
        while True:
            explanation = await self._next()
            try:
                await self._write(explanation)
            except ConflictError:
                self._add(explanation, self.clock.ticks() + CONFLICT_RETRY_S)
            except UnavailableError:
                self._add(explanation, self.clock.ticks() + RETRY_S)
            except RequestError:
                count_anomaly("conditions_dropped")

    async def _next(self) -> KubernetesEvent:
        while True:
            now = self.clock.ticks()
            if self._due and self._due[0][0] <= now:
                explanation = self._queued.pop(heapq.heappop(self._due)[1], None)
                if explanation is not None:
                    return explanation
                continue
            self._wake.clear()
            await wait_for_event(self._wake, self._due[0][0] - now if self._due else None)

    async def _write(self, explanation: KubernetesEvent) -> None:
        namespace, name = explanation.namespace, explanation.name
        observed = await self.conditions.get(namespace, name)
        patch = condition_patch(explanation, observed, self.clock.now())
        if patch is not None:
            await self.conditions.patch_status(namespace, name, patch)
        self._written[explanation.pod] = (explanation.message, self.clock.ticks())
        self._written.move_to_end(explanation.pod)
        while len(self._written) > MAX_REMEMBERED:
            self._written.popitem(last=False)

"""Removes the scheduling gates of pods whose namespace has budget again, by priority and age.

The webhook adds the gate where a used-up budget queues new pods.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from services.binder.clients import PodClient
from services.binder.report.event_writer import EventRecorder
from services.binder.report.explanations import KubernetesEvent, event_of
from shared.ledger.waiting_pods import GatedPods
from shared.model.clock import Clock, wait_for_event
from shared.model.errors import RequestError
from shared.model.events.pod_events import BudgetChanged, PodGated, PodTerminated
from shared.model.names import BUDGET_GATE, Namespace, PodUid
from shared.runtime.service import handles, loops

logger = logging.getLogger(__name__)

PAUSE_S = 5.0
"""Pause if no budget and no gated pod arrives."""
BATCH = 16
UNKNOWN_S = 120.0
"""A namespace whose budget has been unknown for this long counts as having budget left."""
REFUSED_S = 60.0
"""Pause before the next try, where the API server refused to change a pod."""
GATED_POLICIES = frozenset({"queue", "deny"})


@dataclass(eq=False)
class SchedulingGates:
    """Any number of binders may run it: removing a gate twice is harmless."""

    store: GatedPods
    pods: PodClient
    events: EventRecorder
    clock: Clock

    def __post_init__(self) -> None:
        self._unknown_since: dict[Namespace, float] = {}
        self._refused_until: dict[PodUid, float] = {}
        self._failed_at: dict[Namespace, float] = {}
        """Namespaces whose gates could not be removed come after others."""
        self._wake = asyncio.Event()

    @handles
    async def save_gated_pods(self, pods: Sequence[PodGated]) -> None:
        await self.store.save(pods)
        for pod in pods:
            self.events.record(_gated_event(pod), once=True)
        self.wake()

    async def remove(self, pods: Sequence[PodTerminated]) -> None:
        deleted: dict[Namespace, list[PodUid]] = {}
        for pod in pods:
            if pod.node is None:
                deleted.setdefault(pod.namespace, []).append(pod.pod)
        for namespace, uids in deleted.items():
            await self.store.remove(namespace, uids)

    def wake(self) -> None:
        self._wake.set()

    async def wait(self) -> None:
        await wait_for_event(self._wake, PAUSE_S)

    @loops(wait=lambda gates: gates.wait())
    async def remove_gates(self) -> None:
        self._wake.clear()
        budgets = await self.store.namespaces()
        self._unknown_since = {
            namespace: self._unknown_since.get(namespace, self.clock.ticks())
            for namespace, budget in budgets.items()
            if budget is None
        }
        self._failed_at = {name: at for name, at in self._failed_at.items() if name in budgets}
        for namespace in sorted(budgets, key=lambda name: self._failed_at.get(name, 0.0)):
            if not self._stays_gated(namespace, budgets[namespace]):
                self._failed_at[namespace] = self.clock.ticks()
                await self._remove_gates(namespace)
            self._failed_at.pop(namespace, None)

    def _stays_gated(self, namespace: Namespace, budget: BudgetChanged | None) -> bool:
        if budget is None:
            return self.clock.ticks() < self._unknown_since[namespace] + UNKNOWN_S
        return budget.new_pods in GATED_POLICIES

    async def _remove_gates(self, namespace: Namespace) -> None:
        gated = await self._gated(namespace)
        for first in range(0, len(gated), BATCH):
            budget = (await self.store.namespaces()).get(namespace) if first else None
            if budget is not None and self._stays_gated(namespace, budget):
                return
            await self._remove_batch(namespace, gated[first : first + BATCH])

    async def _gated(self, namespace: Namespace) -> list[PodGated]:
        now = self.clock.ticks()
        self._refused_until = {pod: at for pod, at in self._refused_until.items() if at > now}
        pods = await self.store.load(namespace)
        return sorted(
            (pod for pod in pods if pod.pod not in self._refused_until),
            key=lambda pod: (-pod.priority, pod.created_at, pod.name),
        )

    async def _remove_batch(self, namespace: Namespace, batch: Sequence[PodGated]) -> None:
        removed = await asyncio.gather(*map(self._remove_gate, batch))
        done = [pod.pod for pod in batch if pod.pod not in self._refused_until]
        await self.store.remove(namespace, done)
        for pod, is_removed in zip(batch, removed, strict=True):
            if is_removed:
                self.events.record(_removed_event(pod), once=True)

    async def _remove_gate(self, pod: PodGated) -> bool:
        try:
            return await self.pods.remove_gate(pod.namespace, pod.name, pod.pod, BUDGET_GATE)
        except RequestError as error:
            logger.warning("the gate of pod %s/%s stays: %s", pod.namespace, pod.name, error)
            self._refused_until[pod.pod] = self.clock.ticks() + REFUSED_S
            self.events.record(_refused_event(pod, str(error)), once=True)
            return False


def _gated_event(pod: PodGated) -> KubernetesEvent:
    return event_of(
        pod,
        "BudgetQueued",
        f"the GPU budget of namespace {pod.namespace} is used up or invalid: the pod waits at its "
        f"scheduling gate {BUDGET_GATE}; `leasehold budget {pod.namespace}` shows why, and until "
        "when",
    )


def _refused_event(pod: PodGated, reason: str) -> KubernetesEvent:
    return event_of(
        pod,
        "BudgetQueued",
        f"namespace {pod.namespace} has GPU time again, but the scheduling gate {BUDGET_GATE} "
        f"cannot be removed; the next try is in {REFUSED_S:g} s: {reason}",
    )


def _removed_event(pod: PodGated) -> KubernetesEvent:
    return event_of(
        pod,
        "BudgetRefilled",
        f"namespace {pod.namespace} has GPU time again: the scheduling gate {BUDGET_GATE} is "
        "removed",
        warning=False,
    )

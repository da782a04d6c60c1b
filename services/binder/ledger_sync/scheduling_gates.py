"""Opens the scheduling gates of pods whose namespace has budget again, in the order of their turn.

The webhook puts the gate on when it admits a pod whose namespace has used up its budget, and that
queues new pods; only preemption it away is allowed afterwards, and only binders write pods.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from services.binder.report.explanations import KubernetesEvent, cut
from shared.model.clock import Clock
from shared.model.errors import RequestError
from shared.model.events.pod_events import BudgetChanged, PodGated
from shared.model.names import BUDGET_GATE, Namespace, PodUid

logger = logging.getLogger(__name__)

LOOK_S = 0.5
AT_ONCE = 16
UNKNOWN_S = 120.0
"""A namespace of whose budget nothing was heard for so long counts as one that has budget."""
REFUSED_S = 60.0
"""After so long the gate of a pod is tried again that the API server refused to change."""
KEEPING = frozenset({"queue", "deny"})
"""What budgets say of new pods when those that wait are to wait on."""


class Store(Protocol):
    """Gated pods, as binders share them; `shared.ledger.waiting_pods.Gates` is it."""

    async def save(self, pods: Sequence[PodGated]) -> None:
        """Remember pods."""
        ...

    async def remove(self, namespace: Namespace, pods: Sequence[PodUid]) -> None:
        """Forget pods of a namespace."""
        ...

    async def namespaces(self) -> Mapping[Namespace, BudgetChanged | None]:
        """Return the namespaces with gated pods, and how their budgets stand if that is known."""
        ...

    async def load(self, namespace: Namespace) -> Sequence[PodGated]:
        """Return the gated pods of a namespace, in no order."""
        ...


class Pods(Protocol):
    """Pods at the API server."""

    async def open_gate(self, namespace: str, name: str, uid: str, gate: str) -> bool:
        """Take a scheduling gate off the pod of exactly this uid; False if that pod is gone."""
        ...


class Noting(Protocol):
    """Kubernetes Events on pods."""

    def note(self, note: KubernetesEvent, *, once: bool = False) -> None:
        """Ask for a note to be written."""
        ...


class SchedulingGates:
    """Opening a gate twice is harmless: any number of binders may do it."""

    def __init__(self, store: Store, pods: Pods, events: Noting, clock: Clock) -> None:
        self.store = store
        self.pods = pods
        self.events = events
        self.clock = clock
        self._unknown_since: dict[Namespace, float] = {}
        self._refused_until: dict[PodUid, float] = {}
        self._wake = asyncio.Event()

    async def hold(self, pods: Sequence[PodGated]) -> None:
        """Remember pods at the gate; they are let through at once if their budget allows it."""
        await self.store.save(pods)
        for pod in pods:
            self.events.note(_held_note(pod), once=True)
        self.wake()

    def wake(self) -> None:
        """Look at once: a budget may have changed."""
        self._wake.set()

    async def wait(self) -> None:
        """Return when there is something to look at, or after a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._wake.wait()

    async def step(self) -> None:
        """Open the gates of all pods that may go on."""
        self._wake.clear()
        found = await self.store.namespaces()
        self._unknown_since = {
            name: self._unknown_since.get(name, self.clock.now())
            for name, standing in found.items()
            if standing is None
        }
        for namespace, standing in found.items():
            if not self._keeps(namespace, standing):
                await self._open(namespace)

    def _keeps(self, namespace: Namespace, standing: BudgetChanged | None) -> bool:
        if standing is None:
            return self.clock.now() < self._unknown_since[namespace] + UNKNOWN_S
        return standing.new_pods in KEEPING

    async def _open(self, namespace: Namespace) -> None:
        """Open gates, highest priority and then oldest first, while the budget allows it."""
        now = self.clock.now()
        self._refused_until = {pod: at for pod, at in self._refused_until.items() if at > now}
        gated = sorted(
            (pod for pod in await self.store.load(namespace) if pod.pod not in self._refused_until),
            key=lambda pod: (-pod.priority, pod.created_at, pod.name),
        )
        for first in range(0, len(gated), AT_ONCE):
            standing = (await self.store.namespaces()).get(namespace) if first else None
            if standing is not None and self._keeps(namespace, standing):
                return
            part = gated[first : first + AT_ONCE]
            opened = await asyncio.gather(*map(self._open_one, part))
            over = [pod for pod in part if pod.pod not in self._refused_until]
            await self.store.remove(namespace, [pod.pod for pod in over])
            for pod, is_open in zip(part, opened, strict=True):
                if is_open:
                    self.events.note(_opened_note(pod), once=True)

    async def _open_one(self, pod: PodGated) -> bool:
        """Open a gate; False if the pod is gone, or the API server refuses (a policy's, say)."""
        try:
            return await self.pods.open_gate(pod.namespace, pod.name, pod.pod, BUDGET_GATE)
        except RequestError as error:
            logger.warning("the gate of pod %s/%s stays: %s", pod.namespace, pod.name, error)
            self._refused_until[pod.pod] = self.clock.now() + REFUSED_S
            self.events.note(_refused_note(pod, str(error)), once=True)
            return False


def _held_note(pod: PodGated) -> KubernetesEvent:
    return _note(
        pod,
        "BudgetQueued",
        f"namespace {pod.namespace} has used up its GPU time: the pod waits at its scheduling gate "
        f"{BUDGET_GATE} until the budget is refilled; `leasehold budget {pod.namespace}` shows "
        "when",
        warning=True,
    )


def _refused_note(pod: PodGated, why: str) -> KubernetesEvent:
    return _note(
        pod,
        "BudgetQueued",
        f"namespace {pod.namespace} has GPU time again, but the scheduling gate {BUDGET_GATE} "
        f"cannot be opened, and is tried again in a minute: {why}",
        warning=True,
    )


def _opened_note(pod: PodGated) -> KubernetesEvent:
    return _note(
        pod,
        "BudgetRefilled",
        f"namespace {pod.namespace} has GPU time again: the scheduling gate {BUDGET_GATE} is open",
        warning=False,
    )


def _note(pod: PodGated, reason: str, message: str, *, warning: bool) -> KubernetesEvent:
    return KubernetesEvent(
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        reason=reason,
        message=cut(message),
        warning=warning,
    )

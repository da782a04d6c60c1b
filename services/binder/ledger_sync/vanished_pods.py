"""Pods that vanished without their kubelet's word: their leases end when their processes have.

A pod deleted by force is gone from the API server while its containers may still run. Its node's
agent is asked every second; only an agent's lasting silence counts as the end of the node.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.lease import Lease
from shared.model.names import NodeName, PodUid

ASK_EVERY_S = 1.0
SILENCE_S = 25.0
"""An agent that says nothing for this long is taken for dead, and its pods with it."""
SILENCES = 10
"""So many questions must have had no answer: a binder that slept heard nobody."""
ASKING_MAX = 64
PODS_MAX = 1000
"""Pods in one question."""


class Agents(Protocol):
    """The node agents, on the bus."""

    async def list_terminated(self, node: NodeName, pods: Sequence[PodUid]) -> set[PodUid]:
        """Tell which pods' last containers have ended.

        Raises UnavailableError if the node's agent does not answer.
        """
        ...


@dataclass(slots=True)
class VanishedPod:
    """A lease whose pod is gone, when its agent was last heard (or first asked), and since then."""

    lease: Lease
    heard_at: float
    unanswered: int = 0
    """Questions that had no answer."""


class VanishedPods:
    """Leases whose pods are gone and may still run."""

    def __init__(self, agents: Agents, clock: Clock, *, silence_s: float = SILENCE_S) -> None:
        self.agents = agents
        self.clock = clock
        self.silence_s = silence_s
        self._vanishing: dict[PodUid, VanishedPod] = {}
        self._gate = asyncio.Semaphore(ASKING_MAX)

    def add(self, lease: Lease) -> None:
        """Ask about this lease's pod from now on; asking twice changes nothing."""
        self._vanishing.setdefault(lease.pod, VanishedPod(lease, self.clock.ticks()))

    def settle(self, pods: Sequence[PodUid]) -> None:
        """Ask no more about these: their leases have ended."""
        for pod in pods:
            self._vanishing.pop(pod, None)

    async def ask(self) -> list[Lease]:
        """Ask each node once, and return the leases that can end now."""
        by_node: dict[NodeName, list[VanishedPod]] = {}
        for vanished in self._vanishing.values():
            by_node.setdefault(vanished.lease.node, []).append(vanished)
        asked = await asyncio.gather(
            *(
                self._ended(node, gone[at : at + PODS_MAX])
                for node, gone in by_node.items()
                for at in range(0, len(gone), PODS_MAX)
            )
        )
        return [lease for ended in asked for lease in ended]

    async def _ended(self, node: NodeName, asked: Sequence[VanishedPod]) -> list[Lease]:
        async with self._gate:
            try:
                ended = await self.agents.list_terminated(node, [each.lease.pod for each in asked])
            except UnavailableError:
                return [each.lease for each in asked if self._is_silent(each)]
        for each in asked:
            each.heard_at, each.unanswered = self.clock.ticks(), 0
        return [each.lease for each in asked if each.lease.pod in ended]

    def _is_silent(self, vanished: VanishedPod) -> bool:
        vanished.unanswered += 1
        silent_s = self.clock.ticks() - vanished.heard_at
        return vanished.unanswered >= SILENCES and silent_s >= self.silence_s

"""May a pod be bound to its node now? The node's agent says; one that is away holds pods back.

A kubelet refuses a pod for good if it comes to a node whose agent is being replaced. Held back, its
reservation goes on when the agent is there again, or ends in time and the pod is placed elsewhere.
An agent that is there lets pods through in turn, a few ahead of its kubelet.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.model.errors import UnavailableError
from shared.model.lease import Lease
from shared.model.names import NodeName, PodUid
from shared.model.questions import BindTold
from shared.runtime.clock import Clock

TRUSTED_S = 0.25
"""An agent that leaves goes on for longer than this after its last word."""
AWAY_S = 0.5
"""So long an agent that did not answer is not asked again: a batch is not to wait each time."""
AWAY_MOST_S = 4.0
"""And so long if it never answers."""
FIRST_S = 5.0
"""So long a node of which no agent was ever heard is asked: both may have just started again."""
NONE_S = 10.0
"""So long a node that never had an agent of ours is not asked again."""
ASKING_MAX = 64


class Agents(Protocol):
    """The node agents, on the bus."""

    async def may_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindTold:
        """Tell which of the pods must wait. Raises UnavailableError without an answer."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """Why a pod must wait."""

    reason: str
    soon: bool = False
    """It comes next: ask again in a moment."""


@dataclass(slots=True)
class Known:
    """What is known of one node's agent."""

    first_at: float
    """When it was first asked."""
    heard: bool = False
    """It has answered before: there is one."""
    until: float = 0.0
    """Until then it is not asked."""
    pause_s: float = AWAY_S
    away: str = ""
    """Why it had no answer; empty: it may be bound to."""


class Presence:
    """Which agents answered a moment ago."""

    def __init__(self, agents: Agents, clock: Clock) -> None:
        self.agents = agents
        self.clock = clock
        self._known: dict[NodeName, Known] = {}
        self._gate = asyncio.Semaphore(ASKING_MAX)

    async def held_back(self, leases: Sequence[Lease]) -> dict[PodUid, Held]:
        """Return the pods that must not be bound now.

        A node whose agent is never heard (another device plugin's, say) holds nobody back after
        the first seconds.
        """
        by_node: dict[NodeName, list[Lease]] = {}
        for lease in leases:
            by_node.setdefault(lease.node, []).append(lease)
        answers = await asyncio.gather(*(self._ask(*each) for each in by_node.items()))
        return {pod: why for held in answers for pod, why in held.items()}

    async def _ask(self, node: NodeName, leases: Sequence[Lease]) -> dict[PodUid, Held]:
        known = self._known.setdefault(node, Known(first_at=self.clock.now()))
        if self.clock.now() < known.until:
            return _away(leases, known)
        try:
            async with self._gate:
                told = await self.agents.may_bind(node, leases)
        except UnavailableError as error:
            self._miss(known, f"the agent of node {node} does not answer: {error}")
            return _away(leases, known)
        known.heard, known.away, known.pause_s = True, "", AWAY_S
        known.until = self.clock.now() + TRUSTED_S if told.free else 0.0
        return dict.fromkeys(told.held, Held(told.reason, soon=told.soon))

    def _miss(self, known: Known, reason: str) -> None:
        now = self.clock.now()
        there = known.heard or now < known.first_at + FIRST_S
        known.until = now + (known.pause_s if there else NONE_S)
        if known.heard:
            known.pause_s = min(2 * known.pause_s, AWAY_MOST_S)
        known.away = reason if there else ""


def _away(leases: Sequence[Lease], known: Known) -> dict[PodUid, Held]:
    return {lease.pod: Held(known.away) for lease in leases} if known.away else {}

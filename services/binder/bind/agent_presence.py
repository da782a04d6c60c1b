"""May a pod be bound to its node now? The node's agent says; one that is away holds pods back.

A kubelet refuses a pod for good if it comes to a node whose agent is being replaced, and lets
everybody wait behind it if the agent hangs. Held back, its reservation goes on when the agent is
there again, or is given up and the pod is placed elsewhere. A node at which that lasts is shut:
placers leave it alone until its agent answers again. An agent that is there lets pods through in
turn, a few ahead of its kubelet.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.model.clock import Clock
from shared.model.events.node_events import DeviceReported
from shared.model.events.request_reply import BindReply
from shared.model.lease import Lease
from shared.model.names import NodeName, PodUid

TRUSTED_S = 0.25
"""An agent that leaves goes on for longer than this after its last word."""
AWAY_S = 0.5
"""So long an agent that did not answer is not asked again: a batch is not to wait each time."""
AWAY_MOST_S = 4.0
"""And so long if it never answers."""
NONE_S = 10.0
"""So long a node that has no agent of ours is not asked again."""
SILENCES = 2
"""So many questions in a row without an answer shut the node: one may have been slow."""
ASKING_MAX = 64


@dataclass(frozen=True, slots=True)
class NoReply:
    """A question that had no answer, and why."""

    text: str
    has_responder: bool
    """Somebody is there who should have answered."""


class Agents(Protocol):
    """The node agents, on the bus."""

    async def request_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindReply | NoReply:
        """Tell which of the pods must wait. Raises UnavailableError if nobody can be asked."""
        ...


class Nodes(Protocol):
    """What the ledger knows of nodes."""

    async def reported_by_agent(self, node: NodeName) -> bool:
        """Say whether it was an agent of ours that told last of the node's devices."""
        ...


@dataclass(frozen=True, slots=True)
class Deferral:
    """Why a pod is not bound yet."""

    reason: str
    soon: bool = False
    """It comes next: ask again in a moment."""
    shut_s: float = 0.0
    """So long nobody may be bound to the node; 0: others may."""


@dataclass(slots=True)
class AgentRecord:
    """What is known of one node's agent."""

    heard: bool = False
    """There is one: it has answered, or should have."""
    until: float = 0.0
    """Until then it is not asked."""
    pause_s: float = AWAY_S
    misses: int = 0
    """Questions in a row that had no answer."""
    shut: str = ""
    """Why nobody may be bound to its node; empty: somebody may."""
    shut_at: float = 0.0
    """When it came to be so."""
    answers: bool = False
    """It has said, since others were told that the node is shut, that it is not."""


class AgentPresence:
    """Which agents answered a moment ago, and which nodes are shut."""

    def __init__(self, agents: Agents, nodes: Nodes, clock: Clock) -> None:
        self.agents = agents
        self.nodes = nodes
        self.clock = clock
        self.news = asyncio.Event()
        """Set when a node has shut or opened, or may have."""
        self._known: dict[NodeName, AgentRecord] = {}
        self._marked: frozenset[NodeName] = frozenset()
        self._gate = asyncio.Semaphore(ASKING_MAX)

    async def deferrals(self, leases: Sequence[Lease]) -> dict[PodUid, Deferral]:
        """Return the pods that must not be bound now, each with the reason.

        A node of another device plugin holds nobody back: its devices were told of by no agent.
        Raises UnavailableError if agents cannot be asked at all, or the ledger about a silent one.
        """
        by_node: dict[NodeName, list[Lease]] = {}
        for lease in leases:
            by_node.setdefault(lease.node, []).append(lease)
        answers = await asyncio.gather(*(self._ask(*each) for each in by_node.items()))
        return {pod: wait for held in answers for pod, wait in held.items()}

    async def look(self) -> None:
        """Ask the agents of nodes that all binders know to be shut, each when its time has come."""
        await asyncio.gather(*(self._ask(node, ()) for node in sorted(self._marked)))

    def hear(self, reports: Sequence[DeviceReported]) -> None:
        """Learn from reports which nodes have agents of ours."""
        self.mark_present(report.node for report in reports if not report.other_plugin)
        self.mark_absent(report.node for report in reports if report.other_plugin)

    def mark_present(self, nodes: Iterable[NodeName]) -> None:
        """Record that these nodes have agents, and ask those of shut nodes at once."""
        for node in nodes:
            known = self._known.setdefault(node, AgentRecord())
            if not known.heard or node in self._marked:
                known.heard, known.until = True, 0.0
            if node in self._marked:
                self.news.set()

    def mark_absent(self, nodes: Iterable[NodeName]) -> None:
        """Open nodes that another device plugin serves: no agent of theirs is asked any more."""
        for node in nodes:
            known = self._known.setdefault(node, AgentRecord())
            known.heard, known.misses, known.until = False, 0, math.inf
            self._shut(known, "")
            if node in self._marked:
                self.news.set()

    def words(self) -> dict[NodeName, str]:
        """Return what all others are to hear: which nodes are shut, and why; empty: it is open."""
        shut = {
            node: known.shut
            for node, known in self._known.items()
            if known.shut and node not in self._marked
        }
        opened = {node: "" for node in self._marked if self._known[node].answers}
        return shut | opened

    def apply_cordons(self, nodes: frozenset[NodeName], words: Mapping[NodeName, str]) -> None:
        """Take over which nodes are shut, `words` of ours included.

        What another binder has heard in the meantime counts as much: it is looked into. Whom it
        opened may have no agent any more.
        """
        for node in nodes ^ self._marked:
            known = self._known.setdefault(node, AgentRecord())
            known.answers = False
            if node not in words:
                known.heard, known.until, known.misses, known.shut = node in nodes, 0.0, 0, ""
        self._marked = nodes

    async def _ask(self, node: NodeName, leases: Sequence[Lease]) -> dict[PodUid, Deferral]:
        known = self._known.setdefault(node, AgentRecord())
        if self.clock.ticks() >= known.until:
            async with self._gate:
                told = await self.agents.request_bind(node, leases)
            if isinstance(told, NoReply) and not known.heard:
                known.heard = told.has_responder or await self.nodes.reported_by_agent(node)
            self._learn(node, known, told)
            if isinstance(told, BindReply):
                wait = Deferral(told.reason, soon=told.retry_soon, shut_s=self._shut_s(known))
                return dict.fromkeys(told.deferred_pods, wait)
        if not known.misses and not known.shut:
            return {}
        reason = known.shut or f"the agent of node {node} does not answer"
        wait = Deferral(reason, shut_s=self._shut_s(known))
        return dict.fromkeys((each.pod for each in leases), wait)

    def _learn(self, node: NodeName, known: AgentRecord, told: BindReply | NoReply) -> None:
        now = self.clock.ticks()
        if isinstance(told, BindReply):
            known.heard, known.misses, known.pause_s = True, 0, AWAY_S
            known.until = now + TRUSTED_S if told.window_open else 0.0
            self._shut(known, told.reason if told.node_closed else "")
        elif known.heard:
            known.misses += 1
            known.until = now + known.pause_s
            known.pause_s = min(2 * known.pause_s, AWAY_MOST_S)
            if known.misses >= SILENCES:
                self._shut(known, f"the agent of node {node} does not answer: {told.text}")
        else:
            known.misses, known.until = 0, now + NONE_S

    def _shut(self, known: AgentRecord, why: str) -> None:
        if bool(why) != bool(known.shut):
            known.shut_at = self.clock.ticks()
            self.news.set()
        known.shut, known.answers = why, not why

    def _shut_s(self, known: AgentRecord) -> float:
        return self.clock.ticks() - known.shut_at if known.shut else 0.0

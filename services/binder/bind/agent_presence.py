"""Whether a pod may be bound to its node now: the node's agent decides, and must be there.

A kubelet rejects a pod for good if it arrives while the node's agent is being replaced, and blocks
all pods behind it if the agent hangs. A deferred pod keeps its reservation until the agent is back,
or gives it up and is placed elsewhere. A node whose agent stays away is cordoned: placers avoid it
until the agent replies again. An agent that is there admits pods in turn, a few ahead of its
kubelet.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.binder.ports.ledger import ReportedNodes
from services.binder.ports.nats import BindPermissions, NoReply
from shared.model.clock import Clock
from shared.model.events.node_events import DeviceReported
from shared.model.events.request_reply import BindReply
from shared.model.lease import Lease
from shared.model.names import NodeName, PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceTiming:
    """How long replies of node agents are trusted, and missing ones awaited."""

    trusted_s: float = 0.25
    """Validity of a reply; an agent that stops goes on for longer than this after its last one."""
    retry_s: float = 0.5
    """Pause after a request without a reply, so that not every batch waits; it doubles."""
    max_retry_s: float = 4.0
    """The longest such pause."""
    no_agent_s: float = 10.0
    """Pause after a request to a node that has no agent of ours."""
    cordon_after: int = 2
    """Requests in a row without a reply that cordon the node: one may have been slow."""


MAX_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Deferral:
    """Why a pod is not bound yet."""

    reason: str
    retry_soon: bool = False
    """Its turn comes next: a retry may succeed within milliseconds."""
    cordoned_s: float = 0.0
    """For how long the node has been cordoned; 0: it is not."""


@dataclass(slots=True)
class AgentRecord:
    """What is known of one node's agent."""

    exists: bool = False
    """Whether it has replied, or should have."""
    next_request_at: float = 0.0
    pause_s: float = 0.0
    missed_replies: int = 0
    """Requests in a row without a reply."""
    cordon_reason: str = ""
    """Empty: the node is not cordoned."""
    cordoned_at: float = 0.0
    """When that last changed."""
    uncordon: bool = False
    """Whether it replied since the ledger was told of the cordon."""


class AgentPresence:
    """Which agents replied a moment ago, and which nodes are cordoned."""

    def __init__(
        self,
        agents: BindPermissions,
        nodes: ReportedNodes,
        clock: Clock,
        timing: PresenceTiming | None = None,
    ) -> None:
        self.agents = agents
        self.nodes = nodes
        self.clock = clock
        self.timing = timing or PresenceTiming()
        self.changed = asyncio.Event()
        """Set when a node was cordoned or uncordoned, or may have been."""
        self._records: dict[NodeName, AgentRecord] = {}
        self._cordoned: frozenset[NodeName] = frozenset()
        self._requests = asyncio.Semaphore(MAX_REQUESTS)

    async def deferrals(self, leases: Sequence[Lease]) -> dict[PodUid, Deferral]:
        """Return the pods that must not be bound now, each with the reason.

        A node of another device plugin defers none: no agent of ours reported its devices.
        Raises UnavailableError if no agent can be reached, or the ledger about a silent one.
        """
        by_node: dict[NodeName, list[Lease]] = {}
        for lease in leases:
            by_node.setdefault(lease.node, []).append(lease)
        found = await asyncio.gather(*(self._deferrals_on(*each) for each in by_node.items()))
        return {pod: deferral for deferrals in found for pod, deferral in deferrals.items()}

    async def probe_cordoned(self) -> None:
        """Send a request to the agents of all cordoned nodes whose pause is over."""
        await asyncio.gather(*(self._deferrals_on(node, ()) for node in sorted(self._cordoned)))

    def record_reports(self, reports: Sequence[DeviceReported]) -> None:
        """Learn from device reports which nodes have agents of ours."""
        self.mark_present(report.node for report in reports if not report.other_plugin)
        self.mark_absent(report.node for report in reports if report.other_plugin)

    def mark_present(self, nodes: Iterable[NodeName]) -> None:
        """Record that these nodes have agents, and have cordoned ones probed at once."""
        for node in nodes:
            record = self._record(node)
            if not record.exists or node in self._cordoned:
                record.exists, record.next_request_at = True, 0.0
            if node in self._cordoned:
                self.changed.set()

    def mark_absent(self, nodes: Iterable[NodeName]) -> None:
        """Uncordon nodes that another device plugin serves, and send them no more requests."""
        for node in nodes:
            record = self._record(node)
            record.exists, record.missed_replies, record.next_request_at = False, 0, math.inf
            self._set_cordon(record, "")
            if node in self._cordoned:
                self.changed.set()

    def cordon_changes(self) -> dict[NodeName, str]:
        """Return what the ledger lacks: nodes with the reason of their cordon; empty: uncordon."""
        cordoned = {
            node: record.cordon_reason
            for node, record in self._records.items()
            if record.cordon_reason and node not in self._cordoned
        }
        uncordoned = {node: "" for node in self._cordoned if self._records[node].uncordon}
        return cordoned | uncordoned

    def apply_cordons(self, nodes: frozenset[NodeName], changes: Mapping[NodeName, str]) -> None:
        """Take over which nodes are cordoned, our own `changes` included.

        What another binder found in the meantime counts as much, and is checked here: the node it
        uncordoned may have no agent any more.
        """
        for node in nodes ^ self._cordoned:
            record = self._record(node)
            record.uncordon = False
            if node not in changes:
                record.exists, record.next_request_at = node in nodes, 0.0
                record.missed_replies, record.cordon_reason = 0, ""
        self._cordoned = nodes

    async def _deferrals_on(
        self, node: NodeName, leases: Sequence[Lease]
    ) -> dict[PodUid, Deferral]:
        record = self._record(node)
        if self.clock.ticks() >= record.next_request_at:
            async with self._requests:
                reply = await self.agents.request_bind(node, leases)
            if isinstance(reply, NoReply) and not record.exists:
                record.exists = reply.has_responder or await self.nodes.reported_by_agent(node)
            self._record_reply(node, record, reply)
            if isinstance(reply, BindReply):
                deferral = Deferral(
                    reply.reason,
                    retry_soon=reply.retry_soon,
                    cordoned_s=self._cordoned_s(record),
                )
                return dict.fromkeys(reply.deferred_pods, deferral)
        if not record.missed_replies and not record.cordon_reason:
            return {}
        reason = record.cordon_reason or f"the agent of node {node} does not respond"
        deferral = Deferral(reason, cordoned_s=self._cordoned_s(record))
        return dict.fromkeys((lease.pod for lease in leases), deferral)

    def _record_reply(
        self, node: NodeName, record: AgentRecord, reply: BindReply | NoReply
    ) -> None:
        now, timing = self.clock.ticks(), self.timing
        if isinstance(reply, BindReply):
            record.exists, record.missed_replies, record.pause_s = True, 0, timing.retry_s
            record.next_request_at = now + timing.trusted_s if reply.window_open else 0.0
            self._set_cordon(record, reply.reason if reply.node_closed else "")
        elif record.exists:
            record.missed_replies += 1
            record.next_request_at = now + record.pause_s
            record.pause_s = min(2 * record.pause_s, timing.max_retry_s)
            if record.missed_replies >= timing.cordon_after:
                reason = f"the agent of node {node} does not respond: {reply.reason}"
                self._set_cordon(record, reason)
        else:
            record.missed_replies, record.next_request_at = 0, now + timing.no_agent_s

    def _record(self, node: NodeName) -> AgentRecord:
        return self._records.setdefault(node, AgentRecord(pause_s=self.timing.retry_s))

    def _set_cordon(self, record: AgentRecord, reason: str) -> None:
        if bool(reason) != bool(record.cordon_reason):
            record.cordoned_at = self.clock.ticks()
            self.changed.set()
        record.cordon_reason, record.uncordon = reason, not reason

    def _cordoned_s(self, record: AgentRecord) -> float:
        return self.clock.ticks() - record.cordoned_at if record.cordon_reason else 0.0

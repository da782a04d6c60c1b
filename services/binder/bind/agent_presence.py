"""Presence of node agents, which decides whether a pod may be bound to its node now.

A kubelet rejects a pod for good that arrives while the node's agent is being replaced. So a node is
cordoned while its agent does not reply, or sends what no agent may send.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.binder.clients import NodeAgentClient, NoReply
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock, wait_for_event
from shared.model.events.node_events import DeviceReported
from shared.model.events.request_reply import BindReply
from shared.model.leases.lease import Lease
from shared.model.names import NodeName, PodUid
from shared.runtime.service import loops

TRUSTED_S = 0.25
"""Validity of a reply; a stopping agent runs for longer than this after its last reply."""
RETRY_S = 0.5
"""Pause after a request without a reply, so that not every batch waits; it doubles."""
MAX_RETRY_S = 4.0
"""The longest such pause."""
NO_AGENT_S = 10.0
"""Pause after a request to a node without an agent of Leasehold."""
CORDON_AFTER = 2
"""Requests in a row without a reply that cordon the node."""
REFUSED_S = 5.0
"""Reports count again so long after the last refused message: two kinds of messages in turn must
not cordon and uncordon the node all the time."""


REFUSED = "its agent's messages are refused: "
"""All binders recognise such a cordon by it."""
MAX_REQUESTS = 64
MOST_TOGETHER = 256
FORGET_S = 3600.0
"""Records of nodes that were not used for so long are dropped."""
PROBE_S = 1.0
"""Interval of requests to cordoned nodes: a node opens this long after its agent is back."""
IDLE_S = 5.0
"""Pause while no node is cordoned, until cordons of binders that have stopped are read again."""


@dataclass(frozen=True, slots=True)
class Deferral:
    reason: str
    retry_soon: bool = False
    """The pod is next in line: a retry may succeed within milliseconds."""
    cordoned_s: float = 0.0
    """How long the node has accepted no such pods, or 0 if it accepts this one soon."""
    refused: bool = False


@dataclass(slots=True)
class JoinedRequest:
    leases: dict[PodUid, Lease] = field(default_factory=dict)
    reply: "asyncio.Task[BindReply | NoReply | None]" = field(init=False)
    """None if it was not sent, or its reply no longer counts."""

    def takes(self, leases: Sequence[Lease]) -> bool:
        """A reply is about one lease of a pod."""
        if self.leases and len(self.leases) + len(leases) > MOST_TOGETHER:
            return False
        return all(self.leases.get(lease.pod, lease) == lease for lease in leases)

    def add(self, leases: Iterable[Lease]) -> None:
        self.leases.update((lease.pod, lease) for lease in leases)


@dataclass(slots=True)
class AgentRecord:
    exists: bool = False
    next_request_at: float = 0.0
    pause_s: float = 0.0
    missed_replies: int = 0
    """In a row."""
    cordon_reason: str = ""
    cordoned_at: float = 0.0
    uncordon: bool = False
    used_at: float = 0.0
    refused_at: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    next_request: JoinedRequest | None = None

    @property
    def is_refused(self) -> bool:
        return self.cordon_reason.startswith(REFUSED)


@dataclass(eq=False)
class AgentPresence:
    agents: NodeAgentClient
    reported_by_agent: Callable[[NodeName], Awaitable[bool]]
    clock: Clock

    def __post_init__(self) -> None:
        self.changed = asyncio.Event()
        self._records: dict[NodeName, AgentRecord] = {}
        self._cordoned: Mapping[NodeName, str] = {}
        self._requests = asyncio.Semaphore(MAX_REQUESTS)

    async def deferrals(self, leases: Sequence[Lease]) -> dict[PodUid, Deferral]:
        """Return the pods that must not be bound now.

        Of three pods on one GPU, two have `retry_soon`: the kubelet gets one at a time. Raises
        UnavailableError if no agent can be reached, or the ledger cannot be read for a silent one.
        """
        by_node: dict[NodeName, list[Lease]] = {}
        for lease in leases:
            by_node.setdefault(lease.node, []).append(lease)
        if len(by_node) == 1:  # the usual case, without a task
            return await self._deferrals_on(*by_node.popitem())
        replies = await asyncio.gather(
            *(self._deferrals_on(node, on_node) for node, on_node in by_node.items())
        )
        return {pod: deferral for deferrals in replies for pod, deferral in deferrals.items()}

    async def probe_cordoned(self) -> None:
        await asyncio.gather(*(self._deferrals_on(node, ()) for node in sorted(self._cordoned)))

    def record_reports(self, reports: Sequence[DeviceReported]) -> None:
        for report in reports:
            self._trust(report.node)
        self.mark_present(report.node for report in reports if not report.other_plugin)
        self.mark_absent(report.node for report in reports if report.other_plugin)

    def distrust(self, node: NodeName, reason: str) -> None:
        record = self._record(node)
        if not record.is_refused:
            self._set_cordon(record, f"{REFUSED}{reason}")
            self.changed.set()
        record.refused_at = self.clock.ticks()

    def _trust(self, node: NodeName) -> None:
        record = self._record(node)
        if record.is_refused and self.clock.ticks() - record.refused_at >= REFUSED_S:
            self._set_cordon(record, "")

    def mark_present(self, nodes: Iterable[NodeName]) -> None:
        for node in nodes:
            record = self._record(node)
            if not record.exists or node in self._cordoned:
                record.exists = True
                record.next_request_at = 0.0
            if node in self._cordoned:
                self.changed.set()

    def mark_absent(self, nodes: Iterable[NodeName]) -> None:
        for node in nodes:
            record = self._record(node)
            record.exists = False
            record.missed_replies = 0
            record.next_request_at = math.inf
            if not record.is_refused:
                self._set_cordon(record, "")
            if node in self._cordoned:
                self.changed.set()

    def cordon_changes(self) -> dict[NodeName, str]:
        """Return unsaved changes; an empty reason uncordons the node."""
        changes = {node: "" for node in self._cordoned if self._records[node].uncordon}
        for node, record in self._records.items():
            saved = self._cordoned.get(node, "")
            if record.cordon_reason and (
                not saved or (record.is_refused and not saved.startswith(REFUSED))
            ):
                changes[node] = record.cordon_reason
        return changes

    def apply_cordons(self, nodes: Mapping[NodeName, str], changes: Mapping[NodeName, str]) -> None:
        for node in nodes.keys() | self._cordoned.keys():
            reason = nodes.get(node, "")
            record = self._record(node)
            if reason == self._cordoned.get(node, ""):
                continue
            record.uncordon = False
            if node not in changes:
                record.exists = node in nodes
                record.next_request_at = 0.0
                record.missed_replies = 0
                record.cordon_reason = reason if reason.startswith(REFUSED) else ""
                record.cordoned_at = self.clock.ticks()
                record.refused_at = record.cordoned_at
        self._cordoned = nodes
        unused = self.clock.ticks() - FORGET_S
        self._records = {
            node: record
            for node, record in self._records.items()
            if record.used_at > unused or node in nodes
        }

    async def _deferrals_on(
        self, node: NodeName, leases: Sequence[Lease]
    ) -> dict[PodUid, Deferral]:
        record = self._record(node)
        if self._may_request(record):
            reply = await self._request(node, record, leases)
            if isinstance(reply, BindReply):
                return _deferred(reply, leases, cordoned_s=self._cordoned_s(record))
        if not record.missed_replies and not record.cordon_reason:
            return {}
        reason = record.cordon_reason or f"the agent of node {node} does not respond"
        deferral = Deferral(reason, cordoned_s=self._cordoned_s(record))
        return dict.fromkeys((lease.pod for lease in leases), deferral)

    def _may_request(self, record: AgentRecord) -> bool:
        return not record.is_refused and self.clock.ticks() >= record.next_request_at

    async def _request(
        self, node: NodeName, record: AgentRecord, leases: Sequence[Lease]
    ) -> BindReply | NoReply | None:
        """Join the batches that wait until the agent has replied: it replies to one at a time."""
        joined = record.next_request
        if joined is None or not joined.takes(leases):
            joined = record.next_request = JoinedRequest()
            joined.reply = asyncio.create_task(self._send(node, record, joined))
            joined.reply.add_done_callback(_retrieve)
        joined.add(leases)
        return await asyncio.shield(joined.reply)

    async def _send(
        self, node: NodeName, record: AgentRecord, joined: JoinedRequest
    ) -> BindReply | NoReply | None:
        async with record.turn:
            if record.next_request is joined:
                record.next_request = None
            if not self._may_request(record):  # since the reply before, or for the lack of it
                return None
            async with self._requests:
                reply = await self.agents.request_bind(node, tuple(joined.leases.values()))
            if isinstance(reply, NoReply) and not record.exists:
                record.exists = reply.has_responder or await self.reported_by_agent(node)
            if record.is_refused:  # meanwhile
                return None
            self._record_reply(node, record, reply)
            return reply

    def _record_reply(
        self, node: NodeName, record: AgentRecord, reply: BindReply | NoReply
    ) -> None:
        now = self.clock.ticks()
        if isinstance(reply, BindReply):
            record.exists = True
            record.missed_replies = 0
            record.pause_s = RETRY_S
            record.next_request_at = now + TRUSTED_S if reply.window_open else 0.0
            self._set_cordon(record, reply.reason if reply.node_closed else "")
        elif record.exists:
            record.missed_replies += 1
            record.next_request_at = now + record.pause_s
            record.pause_s = min(2 * record.pause_s, MAX_RETRY_S)
            if record.missed_replies >= CORDON_AFTER:
                reason = f"the agent of node {node} does not respond: {reply.reason}"
                self._set_cordon(record, reason)
        else:
            record.missed_replies = 0
            record.next_request_at = now + NO_AGENT_S

    def _record(self, node: NodeName) -> AgentRecord:
        record = self._records.setdefault(node, AgentRecord(pause_s=RETRY_S))
        record.used_at = self.clock.ticks()
        return record

    def _set_cordon(self, record: AgentRecord, reason: str) -> None:
        if bool(reason) != bool(record.cordon_reason):
            record.cordoned_at = self.clock.ticks()
            self.changed.set()
        record.cordon_reason = reason
        record.uncordon = not reason

    def _cordoned_s(self, record: AgentRecord) -> float:
        return self.clock.ticks() - record.cordoned_at if record.cordon_reason else 0.0


def _retrieve(reply: "asyncio.Task[BindReply | NoReply | None]") -> None:
    """Retrieve an error that no batch may wait for any more."""
    if not reply.cancelled():
        reply.exception()


def _deferred(
    reply: BindReply, leases: Sequence[Lease], *, cordoned_s: float
) -> dict[PodUid, Deferral]:
    later = Deferral(reply.reason, retry_soon=reply.retry_soon, cordoned_s=cordoned_s)
    unserved = Deferral(reply.unserved_reason, cordoned_s=reply.unserved_s)
    deferrals = {
        **dict.fromkeys(reply.deferred_pods, later),
        **dict.fromkeys(reply.unserved_pods, unserved),
        **{pod: Deferral(text, refused=True) for pod, text in reply.refusals.items()},
    }
    return {lease.pod: deferrals[lease.pod] for lease in leases if lease.pod in deferrals}


@dataclass(eq=False)
class NodeCordons:
    ledger: RedisLeases
    presence: AgentPresence

    def __post_init__(self) -> None:
        self.cordoned: Mapping[NodeName, str] = {}

    @loops(wait=lambda cordons: cordons.wait())
    async def cordon_nodes(self) -> None:
        self.presence.changed.clear()
        if await self.ledger.status(now=self.presence.clock.ticks()) is None:
            return
        await self._save()
        if self.cordoned:
            await self.presence.probe_cordoned()
            if self.presence.cordon_changes():
                await self._save()

    async def wait(self) -> None:
        await wait_for_event(self.presence.changed, PROBE_S if self.cordoned else IDLE_S)

    async def _save(self) -> None:
        changes = self.presence.cordon_changes()
        self.cordoned = await self.ledger.set_cordoned(changes)
        self.presence.apply_cordons(self.cordoned, changes)

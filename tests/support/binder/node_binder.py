"""A binder for the node of a `OneNodeCluster`: requests, commits, publishes, binds."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from services.binder.bind.agent_presence import AgentPresence
from services.binder.clients import NodeAgentClient, NoReply
from shared.model.clock import SystemClock
from shared.model.events.request_reply import BindReply, BindRequest
from shared.model.leases.lease import Lease, LeaseState, Share
from shared.model.names import NodeName
from simcluster.apiserver.kinds.binding import bind
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, lease_of
from tests.support.simcluster.kubelet import NODE, pod

WAIT_S = 0.05


@dataclass
class Agents(NodeAgentClient):
    """The one agent, while it runs."""

    cluster: OneNodeCluster

    async def request_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindReply | NoReply:
        if self.cluster.agent is None:
            return NoReply(reason="no responders", has_responder=False)
        return await self.cluster.agent.admit_binds(BindRequest(node=node, leases=tuple(leases)))

    async def reported_by_agent(self, node: NodeName) -> bool:
        return bool(self.cluster.reported)


@dataclass(slots=True)
class Binder:
    """A binder of this node only; records why pods had to wait."""

    cluster: OneNodeCluster
    waits: list[str] = field(default_factory=list)
    presence: AgentPresence = field(init=False)

    def __post_init__(self) -> None:
        agents = Agents(self.cluster)
        self.presence = AgentPresence(agents, agents.reported_by_agent, SystemClock())

    async def bind(self, lease: Lease) -> None:
        while deferrals := await self.presence.deferrals([lease]):
            self.waits.append(deferrals[lease.pod].reason)
            await asyncio.sleep(WAIT_S)
        bound = self.cluster.ledger.grant(structs.replace(lease, state=LeaseState.BOUND, version=2))
        if self.cluster.agent is not None:
            await self.cluster.push_lease(bound)
        post(self.cluster, lease.name)


def post(cluster: OneNodeCluster, name: str) -> None:
    """Send a Binding."""
    target = {"target": {"kind": "Node", "name": NODE}}
    bind(cluster.node.store, "default", name, target, dry_run=False)


def reserve(cluster: OneNodeCluster, n: int, *parts: Share, name: str = "", **spec: Any) -> Lease:
    """Create a pod without a node, and a reservation for it."""
    named = name or f"p{n}"
    limits = spec.pop("limits", {NUMBER: 1})
    created = cluster.node.create(pod(named, limits=limits, node=None, **spec))["metadata"]
    facts: dict[str, Any] = {"name": named, "state": LeaseState.RESERVED, "version": 1}
    return lease_of(created["uid"], *parts, **facts)

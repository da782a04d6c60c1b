"""Node agents whose replies a test chooses."""

from collections.abc import Sequence

from services.binder.agent_client import NodeAgentClient, NoReply
from shared.model.errors import UnavailableError
from shared.model.events.request_reply import BindReply
from shared.model.lease import Lease
from shared.model.names import NodeName
from tests.support.binder.world import lease

N1, N2 = NodeName("n1"), NodeName("n2")


def away(*pods: str) -> BindReply:
    """The reply for pods that must wait because the agent is stopping."""
    deferred = tuple(lease(name).pod for name in pods)
    reason = "its agent is being stopped"
    return BindReply(deferred_pods=deferred, reason=reason, window_open=False, node_closed=True)


class Agents(NodeAgentClient):
    """Agents of nodes, each away or present, and what the ledger knows; counts requests."""

    def __init__(self) -> None:
        self.there: dict[NodeName, BindReply] = {}
        self.hanging: set[NodeName] = set()
        self.reported: set[NodeName] = set()
        self.cut_off = False
        self.requests = 0

    async def reported_by_agent(self, node: NodeName) -> bool:
        return node in self.reported

    async def request_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindReply | NoReply:
        self.requests += 1
        if self.cut_off:
            raise UnavailableError("NATS is away")
        silent = NoReply(reason="no reply", has_responder=node in self.hanging)
        return self.there.get(node, silent)

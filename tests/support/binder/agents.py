"""Node agents that a binder asks, as a test wants them to be."""

from collections.abc import Sequence

from services.binder.ports.nats import NoReply
from shared.model.errors import UnavailableError
from shared.model.events.request_reply import BindReply
from shared.model.lease import Lease
from shared.model.names import NodeName
from tests.support.binder.world import lease

N1, N2 = NodeName("n1"), NodeName("n2")


def away(*pods: str) -> BindReply:
    """Answer for pods that must wait since the agent is leaving."""
    held = tuple(lease(name).pod for name in pods)
    reason = "its agent is being stopped"
    return BindReply(deferred_pods=held, reason=reason, window_open=False, node_closed=True)


class Agents:
    """Agents of nodes, each away or there, and what the ledger knows; counts questions."""

    def __init__(self) -> None:
        self.there: dict[NodeName, BindReply] = {}
        self.hanging: set[NodeName] = set()
        self.reported: set[NodeName] = set()
        self.cut_off = False
        self.questions = 0

    async def reported_by_agent(self, node: NodeName) -> bool:
        return node in self.reported

    async def request_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindReply | NoReply:
        self.questions += 1
        if self.cut_off:
            raise UnavailableError("NATS is away")
        silent = NoReply(reason="no reply", has_responder=node in self.hanging)
        return self.there.get(node, silent)

"""Node agents, asked over the bus."""

from collections.abc import Sequence

from services.binder.bind.agent_presence import NoReply
from shared.model.errors import UnavailableError
from shared.model.events.request_reply import (
    BindReply,
    BindRequest,
    LimitsReply,
    LimitsRequest,
    TerminationReply,
    TerminationRequest,
)
from shared.model.lease import Lease
from shared.model.names import NodeName, PodUid
from shared.nats.bus import Bus, NoRespondersError

ANSWER_S = 0.9
LIMITS_S = 3.0
"""An agent writes its checkpoint and looks twice at what is in use before it answers."""
MAY_BIND_S = 0.5
"""A batch of Bindings waits for the answer."""


class NodeAgentClient:
    """Questions to the agent of one node."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def list_terminated(self, node: NodeName, pods: Sequence[PodUid]) -> set[PodUid]:
        """Tell which pods' last containers have ended; while nobody can be asked, none has.

        Raises UnavailableError if the node's agent does not answer.
        """
        if not self.bus.connected:
            return set()
        question = TerminationRequest(node=node, pod=pods[0], more_pods=tuple(pods[1:]))
        told = await self.bus.request(question, TerminationReply, timeout_s=ANSWER_S)
        return {*told.terminated_pods, *(pods[:1] if told.terminated else ())}

    async def request_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindReply | NoReply:
        """Tell which of the pods must wait before they are bound to the node.

        Raises UnavailableError while NATS is away: then it is not the agent that is silent.
        """
        question = BindRequest(node=node, leases=tuple(leases))
        try:
            return await self.bus.request(question, BindReply, timeout_s=MAY_BIND_S)
        except NoRespondersError as error:
            return NoReply(str(error), has_responder=False)
        except UnavailableError as error:
            if not self.bus.connected:
                raise
            return NoReply(str(error), has_responder=True)

    async def set_limits(self, question: LimitsRequest) -> LimitsReply:
        """Have containers held to a lease, or to what it may become.

        Raises UnavailableError if the node's agent does not answer.
        """
        return await self.bus.request(question, LimitsReply, timeout_s=LIMITS_S)

"""Requests to node agents over NATS."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.model.errors import UnavailableError
from shared.model.events.request_reply import (
    BindReply,
    BindRequest,
    LimitsReply,
    LimitsRequest,
    SlicesReply,
    SlicesRequest,
    TerminationReply,
    TerminationRequest,
)
from shared.model.lease import Lease
from shared.model.names import NodeName, PodUid
from shared.nats.bus import Bus, NoRespondersError

TERMINATION_TIMEOUT_S = 0.9
LIMITS_TIMEOUT_S = 3.0
"""An agent writes its checkpoint and measures memory twice before it replies."""
SLICES_TIMEOUT_S = 2.0
BIND_TIMEOUT_S = 0.5
"""A batch of Bindings waits for the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReply:
    """A request to a node agent that got no reply."""

    reason: str
    has_responder: bool
    """Whether an agent subscribes to the request's subject."""


class NodeAgentClient:
    """Requests to the agent of one node."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def list_terminated(self, node: NodeName, pods: Sequence[PodUid]) -> set[PodUid]:
        """Return the pods whose last container has terminated; none while NATS is away.

        Raises UnavailableError if the node agent does not reply.
        """
        if not self.bus.connected:
            return set()
        request = TerminationRequest(node=node, pod=pods[0], more_pods=tuple(pods[1:]))
        reply = await self.bus.request(request, TerminationReply, timeout_s=TERMINATION_TIMEOUT_S)
        more = set(pods[1:]).intersection(reply.terminated_pods)
        return {*more, *(pods[:1] if reply.terminated else ())}

    async def request_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindReply | NoReply:
        """Return which of the pods must wait before they are bound to the node.

        Raises UnavailableError while NATS is away: the agent is not the cause then.
        """
        request = BindRequest(node=node, leases=tuple(leases))
        try:
            return await self.bus.request(request, BindReply, timeout_s=BIND_TIMEOUT_S)
        except NoRespondersError as error:
            return NoReply(reason=str(error), has_responder=False)
        except UnavailableError as error:
            if not self.bus.connected:
                raise
            return NoReply(reason=str(error), has_responder=True)

    async def write_slices(self, node: NodeName) -> str:
        """Let the node's slices follow the ledger; return why they do not, or an empty text."""
        request = SlicesRequest(node=node)
        try:
            reply = await self.bus.request(request, SlicesReply, timeout_s=SLICES_TIMEOUT_S)
        except UnavailableError as error:
            return str(error)
        return "" if reply.written else reply.reason

    async def set_limits(self, request: LimitsRequest) -> LimitsReply:
        """Enforce a lease, or a proposed one.

        Raises UnavailableError if the node agent does not reply.
        """
        return await self.bus.request(request, LimitsReply, timeout_s=LIMITS_TIMEOUT_S)

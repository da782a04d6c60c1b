"""Requests which containers have terminated from a node's agent."""

from collections.abc import Sequence

from shared.model.events.request_reply import TerminationReply, TerminationRequest
from shared.model.names import NodeName, PodUid
from shared.nats.bus import Bus

REPLY_S = 0.9
"""Binders sweep each second, and wait for the agents' replies."""


async def list_terminated(bus: Bus, node: NodeName, pods: Sequence[PodUid]) -> set[PodUid]:
    """Return no pods while NATS is away.

    Raises UnavailableError if the node agent does not reply.
    """
    if not bus.connected:
        return set()
    request = TerminationRequest(node=node, pod=pods[0], more_pods=tuple(pods[1:]))
    reply = await bus.request(request, TerminationReply, timeout_s=REPLY_S)
    more = set(pods[1:]).intersection(reply.terminated_pods)
    return {*more, *(pods[:1] if reply.terminated else ())}

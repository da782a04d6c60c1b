"""Has the agent of a node write its ResourceSlices."""

from shared.model.errors import UnavailableError
from shared.model.events.request_reply import SlicesReply, SlicesRequest
from shared.model.names import NodeName
from shared.nats.bus import Bus

SLICES_TIMEOUT_S = 2.0
"""An agent writes ResourceSlices to the API server before it replies."""


async def request_slices(bus: Bus, node: NodeName, *, renewed: bool = False) -> str:
    """Return why the slices do not follow the ledger, or ""."""
    request = SlicesRequest(node=node, renewed=renewed)
    try:
        reply = await bus.request(request, SlicesReply, timeout_s=SLICES_TIMEOUT_S)
    except UnavailableError as error:
        return str(error)
    return "" if reply.written else reply.reason

"""Requests the measured usage of nodes' leased shares from their agents."""

import asyncio
from collections.abc import Iterable

from shared.model.errors import UnavailableError
from shared.model.events.request_reply import UsageReply, UsageRequest
from shared.model.names import NodeName
from shared.nats.bus import Bus

REPLY_S = 2.0
"""How long agents may take to reply with the use of their devices."""
MOST_AT_ONCE = 64


async def request_usage(bus: Bus, nodes: Iterable[NodeName]) -> dict[NodeName, UsageReply | None]:
    """Return None for an agent without a reply."""
    turns = asyncio.Semaphore(MOST_AT_ONCE)

    async def request(node: NodeName) -> tuple[NodeName, UsageReply | None]:
        async with turns:
            try:
                reply = await bus.request(UsageRequest(node=node), UsageReply, timeout_s=REPLY_S)
            except UnavailableError:
                return node, None
            return node, reply

    return dict(await asyncio.gather(*map(request, nodes)))

"""Requests the measured usage of leased shares from the node agents."""

import asyncio
from collections.abc import Iterable

from services.cli.snapshot.location import ClusterLocation
from services.cli.snapshot.snapshot import MeasuredUsage
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.events.request_reply import UsageReply, UsageRequest
from shared.model.ledger import NodeTotals
from shared.model.names import NodeName
from shared.nats.bus import Bus

CONNECT_S = 2.0
REPLY_S = 2.0


async def read_usage(location: ClusterLocation, nodes: Iterable[NodeTotals]) -> MeasuredUsage:
    """Request the usage on the nodes with leases, from all of them at once.

    Never raises an error of ours: usage is shown beside leases, which are shown without it, too.
    """
    names = sorted(totals.node.facts.name for totals in nodes if totals.leases)
    if not names:
        return MeasuredUsage()
    if not location.nats_url:
        return MeasuredUsage(problem="usage is not shown: set --nats-url")
    try:
        async with Bus.connect(
            location.nats_url,
            name="leasehold usage",
            credentials=location.nats_credentials,
            creates_stream=False,
            patience_s=CONNECT_S,
        ) as bus:
            return await request_usage(bus, names)
    except LeaseholdError as error:
        return MeasuredUsage(problem=f"usage is not shown: {error}")


async def request_usage(
    bus: Bus, nodes: Iterable[NodeName], *, timeout_s: float = REPLY_S
) -> MeasuredUsage:
    """Request the usage on these nodes; those without a reply in `timeout_s` are unmeasured."""

    async def request(node: NodeName) -> tuple[NodeName, UsageReply | None]:
        try:
            reply = await bus.request(UsageRequest(node=node), UsageReply, timeout_s=timeout_s)
        except UnavailableError:
            return node, None
        return node, reply

    replies = await asyncio.gather(*map(request, nodes))
    return MeasuredUsage(
        shares={one.key: one for _, reply in replies if reply for one in reply.shares},
        unmeasured_nodes=tuple(node for node, reply in replies if reply is None),
    )

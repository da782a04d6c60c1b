"""Reads the measured usage of leased shares from the node agents."""

import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Self

from services.cli.snapshot.location import ClusterLocation
from services.cli.snapshot.snapshot import MeasuredUsage
from shared.model.errors import LeaseholdError
from shared.model.events.request_reply import UsageReply
from shared.model.ledger import NodeTotals
from shared.model.names import NodeName, PodUid
from shared.model.usage import IDLE_AFTER_S, ShareMeasurement
from shared.nats.bus import Bus
from shared.nats.usage_requests import request_usage

CONNECT_S = 2.0


def _own_shares(
    replies: Mapping[NodeName, UsageReply | None], leased: Mapping[NodeName, Container[PodUid]]
) -> Iterator[ShareMeasurement]:
    """Yield what the nodes have measured of pods with a lease there."""
    for node, reply in replies.items():
        yield from (one for one in (reply.shares if reply else ()) if one.pod in leased[node])


class UsageReader:
    """Connects to NATS at the first read, and keeps the connection until the context exits."""

    def __init__(self, location: ClusterLocation, *, idle_after_s: float = IDLE_AFTER_S) -> None:
        self.location = location
        self.idle_after_s = idle_after_s
        self._stack = AsyncExitStack()
        self._bus: Bus | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def read(self, nodes: Iterable[NodeTotals]) -> MeasuredUsage:
        """Request the usage on the nodes with leases, from all of them at once.

        Never raises an error of ours: usage is shown beside leases, which are shown without it,
        too.
        """
        leased = {
            totals.node.facts.name: {lease.pod for lease in totals.leases}
            for totals in nodes
            if totals.leases
        }
        names = sorted(leased)
        usage = MeasuredUsage(read_at=time.time(), idle_after_s=self.idle_after_s)
        if not names:
            return usage
        if not self.location.nats_url:
            return replace(usage, problem="usage is not shown: set --nats-url")
        try:
            replies = await request_usage(await self._connected(), names)
        except LeaseholdError as error:
            return replace(usage, problem=f"usage is not shown: {error}")
        return replace(
            usage,
            shares={one.key: one for one in _own_shares(replies, leased)},
            unmeasured_nodes=tuple(node for node, reply in replies.items() if reply is None),
        )

    async def _connected(self) -> Bus:
        if self._bus is None:
            self._bus = await self._stack.enter_async_context(
                Bus.connect(
                    self.location.nats_url,
                    name="leasehold usage",
                    credentials=self.location.nats_credentials,
                    patience_s=CONNECT_S,
                )
            )
        return self._bus

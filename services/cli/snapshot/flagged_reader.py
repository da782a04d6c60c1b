"""Runs what reads a Leasehold for a command, from where its flags say."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeVar

from services.cli.snapshot.location import locate
from services.cli.snapshot.snapshot import MeasuredUsage, PodSummary, Snapshot
from shared.model.errors import RequestError
from shared.model.ledger import NodeTotals

T = TypeVar("T")
MINUTE_S = 60.0


class ClusterReader(Protocol):
    """Reads the ledger and the agents themselves, or what the dashboard shows of them."""

    async def nodes(self) -> tuple[NodeTotals, ...]:
        """Return every node's totals and leases."""
        ...

    async def read_usage(self, nodes: Iterable[NodeTotals], /) -> MeasuredUsage:
        """Return the measured usage on nodes that were just read."""
        ...

    async def pod(self, namespace: str, name: str) -> PodSummary | None:
        """Return one pod of the API server, or None."""
        ...

    async def snapshot(self, *, now: float, pods: bool = True) -> Snapshot:
        """Return everything, and the pods of the API server if they are needed."""
        ...

    async def with_usage(self, snapshot: Snapshot) -> Snapshot:
        """Add the measured usage."""
        ...


def read_with_flags(
    flags: argparse.Namespace,
    read: Callable[[ClusterReader], Awaitable[T]],
    *,
    pods: bool = True,
) -> T:
    """Open what the flags name; of a stack the API server only if `pods` are needed."""
    if flags.idle_after < 0:
        raise RequestError(f"--idle-after must be at least 0, got {flags.idle_after:g}")
    location = locate(flags)
    after_s = flags.idle_after * MINUTE_S

    async def reading() -> T:
        if location.redis_url:
            from services.cli.snapshot.snapshot_reader import open_reader

            async with open_reader(location, pods=pods, idle_after_s=after_s) as reader:
                return await read(reader)
        from services.cli.snapshot.dashboard_reader import open_dashboard_reader

        async with open_dashboard_reader(location, idle_after_s=after_s) as dashboard:
            return await read(dashboard)

    return asyncio.run(reading())

"""Runs what reads a Leasehold for a command, with the servers that its flags name."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.cli.snapshot.location import locate, nats_credentials_of, redis_credentials_of
from services.cli.snapshot.snapshot_reader import SnapshotReader, open_reader
from shared.model.errors import RequestError

T = TypeVar("T")
MINUTE_S = 60.0


def read_with_flags(
    flags: argparse.Namespace,
    read: Callable[[SnapshotReader], Awaitable[T]],
    *,
    pods: bool = True,
) -> T:
    """Open the servers of a command with usage, and the API server if `pods` are needed."""
    if flags.idle_after < 0:
        raise RequestError(f"--idle-after must be at least 0, got {flags.idle_after:g}")
    location = locate(
        flags.state,
        redis_url=flags.redis_url,
        redis_credentials=redis_credentials_of(flags),
        nats_url=flags.nats_url,
        nats_credentials=nats_credentials_of(flags),
        kubeconfig=flags.kubeconfig,
    )

    async def reading() -> T:
        after_s = flags.idle_after * MINUTE_S
        async with open_reader(location, pods=pods, idle_after_s=after_s) as reader:
            return await read(reader)

    return asyncio.run(reading())

"""The bus on three NATS servers: work continues while any of them runs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from shared.model.errors import UnavailableError
from shared.nats.bus import Bus
from tests.integration.nats.world import Recorder, queued, running
from tests.support.servers.nats import NatsServer, free_port
from tests.support.waiting import until

SERVERS = 3


@pytest.fixture
async def cluster() -> AsyncIterator[list[NatsServer]]:
    """Three servers, with the settings of k8s/overlays/ha."""
    ports = [free_port() for _ in range(SERVERS)]
    routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ports)
    servers = [
        NatsServer(
            more=f"server_name: nats-{number}\n"
            f'cluster {{ name: leasehold, listen: "127.0.0.1:{port}", routes: [{routes}] }}\n'
        )
        for number, port in enumerate(ports)
    ]
    try:
        for server in servers:
            server.launch()
        yield servers
    finally:
        for server in servers:
            server.close()


@contextlib.asynccontextmanager
async def connected(cluster: Sequence[NatsServer]) -> AsyncIterator[Bus]:
    """A bus, as soon as the servers have found each other: the first one names the others."""
    async with contextlib.AsyncExitStack() as stack:

        async def opened() -> Bus | None:
            with contextlib.suppress(UnavailableError):
                bus = Bus.connect(cluster[0].url, name="test", patience_s=5)
                return await stack.enter_async_context(bus)
            return None

        bus: Bus = await until(opened)
        await until(lambda: len(bus.client.servers) == SERVERS)
        yield bus


async def test_work_arrives_while_one_of_three_servers_runs(cluster: list[NatsServer]) -> None:
    recorder = Recorder()
    async with (
        connected(cluster) as sender,
        connected(cluster) as receiver,
        asyncio.timeout(90),
        running(receiver, recorder),
    ):

        async def arrives(number: int) -> None:
            await sender.publish([queued(number)])
            await until(lambda: f"p{number}" in recorder.seen)

        await arrives(1)
        for number, server in enumerate(cluster[:-1], start=2):
            server.kill()
            await arrives(number)
        for server in cluster[:-1]:
            server.launch()
        await arrives(4)

"""The bus on three NATS servers: work continues while any of them runs."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from shared.model.errors import UnavailableError
from shared.nats.bus import Bus
from tests.integration.nats.world import Recorder, queued, running
from tests.support.servers.nats import free_port, nats_binary
from tests.support.waiting import until

SERVERS = 3


@dataclass
class Cluster:
    """Three servers, started with the flags of k8s/overlays/ha."""

    ports: list[int]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """One server of the cluster: it names the others to its clients."""
        return f"nats://127.0.0.1:{self.ports[0]}"

    def start(self, number: int) -> None:
        routes = ",".join(f"nats://127.0.0.1:{port}" for port in self.ports[SERVERS:])
        self.processes[number] = subprocess.Popen(
            [
                nats_binary(), f"--name=nats-{number}", "--cluster_name=leasehold",
                "--addr=127.0.0.1", f"--port={self.ports[number]}",
                f"--cluster=nats://127.0.0.1:{self.ports[SERVERS + number]}", f"--routes={routes}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def kill(self, number: int) -> None:
        process = self.processes[number]
        process.kill()
        process.wait()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster([free_port() for _ in range(2 * SERVERS)])
    try:
        for number in range(SERVERS):
            made.start(number)
        yield made
    finally:
        for number in made.processes:
            made.kill(number)


@contextlib.asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[Bus]:
    """A bus, as soon as the servers have found each other."""
    async with contextlib.AsyncExitStack() as stack:

        async def opened() -> Bus | None:
            with contextlib.suppress(UnavailableError):
                return await stack.enter_async_context(
                    Bus.connect(cluster.url, name="test", patience_s=5)
                )
            return None

        bus: Bus = await until(opened)
        await until(lambda: len(bus.client.servers) == SERVERS)
        yield bus


async def test_work_arrives_while_one_of_three_servers_runs(cluster: Cluster) -> None:
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
        for number in range(SERVERS - 1):
            cluster.kill(number)
            await arrives(2 + number)
        for number in range(SERVERS - 1):
            cluster.start(number)
        await arrives(4)

"""The bus on three NATS servers: work is there in as many copies as were asked for."""

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import nats
import nats.errors
import pytest

from shared.model.errors import UnavailableError
from shared.nats.bus import Bus
from shared.nats.subjects import STREAM
from tests.integration.nats.test_bus import Recorder, queued, running
from tests.support.servers.nats import free_port, nats_binary
from tests.support.waiting import until

SERVERS = 3


@dataclass
class Cluster:
    ports: list[int]
    processes: list[subprocess.Popen[bytes]]

    @property
    def url(self) -> str:
        """One of them: it names the others to whoever connects."""
        return f"nats://127.0.0.1:{self.ports[0]}"

    def kill(self, name: str) -> None:
        process = self.processes[int(name.removeprefix("nats-"))]
        process.kill()
        process.wait()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Three servers, started with the flags of k8s/overlays/ha."""
    store = Path(tempfile.mkdtemp(prefix="lh-nats-"))
    ports = [free_port() for _ in range(2 * SERVERS)]
    routes = ",".join(f"nats://127.0.0.1:{port}" for port in ports[SERVERS:])
    processes = [
        subprocess.Popen(
            [
                nats_binary(), "--jetstream", f"--store_dir={store / str(number)}",
                f"--name=nats-{number}", "--cluster_name=leasehold", "--addr=127.0.0.1",
                f"--port={ports[number]}",
                f"--cluster=nats://127.0.0.1:{ports[SERVERS + number]}", f"--routes={routes}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in range(SERVERS)
    ]  # fmt: skip
    try:
        yield Cluster(ports[:SERVERS], processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(store)


@contextlib.asynccontextmanager
async def connected(cluster: Cluster, *, copies: int) -> AsyncIterator[Bus]:
    """A bus, as soon as the servers have found each other."""
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(60):
        while True:
            with contextlib.suppress(UnavailableError):
                bus = await stack.enter_async_context(
                    Bus.connect(cluster.url, name="test", copies=copies, patience_s=5)
                )
                break
            await asyncio.sleep(0.2)
        yield bus


async def led(bus: Bus, *, not_by: str = "") -> str:
    """The name of the server that leads the stream, once one does."""
    while True:
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            info = await bus.stream.stream_info(STREAM)
            leader = str(info.cluster.leader or "") if info.cluster else ""
            if leader not in {"", not_by}:
                return leader
        await asyncio.sleep(0.1)


async def test_waiting_work_outlives_the_server_that_leads_it(cluster: Cluster) -> None:
    async with connected(cluster, copies=3) as bus, asyncio.timeout(60):
        await bus.publish([queued(1)])
        leader = await led(bus)
        assert (await bus.stream.stream_info(STREAM)).config.num_replicas == 3

        cluster.kill(leader)
        await led(bus, not_by=leader)

        recorder = Recorder()
        task = await running("placer", recorder, bus)
        await until(lambda: recorder.seen == ["p1"])
        await bus.publish([queued(2)])
        await until(lambda: recorder.seen == ["p1", "p2"])
        task.cancel()

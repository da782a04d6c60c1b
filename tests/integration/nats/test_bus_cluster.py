"""The bus on three NATS servers: streams have the requested number of replicas."""

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
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
    """Three servers, started with the flags of k8s/overlays/ha."""

    store: Path
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
                nats_binary(), "--jetstream", f"--store_dir={self.store / str(number)}",
                f"--name=nats-{number}", "--cluster_name=leasehold", "--addr=127.0.0.1",
                f"--port={self.ports[number]}",
                f"--cluster=nats://127.0.0.1:{self.ports[SERVERS + number]}", f"--routes={routes}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def kill(self, name: str) -> None:
        process = self.processes[int(name.removeprefix("nats-"))]
        process.kill()
        process.wait()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    store = Path(tempfile.mkdtemp(prefix="lh-nats-"))
    made = Cluster(store, [free_port() for _ in range(2 * SERVERS)])
    try:
        for number in range(SERVERS):
            made.start(number)
        yield made
    finally:
        for number in made.processes:
            made.kill(f"nats-{number}")
        shutil.rmtree(store)


@contextlib.asynccontextmanager
async def connected(cluster: Cluster, *, copies: int) -> AsyncIterator[Bus]:
    """A bus, as soon as the servers have found each other."""
    async with contextlib.AsyncExitStack() as stack:

        async def opened() -> Bus | None:
            with contextlib.suppress(UnavailableError):
                return await stack.enter_async_context(
                    Bus.connect(cluster.url, name="test", copies=copies, patience_s=5)
                )
            return None

        bus: Bus = await until(opened)
        await until(lambda: bus.unready_reason() is None)
        yield bus


async def led(bus: Bus, *, not_by: str = "") -> str:
    """The name of the server that leads the stream, once one does."""

    async def leader() -> str:
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            info = await bus.work.stream.stream_info(STREAM)
            return str(info.cluster.leader or "") if info.cluster else ""
        return ""

    return str(await until(leader, lambda name: name not in {"", not_by}))


async def test_waiting_work_survives_the_loss_of_the_stream_leader(cluster: Cluster) -> None:
    async with connected(cluster, copies=3) as bus, asyncio.timeout(60):
        await bus.publish([queued(1)])
        leader = await led(bus)
        assert (await bus.work.stream.stream_info(STREAM)).config.num_replicas == 3

        cluster.kill(leader)
        await led(bus, not_by=leader)

        recorder = Recorder()
        task = await running("placer", recorder, bus)
        await until(lambda: recorder.seen == ["p1"])
        await bus.publish([queued(2)])
        await until(lambda: recorder.seen == ["p1", "p2"])
        task.cancel()


async def test_work_arrives_without_a_quorum_and_services_are_ready_when_it_is_back(
    cluster: Cluster,
) -> None:
    async with (
        connected(cluster, copies=3) as sender,
        connected(cluster, copies=3) as receiver,
        asyncio.timeout(90),
    ):
        recorder = Recorder()
        task = await running("placer", recorder, receiver)
        await sender.publish([queued(1)])
        await until(lambda: recorder.seen == ["p1"])

        for number in range(1, SERVERS):
            cluster.kill(f"nats-{number}")
        await until(lambda: published(sender, 2))
        await until(lambda: "p2" in recorder.seen)
        await until(lambda: "JetStream is not available" in str(sender.unready_reason()))
        await sender.publish([queued(3)])
        await until(lambda: "p3" in recorder.seen)

        for number in range(1, SERVERS):
            cluster.start(number)
        await until(lambda: sender.unready_reason() is None)
        await until(lambda: receiver.unready_reason() is None)
        await sender.publish([queued(4)])
        await until(lambda: "p4" in recorder.seen)
        task.cancel()


async def published(bus: Bus, number: int) -> bool:
    """Whether an event was published; while the client reconnects, it is not."""
    with contextlib.suppress(UnavailableError):
        await bus.publish([queued(number)])
        return True
    return False

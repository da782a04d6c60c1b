"""The depth of the placers' queue, read from NATS' monitor as KEDA's scaler reads it."""

import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from services.auth.auth_callout import ACCOUNT
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import PodQueued
from shared.nats.bus import Bus
from shared.nats.subjects import durable_of
from tests.integration.nats.test_bus import queued
from tests.support.servers.nats import free_port, nats_binary
from tests.support.waiting import until

SCALED = Path(__file__).parents[3] / "k8s" / "components" / "keda" / "placer-queue.yaml"
SCALED_OBJECT, _ = yaml.safe_load_all(SCALED.read_text())
TRIGGER: dict[str, str] = SCALED_OBJECT["spec"]["triggers"][0]["metadata"]


@dataclass(frozen=True)
class Server:
    """A nats-server with its monitor, started with the flags of the manifests."""

    url: str
    monitor: str

    async def consumers(self) -> list[Any]:
        """Return the consumers of the stream that the trigger names."""
        query = f"acc={TRIGGER['account']}&consumers=true&config=true"
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"{self.monitor}/jsz?{query}") as answer,
        ):
            found = await answer.json()
        streams = found["account_details"][0].get("stream_detail", [])
        [stream] = [one for one in streams if one["name"] == TRIGGER["stream"]]
        return list(stream["consumer_detail"])

    async def lag(self) -> int:
        """Count as KEDA does: what waits, and what replicas have in their hands."""
        [ours] = [one for one in await self.consumers() if one["name"] == TRIGGER["consumer"]]
        return int(ours["num_pending"] + ours["num_ack_pending"])


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[Server]:
    client, monitor = free_port(), free_port()
    process = subprocess.Popen(
        [
            nats_binary(), "--addr", "127.0.0.1", "--port", str(client), "--jetstream",
            "--store_dir", str(directory), "--http_port", str(monitor),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield Server(f"nats://127.0.0.1:{client}", f"http://127.0.0.1:{monitor}")
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Bus]:
    """A bus, as soon as the server takes connections."""
    async with AsyncExitStack() as stack:

        async def bus() -> Bus | None:
            with suppress(UnavailableError):
                return await stack.enter_async_context(Bus.connect(server.url, name="test"))
            return None

        yield await until(bus)


def test_the_trigger_names_the_stream_and_consumer_of_the_placers() -> None:
    assert TRIGGER["consumer"] == durable_of("placer", "place_pods")
    assert TRIGGER["account"] == ACCOUNT


async def test_the_depth_counts_waiting_and_unacknowledged_messages(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        async with connected(server) as bus:
            await bus.subscribe([PodQueued], durable=TRIGGER["consumer"])
            depths = [await server.lag()]
            await bus.publish([queued(number) for number in range(3)])
            depths.append(await server.lag())
        async with connected(server) as bus:
            await bus.publish([queued(9)])
            depths.append(await server.lag())

    assert depths == [0, 1, 2], "a message in hand, of three pods, and one that waits"

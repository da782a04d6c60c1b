"""The simulated cluster as a process of its own: ready, killed, back with everything, stopped."""

import asyncio
import json
import signal
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.support.simcluster.apiserver import PODS, Client, a_pod, create, read
from tests.support.simcluster.process import cluster_process
from tests.support.waiting import until


@pytest.fixture
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lh-") as directory:
        yield Path(directory)


@dataclass(frozen=True, slots=True)
class Running:
    """The process, and a session with it."""

    process: asyncio.subprocess.Process
    client: Client
    url: str


@asynccontextmanager
async def cluster(state: Path) -> AsyncIterator[Running]:
    async with cluster_process(state, "--nodes", "1") as process:
        config = yaml.safe_load((state / "kubeconfig").read_text())
        url = config["clusters"][0]["cluster"]["server"]
        context = ssl.create_default_context(cafile=str(state / "tls" / "ca.crt"))
        async with aiohttp.ClientSession(
            url,
            headers={"Authorization": f"Bearer {config['users'][0]['user']['token']}"},
            connector=aiohttp.TCPConnector(ssl=context),
        ) as client:
            yield Running(process, client, url)


async def test_a_kill_loses_no_acknowledged_write(state: Path) -> None:
    async with cluster(state) as first:
        for number in range(50):
            await create(first.client, PODS, a_pod(f"web-{number}", schedulerName="none"))
        before = await read(first.client, PODS)
        first.process.kill()
        await first.process.wait()

    async with cluster(state) as second:
        after = await read(second.client, PODS)
        nodes = await read(second.client, "/api/v1/nodes")

    assert after["items"] == before["items"]
    assert int(after["metadata"]["resourceVersion"]) >= int(before["metadata"]["resourceVersion"])
    assert second.url == first.url
    assert [node["metadata"]["name"] for node in nodes["items"]] == ["node-0"]


async def test_a_signal_stops_it_cleanly_while_watches_are_open(state: Path) -> None:
    async with cluster(state) as running, running.client.get(f"{PODS}?watch=1"):
        running.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            code = await running.process.wait()

    assert code == 0
    assert (state / "kubeconfig").stat().st_mode & 0o777 == 0o600


async def running(up: Running, name: str) -> Any:
    return await until(
        lambda: read(up.client, f"{PODS}/{name}"),
        lambda pod: pod["status"].get("phase") == "Running",
    )


async def test_a_container_keeps_running_after_a_kill_of_the_whole_cluster(state: Path) -> None:
    description = state / "nodes" / "node-0" / "kubelet.json"
    async with cluster(state) as first:
        await create(first.client, PODS, a_pod("one", nodeName="node-0"))
        before = await running(first, "one")
        described = json.loads(description.read_text())
        first.process.kill()

    async with cluster(state) as second:
        await create(second.client, PODS, a_pod("two", nodeName="node-0"))
        await running(second, "two")
        after = await running(second, "one")

        assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"]
        assert json.loads(description.read_text()) == described

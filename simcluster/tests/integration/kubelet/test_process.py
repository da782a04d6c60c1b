"""The simulated cluster as a process: killed and started again, its containers go on."""

import asyncio
import json
import shutil
import signal
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from simcluster.apimachinery.objects import Json
from tests.support.simcluster.kubelet import pod
from tests.support.waiting import until

WITHIN_S = 30


@asynccontextmanager
async def cluster(state: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the cluster with one node until the end of the block, then kill it."""
    (state / "kubeconfig").unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "simcluster", "--state", str(state), "--nodes", "1")
    )
    try:
        await until((state / "kubeconfig").exists)
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()


async def request(state: Path, method: str, path: str, body: Json | None = None) -> Any:
    config = yaml.safe_load((state / "kubeconfig").read_text())
    context = ssl.create_default_context(cafile=state / "tls" / "ca.crt")
    headers = {"Authorization": f"Bearer {config['users'][0]['user']['token']}"}
    url = config["clusters"][0]["cluster"]["server"] + path
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
        session.request(method, url, headers=headers, json=body) as answer,
    ):
        answer.raise_for_status()
        return await answer.json()


async def running(state: Path, name: str) -> Json:
    found: Json = await until(
        lambda: request(state, "GET", f"/api/v1/namespaces/default/pods/{name}"),
        lambda pod: pod["status"].get("phase") == "Running",
    )
    return found


@pytest.fixture
def state() -> Any:
    directory = Path(tempfile.mkdtemp(prefix="lh-"))
    yield directory
    shutil.rmtree(directory)


async def test_a_container_keeps_running_after_a_kill_of_the_whole_cluster(state: Path) -> None:
    description = state / "nodes" / "node-0" / "kubelet.json"
    async with cluster(state):
        await request(state, "POST", "/api/v1/namespaces/default/pods", pod("one"))
        before = await running(state, "one")
        described = json.loads(description.read_text())

    async with cluster(state):
        await request(state, "POST", "/api/v1/namespaces/default/pods", pod("two"))
        await running(state, "two")
        after = await running(state, "one")

        assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"]
        assert json.loads(description.read_text()) == described

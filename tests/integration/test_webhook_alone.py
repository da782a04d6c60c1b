"""The webhook's process while NATS is away: pods are admitted as if it were there."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from tests.integration.test_webhook import NAMES, VGPU, cluster, created, pod
from tests.support.apiserver import ApiUnderTest
from tests.support.nats import free_port


@contextmanager
def process(api: ApiUnderTest, directory: Path, http: str) -> Iterator[None]:
    """Start the webhook where no NATS answers."""
    command = [sys.executable, "-m", "services.webhook", "--kubeconfig", str(api.kubeconfig)]
    command += ["--nats-url", f"nats://127.0.0.1:{free_port()}", "--http", http]
    command += ["--listen", "127.0.0.1:0", "--tls-dir", str(directory)]
    command += ["--names", ",".join(NAMES), "--url", "https://127.0.0.1"]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        running.kill()
        running.wait()


async def test_pods_are_admitted_by_a_webhook_that_started_without_nats(tmp_path: Path) -> None:
    http = f"127.0.0.1:{free_port()}"
    async with cluster() as (api, _, client), aiohttp.ClientSession() as asking:
        with process(api, tmp_path, http):
            async with asyncio.timeout(30):
                while not await is_ready(asking, http):
                    await asyncio.sleep(0.05)

            completed, made = await created(client, pod("good", VGPU, schedulerName="volcano"))
            refused, said = await created(client, pod("bad", {"tencent.com/vcuda-core": "150"}))

    assert (completed, refused) == (201, 400), (made, said)
    assert "multiple of 100" in said["message"]


async def is_ready(asking: aiohttp.ClientSession, http: str) -> bool:
    try:
        async with asking.get(f"http://{http}/readyz") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False

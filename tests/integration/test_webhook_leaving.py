"""A webhook that is told to stop, while an API server still calls it."""

import asyncio
import sys
from pathlib import Path

import aiohttp

from tests.integration.test_webhook import NAMES, VGPU, cluster, created, pod
from tests.integration.test_webhook_alone import is_ready
from tests.support.nats import free_port, nats_server

DRAIN_S = 2.0


async def test_a_webhook_that_leaves_answers_until_everybody_knows(tmp_path: Path) -> None:
    http, listen = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    async with nats_server() as nats, cluster() as (api, _, client):
        command = [sys.executable, "-m", "services.webhook", "--kubeconfig", str(api.kubeconfig)]
        command += ["--nats-url", nats.url, "--http", http, "--listen", listen]
        command += ["--tls-dir", str(tmp_path), "--names", ",".join(NAMES)]
        command += ["--url", "https://127.0.0.1", "--drain-s", str(DRAIN_S)]
        process = await asyncio.create_subprocess_exec(*command)
        try:
            async with asyncio.timeout(30), aiohttp.ClientSession() as asking:
                while not await is_ready(asking, http):
                    await asyncio.sleep(0.05)
                early, _ = await created(client, pod("early", VGPU, schedulerName="volcano"))
                process.terminate()
                while not await is_closing(asking, listen):
                    await asyncio.sleep(0.05)
                late, said = await created(client, pod("late", VGPU, schedulerName="volcano"))
                status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    assert (early, late, status) == (201, 201, 0), said


async def is_closing(asking: aiohttp.ClientSession, listen: str) -> bool:
    """Say whether it answers, and has the connection closed."""
    async with asking.post(f"https://{listen}/mutate", json={}, ssl=False) as told:
        return told.headers.get("Connection") == "close"

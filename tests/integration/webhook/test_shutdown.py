"""A webhook that drains while an API server still calls it."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.support.servers.nats import NatsServer, free_port
from tests.support.servers.service_process import service_process
from tests.support.waiting import until
from tests.support.webhook.replica import NAMES, VGPU, cluster, created, pod

DRAIN_S = 2.0


@pytest.mark.parametrize("with_nats", [True, False])
async def test_a_webhook_answers_while_it_drains(tmp_path: Path, *, with_nats: bool) -> None:
    nats, listen = NatsServer(), f"127.0.0.1:{free_port()}"
    flags = ["--nats-url", nats.url, "--listen", listen, "--drain-s", str(DRAIN_S)]
    flags += ["--tls-dir", str(tmp_path), "--names", ",".join(NAMES), "--url", "https://127.0.0.1"]
    try:
        if with_nats:
            await nats.start()
        async with cluster() as (api, _, client), aiohttp.ClientSession() as direct:
            with service_process("webhook", "--kubeconfig", str(api.kubeconfig), *flags) as webhook:
                await webhook.until_ready()
                async with asyncio.timeout(30):
                    early, _ = await created(client, pod("early", VGPU, schedulerName="volcano"))
                    exiting = asyncio.create_task(webhook.terminated())
                    await until(lambda: is_closing(direct, listen))
                    late, made = await created(client, pod("late", VGPU, schedulerName="volcano"))
                    status = await exiting
    finally:
        nats.close()

    assert (early, late, status) == (201, 201, 0), made


async def is_closing(session: aiohttp.ClientSession, listen: str) -> bool:
    """Whether it answers, and closes the connection."""
    async with session.post(f"https://{listen}/mutate", json={}, ssl=False) as response:
        return response.headers.get("Connection") == "close"

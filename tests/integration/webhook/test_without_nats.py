"""The webhook's process while NATS is away: pods are admitted as if it were there."""

import asyncio
from pathlib import Path

from tests.support.servers.nats import free_port
from tests.support.servers.service_process import service_process
from tests.support.webhook.replica import NAMES, VGPU, cluster, created, pod


async def test_pods_are_admitted_by_a_webhook_that_started_without_nats(tmp_path: Path) -> None:
    flags = ["--nats-url", f"nats://127.0.0.1:{free_port()}", "--listen", "127.0.0.1:0"]
    flags += ["--tls-dir", str(tmp_path), "--names", ",".join(NAMES), "--url", "https://127.0.0.1"]
    async with cluster() as (api, _, client):
        with service_process("webhook", "--kubeconfig", str(api.kubeconfig), *flags) as webhook:
            async with asyncio.timeout(30):
                await webhook.until_ready()

            completed, made = await created(client, pod("good", VGPU, schedulerName="volcano"))
            refused, body = await created(client, pod("bad", {"tencent.com/vcuda-core": "150"}))

    assert (completed, refused) == (201, 400), (made, body)
    assert "multiple of 100" in body["message"]

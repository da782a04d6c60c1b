"""Services wait while NATS or Redis is unavailable or refuses their login."""

import asyncio
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.cli import credentials
from shared.model.names import NodeName
from shared.nats.bus import Bus
from tests.support.auth.cluster import AuthCluster
from tests.support.auth.world import AuthWorld
from tests.support.servers.nats import NatsServer, free_port
from tests.support.servers.service_process import service_process
from tests.support.servers.valkey import ValkeyServer
from tests.support.simcluster.apiserver import api_server
from tests.support.waiting import until

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: test
clusters: [{{name: test, cluster: {{server: "{url}"}}}}]
users: [{{name: test, user: {{}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test}}}}]
"""
LIMIT_S = 60.0
"""Of a slow machine; a second is usual."""


def flags_of(service: str, kubeconfig: Path, nats_url: str, redis_url: str) -> tuple[str, ...]:
    flags: tuple[str, ...] = ("--nats-url", nats_url)
    if service not in {"placer", "api"}:
        flags += ("--kubeconfig", str(kubeconfig))
    if service != "watcher":
        flags += ("--redis-url", redis_url)
    more = {
        "timekeeper": ("--no-objects", "--api", "127.0.0.1:0"),
        "api": ("--listen", "127.0.0.1:0", "--auth", "none"),
    }
    return (*flags, *more.get(service, ()))


async def test_services_wait_for_nats_and_redis_and_continue_without_a_restart() -> None:
    services = ("watcher", "placer", "binder", "timekeeper", "api")
    nats, redis = NatsServer(), ValkeyServer()
    async with api_server() as api:
        with ExitStack() as stack:
            stack.callback(redis.forget)
            stack.callback(nats.close)
            running = {
                name: stack.enter_context(
                    service_process(name, *flags_of(name, api.kubeconfig, nats.url, redis.url))
                )
                for name in services
            }
            waits = (f"nats: NATS at {nats.url} does not respond (connection refused)",)
            async with asyncio.timeout(LIMIT_S):
                for each in running.values():
                    await each.until_unready(*waits)
                    assert await each.page("/healthz") == (200, "ok\n")
                await until(
                    lambda: all("waiting for NATS" in each.log() for each in running.values())
                )

            await nats.start()
            async with asyncio.timeout(LIMIT_S):
                await running["watcher"].until_ready()
                for name in ("placer", "binder", "timekeeper", "api"):
                    await running[name].until_unready("redis: the call to the ledger at")
            redis.start()
            async with asyncio.timeout(LIMIT_S):
                for each in running.values():
                    await each.until_ready()

            codes = [await each.terminated() for each in running.values()]

    assert codes == [0] * len(services)
    for each in running.values():
        warnings = [line["text"] for line in each.warnings()]
        assert len(warnings) == len(set(warnings)), warnings
        (why,) = [text for text in warnings if "NATS" in text]
        assert "is nats-server running, and is LEASEHOLD_NATS_URL right?" in why
        assert "Traceback" not in each.log()


async def test_the_auth_service_creates_the_secrets_of_nats_and_then_waits_for_nats(
    tmp_path: Path,
) -> None:
    cluster = AuthCluster()
    async with cluster.served() as kube:
        world = AuthWorld(tmp_path, cluster, kube, "unix:///nowhere")
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(KUBECONFIG.format(url=cluster.url))
        flags = ["--kubeconfig", str(kubeconfig), "--nats-url", world.url, "--redis-files", ""]
        flags += ["--redis-url", world.settings.redis_url, "--nats-files", str(world.files)]
        flags += ["--names", "127.0.0.1", "--state-dir", str(tmp_path / "run")]
        flags += ["--nats-ca-file", str(tmp_path / "run" / "ca.crt")]
        with service_process("auth", *flags) as auth:
            try:
                async with asyncio.timeout(LIMIT_S):
                    await auth.until_unready(f"NATS at {world.url} does not respond")
                    assert await auth.page("/healthz") == (200, "ok\n")
                    world.start_nats()
                    await auth.until_ready()
                    keys = world.credentials(cluster.issue_token("placer"), "placer")
                    async with Bus.connect(world.url, name="placer", credentials=keys) as bus:
                        assert bus.connected
                    code = await auth.terminated()
            finally:
                world.stop_nats()

    assert code == 0
    assert "Traceback" not in auth.log()


LATE = """
import asyncio
import json
import subprocess
import sys
from shared.runtime.run import run

async def give_up():
    opening = asyncio.create_task(asyncio.open_connection("nowhere.invalid", 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait({opening})

async def main():
    await give_up()
    await asyncio.sleep(60)

run(main, service="test", log_level="debug")
"""
"""Gives up a connection before its name is found unknown."""


async def test_a_name_lookup_that_fails_after_its_timeout_logs_no_traceback() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LATE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                line = json.loads(await process.stderr.readline())
                if "Name or service" in str(line) or "Future" in str(line):
                    break
    finally:
        process.kill()
        await process.wait()

    assert line["level"] == "debug", line
    assert line["text"].startswith("a name lookup failed after its timeout")


@pytest.mark.parametrize("host", ["127.0.0.1", "nats.nowhere.invalid"])
async def test_a_waiting_service_ends_on_sigterm(host: str) -> None:
    nats_url = f"nats://{host}:{free_port()}"
    with service_process("placer", "--nats-url", nats_url) as placer:
        async with asyncio.timeout(LIMIT_S):
            await placer.until_unready(f"NATS at {nats_url} does not respond")

        code = await placer.terminated()

    assert code == 0
    assert "Traceback" not in placer.log()


async def test_a_service_whose_login_is_refused_waits_and_logs_the_remedy(tmp_path: Path) -> None:
    written = credentials.write(tmp_path / "credentials", [NodeName("node-a")], redis=False)
    secret = tmp_path / "placer"
    nats = NatsServer(more=written.nats_configuration.read_text())
    await nats.start()
    with ExitStack() as stack:
        stack.callback(nats.close)
        flags = ("--nats-url", nats.url, "--nats-credentials", str(secret))
        placer = stack.enter_context(service_process("placer", *flags))
        async with asyncio.timeout(LIMIT_S):
            await placer.until_unready(f"nats: cannot read user:secret from {secret}")
            secret.write_text("placer:guessed")
            await placer.until_unready(f"rejects the user in {secret}")
            await until(lambda: "compare the file with the server's configuration" in placer.log())

            secret.write_text(written.nats("placer").read_text())
            await until(lambda: placer.page("/readyz"), lambda page: "nats:" not in page[1])

    assert placer.process.returncode == -9  # by us, at the end
    assert "Traceback" not in placer.log()

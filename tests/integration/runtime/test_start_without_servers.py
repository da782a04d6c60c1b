"""Services without NATS, Redis or the API server, with odd requests, and their tracing."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from services.cli import credentials
from shared.model.names import NodeName
from shared.nats.bus import Bus
from shared.runtime import health
from shared.runtime.health import LOGGER, BadRequestFilter, suppress_bad_request_tracebacks
from shared.runtime.settings import ServiceSettings
from shared.runtime.telemetry import Tracing, open_tracing
from tests.campaign.stack.tcp_proxy import TcpProxy
from tests.support.auth.cluster import AuthCluster
from tests.support.auth.world import AuthWorld
from tests.support.servers.nats import NatsServer, free_port, nats_server
from tests.support.servers.otlp import otlp_receiver
from tests.support.servers.service_process import service_process
from tests.support.servers.valkey import ValkeyServer, valkey_server
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.waiting import until


async def record_span(tracing: Tracing) -> None:
    tracing.record("review", {}, 1, 2)
    await asyncio.to_thread(tracing.close)


@pytest.mark.parametrize(
    ("variables", "name"),
    [({}, "leasehold-placer"), ({"OTEL_SERVICE_NAME": "gpu-placer"}, "gpu-placer")],
)
@pytest.mark.parametrize("endpoint", ["ENDPOINT", "TRACES_ENDPOINT"])
async def test_the_variables_say_where_spans_go_and_whose_they_are(
    variables: dict[str, str], name: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with otlp_receiver() as spans:
        for variable, text in {f"OTEL_EXPORTER_OTLP_{endpoint}": spans.url, **variables}.items():
            monkeypatch.setenv(variable, text)

        await record_span(open_tracing("placer", ServiceSettings()))

        assert [(service, span.name) for service, span in spans.received] == [(name, "review")]


async def test_the_sampler_of_the_variable_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    async with otlp_receiver() as spans:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")

        await record_span(open_tracing("placer", ServiceSettings(otlp_endpoint=spans.url)))

        assert spans.received == []


def test_a_disabled_sdk_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    tracing = open_tracing("placer", ServiceSettings())

    assert tracing.tracer is None


POST = b"POST /metrics HTTP/1.1\r\nHost: a\r\n"
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # a hello of TLS
    bytes(range(256)) * 4,
    b"SSH-2.0-scan\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET http://[::1/ HTTP/1.1\r\nHost: a\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nabc\r\n",
    POST + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
)


async def send(port: int, data: bytes) -> None:
    """Say something, and wait until the other end has nothing more to say to it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        writer.write_eof()
        await reader.read()
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("level", ["info", "debug"])
async def test_a_malformed_http_request_logs_no_traceback(level: str) -> None:
    flags = ("--nats-url", f"nats://127.0.0.1:{free_port()}", "--log-level", level)
    with service_process("placer", *flags) as placer:
        await until(lambda: placer.page("/healthz"), lambda page: page == (200, "ok\n"))
        async with asyncio.timeout(60):
            for data in GARBAGE:
                await send(int(placer.http.rpartition(":")[2]), data)

            assert await placer.page("/healthz") == (200, "ok\n")

    waits = ("ledger", "waiting for NATS")
    texts = [line["text"] for line in placer.warnings()]
    assert [text for text in texts if not any(wait in text for wait in waits)] == []
    assert ("not HTTP" in placer.log()) == (level == "debug")
    assert "traceback" not in placer.log().lower()


async def test_an_error_in_a_handler_logs_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def bug(_: web.Request) -> web.Response:
        raise ValueError("of ours")

    pages = health.application({})
    pages.router.add_get("/bug", bug)
    suppress_bad_request_tracebacks()
    try:
        async with health.served(pages, "127.0.0.1:0") as address:
            async with aiohttp.request("GET", f"http://{address}/bug") as response:
                assert response.status == 500
            await send(int(address.rpartition(":")[2]), GARBAGE[3])
    finally:
        logger = logging.getLogger(LOGGER)
        for one in [each for each in logger.filters if isinstance(each, BadRequestFilter)]:
            logger.removeFilter(one)

    (record,) = [one for one in caplog.records if one.name == LOGGER and one.levelname != "DEBUG"]
    assert record.exc_info
    assert str(record.exc_info[1]) == "of ours"


@asynccontextmanager
async def proxied(api: ApiUnderTest, kubeconfig: Path) -> AsyncIterator[TcpProxy]:
    """Write a kubeconfig that leads to the API server through a proxy."""
    server = URL(api.url)
    proxy = TcpProxy(server.port or 0)
    await proxy.start()
    through_proxy = str(server.with_port(proxy.port))
    kubeconfig.write_text(api.kubeconfig.read_text().replace(api.url, through_proxy))
    try:
        yield proxy
    finally:
        await proxy.close()


async def test_services_that_are_cut_off_from_the_api_server_are_unready_until_it_is_back(
    tmp_path: Path,
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    with ExitStack() as stack:
        redis = stack.enter_context(valkey_server())
        async with nats_server() as nats, api_server() as api, proxied(api, kubeconfig) as proxy:
            servers = ("--kubeconfig", str(kubeconfig), "--nats-url", nats.url)
            flags = {
                "watcher": (),
                "binder": ("--redis-url", redis.url),
                "timekeeper": ("--redis-url", redis.url, "--api", "127.0.0.1:0"),
            }
            running = [
                stack.enter_context(service_process(name, *servers, *more))
                for name, more in flags.items()
            ]
            async with asyncio.timeout(LIMIT_S):
                for each in running:
                    await each.until_ready()

            proxy.cut()
            async with asyncio.timeout(LIMIT_S):
                for each in running:
                    await each.until_unready(
                        "api: requests to the API server fail: no response within 4 s"
                    )
            proxy.heal()
            async with asyncio.timeout(LIMIT_S):
                for each in running:
                    await each.until_ready()

            codes = [await each.terminated() for each in running]

    assert codes == [0] * len(flags)
    assert not any("Traceback" in each.log() for each in running)


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
    nats = NatsServer()
    redis = ValkeyServer()
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

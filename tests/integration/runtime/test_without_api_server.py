"""Services that need the API server are not ready while they do not reach it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from yarl import URL

from tests.campaign.stack.tcp_proxy import TcpProxy
from tests.support.servers.nats import nats_server
from tests.support.servers.service_process import service_process
from tests.support.servers.valkey import valkey_server
from tests.support.simcluster.apiserver import ApiUnderTest, api_server

LIMIT_S = 60.0
"""Of a slow machine; ten seconds are usual."""


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

"""A proxy holds back bytes while it is cut, and spoils the API server's responses as requested."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from simcluster.credentials import api_server_certificates, write_kubeconfig
from tests.campaign.stack.api_proxy import ApiProxy
from tests.campaign.stack.tcp_proxy import HOST, TcpProxy

HELD_S = 0.2

Ask = Callable[[str, str], Awaitable[int]]


@contextlib.asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """A server that sends back each line."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_bytes_pass_wait_while_cut_and_pass_when_healed() -> None:
    async with echo() as port:
        proxy = TcpProxy(port)
        await proxy.start()
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b"one\n")
        assert await reader.readline() == b"one\n"

        proxy.cut()
        writer.write(b"two\n")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(HELD_S):
                await reader.readline()
        proxy.heal()

        async with asyncio.timeout(5):
            assert await reader.readline() == b"two\n"
        writer.close()
        await writer.wait_closed()
        await proxy.close()


@contextlib.asynccontextmanager
async def proxied(tmp_path: Path, written: list[str]) -> AsyncIterator[tuple[ApiProxy, Ask]]:
    """An API server that counts writes, a proxy before it, and a way to send it requests."""
    certificates = api_server_certificates(tmp_path)

    async def serve(request: web.BaseRequest) -> web.Response:
        if request.method == "POST":
            written.append(request.path)
        is_allowed = request.headers["Authorization"] == "Bearer of-the-part"
        return web.Response(text="ok", status=200 if is_allowed else 403)

    runner = web.ServerRunner(web.Server(serve))
    await runner.setup()
    await web.TCPSite(runner, HOST, 0, ssl_context=certificates.server_context()).start()
    account, ca = tmp_path / "account", certificates.ca.read_bytes()
    write_kubeconfig(account, f"https://{HOST}", ca, "of-the-part")
    proxy = ApiProxy(runner.addresses[0][1], tmp_path, account)
    await proxy.start()
    trust = ssl.create_default_context(cafile=str(certificates.ca))
    async with aiohttp.ClientSession() as session:

        async def ask(method: str, path: str) -> int:
            url = f"https://{HOST}:{proxy.port}{path}"
            async with session.request(method, url, ssl=trust) as answer:
                return answer.status

        yield proxy, ask
    await proxy.close()
    await runner.cleanup()


async def test_what_the_account_of_a_part_may_not_do_is_noted(tmp_path: Path) -> None:
    async with proxied(tmp_path, []) as (proxy, ask):
        assert [await ask("GET", "/pods"), proxy.denied] == [200, ""]
    async with proxied(tmp_path, []) as (proxy, ask):
        proxy.account = tmp_path / "other"
        write_kubeconfig(proxy.account, f"https://{HOST}", b"", "of-another")
        assert await ask("GET", "/pods") == 403
        assert proxy.denied == "GET /pods: ok"


@pytest.mark.parametrize("code", [429, 500])
async def test_two_of_three_requests_are_refused(tmp_path: Path, code: int) -> None:
    written: list[str] = []
    async with proxied(tmp_path, written) as (proxy, ask):
        proxy.fault = f"api-{code}"

        assert [await ask("POST", "/pods") for _ in range(3)] == [code, code, 200]
        assert len(written) == 1


async def test_a_conflict_is_only_of_writes_and_expiry_only_of_reads(tmp_path: Path) -> None:
    async with proxied(tmp_path, []) as (proxy, ask):
        proxy.fault = "api-409"
        assert [await ask("GET", "/pods"), await ask("POST", "/pods")] == [200, 409]
        proxy.fault = "api-410"
        assert await ask("GET", "/pods?watch=1&resourceVersion=5") == 410
        assert [await ask("GET", "/pods"), await ask("POST", "/pods")] == [200, 200]


async def test_an_answer_is_lost_after_the_write_was_done(tmp_path: Path) -> None:
    written: list[str] = []
    async with proxied(tmp_path, written) as (proxy, ask):
        proxy.fault = "api-after-write"

        assert await ask("POST", "/pods/a/binding") == 500
        assert written == ["/pods/a/binding"]


async def test_a_cut_holds_requests_back(tmp_path: Path) -> None:
    written: list[str] = []
    async with proxied(tmp_path, written) as (proxy, ask):
        proxy.cut()
        pending = asyncio.ensure_future(ask("POST", "/pods"))
        await asyncio.wait([pending], timeout=HELD_S)
        assert not pending.done()
        assert not written

        proxy.heal()

        async with asyncio.timeout(5):
            assert await pending == 200

"""What comes to a service's port and is no HTTP: no traceback, and no bug of ours is hidden."""

import asyncio
import logging

import aiohttp
import pytest
from aiohttp import web

from shared.runtime import health
from shared.runtime.health import LOGGER, BadRequestFilter, suppress_bad_request_tracebacks
from tests.support.servers.nats import free_port
from tests.support.servers.service_process import service_process
from tests.support.waiting import until

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

    assert [line for line in placer.warnings() if "ledger" not in line["text"]] == []
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

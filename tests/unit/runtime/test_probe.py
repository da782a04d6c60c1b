"""What a container's health check learns from the service beside it."""

import asyncio

import pytest

from shared.runtime import health, probe


@pytest.mark.parametrize(("missing", "status"), [(None, 200), ("not connected", 503)])
async def test_a_service_is_healthy_when_it_is_ready_and_otherwise_the_reasons_are_printed(
    missing: str | None, status: int
) -> None:
    pages = health.application({"nats": lambda: missing})
    async with health.served(pages, "127.0.0.1:0") as address:
        healthy, text = await asyncio.to_thread(probe.request_readiness, address)

    assert healthy == status
    assert (missing or "") in text


async def test_a_port_that_does_not_speak_http_is_unhealthy() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO {}\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(OSError, match=r"not HTTP|reset"):
            await asyncio.to_thread(probe.request_readiness, f"{host}:{port}")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LEASEHOLD_HTTP": "0.0.0.0:9100"}, "127.0.0.1:9100"),
        ({"LEASEHOLD_HTTP": "0.0.0.0:9100", "LEASEHOLD_PROBE": "127.0.0.1:9101"}, "127.0.0.1:9101"),
        ({}, "127.0.0.1:9100"),
    ],
)
def test_the_probe_uses_the_port_of_the_service(environ: dict[str, str], expected: str) -> None:
    assert probe.address(environ) == expected

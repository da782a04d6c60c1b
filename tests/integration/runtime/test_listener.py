"""What a peer that nobody knows can use of an HTTP port, on real sockets."""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from shared.runtime import bodies, connections, health, listener
from shared.runtime.bodies import BODY
from shared.runtime.connections import PortBounds
from shared.runtime.listener import BOUNDS
from tests.support.waiting import until

SMALL, LARGE = 100, 4_000
BOUNDED = PortBounds(
    connections=4,
    body_bytes=LARGE,
    free_body_bytes=SMALL,
    larger_bodies=1,
    first_request_s=2.0,
    body_s=1.0,
)
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Port:
    """An application that returns how long a body is, at /held once it is released.

    There is a large response at /long.
    """

    def __init__(self) -> None:
        self.host = ""
        self.port = ""
        self.writers: list[asyncio.StreamWriter] = []
        self.held = 0
        self.released = asyncio.Event()

    async def connect(self, source: str = "127.0.0.1") -> Peer:
        peer = await asyncio.open_connection(self.host, int(self.port), local_addr=(source, 0))
        self.writers.append(peer[1])
        return peer

    async def close(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def send(
        self, peer: Peer, body: bytes, *headers: str, length: int | None = None, path: str = "/"
    ) -> str:
        """Send a request, and return the status with the body of the response."""
        reader, writer = peer
        length = len(body) if length is None else length
        head = (
            f"POST {path} HTTP/1.1",
            "Host: port",
            f"Content-Length: {length}",
            *headers,
            "",
            "",
        )
        writer.write("\r\n".join(head).encode() + body)
        return await answer(reader)

    async def is_served(self, source: str = "127.0.0.1") -> bool:
        return await self.send(await self.connect(source), b"abc") == "200 3"


async def answer(reader: asyncio.StreamReader) -> str:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.lower().partition("content-length: ")[2].split()[0])
    body = (await reader.readexactly(length)).decode()
    return f"{head.split()[1]} {body}"


async def is_closed(peer: Peer) -> bool:
    """Wait until the other side ends the connection."""
    try:
        async with asyncio.timeout(10):
            while await peer[0].read(65536):
                pass
    except ConnectionError:
        pass
    return True


@asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Port]:
    monkeypatch.setattr(listener, "SWEEP_S", 0.05)
    port = Port()

    async def length(request: web.Request) -> web.Response:
        return web.Response(text=str(len(request[BODY])))

    async def held(request: web.Request) -> web.Response:
        port.held += 1
        await port.released.wait()
        return await length(request)

    async def long(_: web.Request) -> web.Response:
        return web.Response(body=bytes(20_000_000))

    pages = web.Application()
    pages[BOUNDS] = BOUNDED
    pages.router.add_post("/", length)
    pages.router.add_post("/held", held)
    pages.router.add_get("/long", long)
    async with health.served(pages, "127.0.0.1:0") as address:
        port.host, _, port.port = address.partition(":")
        try:
            yield port
        finally:
            await port.close()


async def test_bodies_that_are_packed_or_too_long_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = zlib.compress(bytes(1_000_000))
    async with served(monkeypatch) as port:
        answers = [
            await port.send(await port.connect(), packed, "Content-Encoding: deflate"),
            await port.send(await port.connect(), b"x" * (LARGE + 1)),
            await port.send(await port.connect(), b"", length=10**12),
            await port.send(await port.connect(), b"x" * LARGE),
        ]

    assert [each.split()[0] for each in answers] == ["415", "413", "413", "200"]


async def test_a_chunked_body_has_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as port:
        reader, writer = await port.connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: port\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(LARGE // 500 + 1):
            writer.write(b"1f4\r\n" + b"x" * 500 + b"\r\n")
        writer.write(b"0\r\n\r\n")

        assert (await answer(reader)).startswith("413")


async def test_a_large_body_without_progress_loses_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "PROGRESS_S", 0.2)
    async with served(monkeypatch) as port:
        endless = await port.connect()
        other = await port.connect()
        slow = asyncio.create_task(port.send(endless, b"x", length=LARGE))
        await asyncio.sleep(0)

        assert await port.send(other, b"x" * LARGE) == f"200 {LARGE}"
        assert (await slow).startswith("408")


async def test_no_more_large_bodies_are_read_than_have_turns_until_one_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(monkeypatch) as port:
        first, second, small = [await port.connect() for _ in range(3)]
        held = asyncio.create_task(port.send(first, b"x" * LARGE, path="/held"))
        await until(lambda: port.held)

        assert (await port.send(second, b"x" * LARGE)).startswith("408")
        assert await port.send(small, b"x" * SMALL) == f"200 {SMALL}"
        port.released.set()
        assert await held == f"200 {LARGE}"
        assert await port.send(first, b"x" * LARGE) == f"200 {LARGE}"


async def test_connections_of_one_address_leave_room_for_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(monkeypatch) as port:
        held: list[asyncio.Task[str]] = []
        for number in range(BOUNDED.connections):
            sending = port.send(await port.connect(), b"abc", path="/held")
            held.append(asyncio.create_task(sending))
            most = min(number + 1, BOUNDED.of_address)
            await until(lambda: port.held, most.__le__)

        async with asyncio.timeout(10):
            assert await port.is_served("127.0.0.2")
        assert port.held == BOUNDED.of_address
        assert not any(task.done() for task in held)
        port.released.set()
        await asyncio.gather(*held, return_exceptions=True)


async def test_a_small_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as port:
        assert (await port.send(await port.connect(), b"x", length=SMALL)).startswith("408")


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nX-A: "])
async def test_a_connection_without_a_request_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(monkeypatch) as port:
        peer = await port.connect()
        peer[1].write(sent)

        assert await is_closed(peer)


async def test_a_client_that_does_not_take_its_response_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 0.3)
    closed = listener.CLOSED.labels("stalled")._value
    before = closed.get()
    async with served(monkeypatch) as port:
        _reader, writer = await port.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /long HTTP/1.1\r\nHost: port\r\n\r\n")

        await until(lambda: closed.get() > before)


async def test_a_port_at_which_no_connection_waits_leaves_the_processor_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses_s: list[float] = []
    sleep = asyncio.sleep

    async def noted(delay_s: float) -> None:
        pauses_s.append(delay_s)
        await sleep(delay_s)

    monkeypatch.setattr(asyncio, "sleep", noted)
    async with served(monkeypatch) as port:
        assert await port.is_served()

    assert listener.PAUSE_S not in pauses_s


async def test_idle_connections_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as port:
        idle = [await port.connect() for _ in range(2 * BOUNDED.connections)]
        elsewhere = [await port.connect(f"127.0.1.{number + 1}") for number in range(8)]

        assert await port.is_served()
        assert await port.is_served("127.0.2.1")

        for peer in (*idle, *elsewhere):
            assert await is_closed(peer)


async def test_connections_that_were_served_make_room_for_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(monkeypatch) as port:
        kept = [await port.connect() for _ in range(BOUNDED.of_address)]
        for peer in kept:
            assert await port.send(peer, b"abc") == "200 3"

        assert await port.is_served()

        assert await is_closed(kept[0])
        assert await port.send(kept[-1], b"abc") == "200 3"


async def test_no_file_stays_open_for_connections_that_were_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with served(monkeypatch) as port:
        before = files()
        for _ in range(50):
            (await port.connect())[1].close()

        await until(files, lambda number: number <= before)

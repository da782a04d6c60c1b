"""A task of the client's library that ends makes its service unready at once, and ends it."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from operator import eq, lt
from typing import Any

import pytest
from nats.aio.transport import TcpTransport

from shared.credentials.logins import ClientCredentials
from shared.model.clock import in_background
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import PodQueued
from shared.nats import connection
from shared.nats.bus import Bus
from shared.nats.client import CLOSE_S, NatsClient
from tests.integration.nats.world import Recorder, connected, publish, queued, running
from tests.support.servers.nats import NatsServer, flush
from tests.support.waiting import until

SOON_S = 5.0
"""Less than the 9 seconds after which the library notices by itself that it is deaf."""


async def end_reading(client: NatsClient) -> None:
    client._reading_task.cancel()


async def fail_reading(client: NatsClient) -> None:
    client._ps.nc = None
    await client.publish("any", b"")
    await client._send_ping()


async def end_writing(client: NatsClient) -> None:
    client._flusher_task.cancel()


async def end_pings(client: NatsClient) -> None:
    client._ping_interval_task.cancel()


async def end_a_subscription(client: NatsClient) -> None:
    next(iter(client._subs.values()))._wait_for_msgs_task.cancel()


async def fail_reconnecting(client: NatsClient) -> None:
    async def fail() -> None:
        raise IndexError

    client._process_connect_init = fail
    await client._process_op_err(ConnectionResetError())


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (end_reading, "the task that reads has ended"),
        (fail_reading, "the task that reads has ended: AttributeError"),
        (end_writing, "the task that writes has ended"),
        (end_pings, "the task that sends pings has ended"),
        (end_a_subscription, "the task that receives _INBOX.test"),
        (fail_reconnecting, "the task that reconnects has ended: IndexError"),
    ],
)
async def test_a_task_that_ends_makes_the_service_unready_and_ends_it(
    server: NatsServer,
    fault: Callable[[NatsClient], Coroutine[Any, Any, None]],
    reason: str,
) -> None:
    buses: list[Bus] = []

    async def serve() -> None:
        async with asyncio.timeout(SOON_S), Bus.connect(server.url, name="test") as bus:
            buses.append(bus)
            await flush(bus.client)
            await fault(bus.client)
            await asyncio.Event().wait()

    with pytest.raises(UnavailableError, match=reason):
        await serve()
    assert reason in str(buses[0].unready_reason())


async def test_a_connection_that_is_lost_and_found_again_is_no_failure(server: NatsServer) -> None:
    recorder = Recorder()
    async with connected(server) as bus, running(bus, recorder):
        for number in range(3):
            await bus.client.force_reconnect()
            await until(lambda: bus.client.stats["reconnects"], partial(lt, number))
            await bus.publish([queued(number)])
            await until(lambda: len(recorder.seen), partial(lt, number))
        assert bus.client.fault == ""


async def test_a_late_response_to_a_ping_does_not_end_the_reading(server: NatsServer) -> None:
    async with connected(server) as bus:
        flushing = asyncio.create_task(bus.client.flush())
        await asyncio.sleep(0)
        assert bus.client._pongs, "it has sent its ping"
        flushing.cancel()

        inbox = await bus.subscribe([PodQueued], group="test")
        await publish(bus, 1)
        async with asyncio.timeout(SOON_S):
            await inbox.batch()
        assert bus.client.stats["reconnects"] == 0


SERVICE = """
import sys
from shared.runtime.run import open_bus, run, serve
from shared.runtime.settings import ServiceSettings

async def entry():
    settings = ServiceSettings(nats_url=sys.argv[1], http="127.0.0.1:0")
    async with open_bus(settings, "test") as bus:
        async def begin():
            bus.client._reading_task.cancel()
        await serve("test", object(), bus=bus, settings=settings, begin=begin)

run(entry, service="test", log_level="info")
"""


async def test_a_service_whose_client_fails_ends_with_one_line(server: NatsServer) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, server.url, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        _, errors = await process.communicate()

    lines = [line for line in errors.decode().splitlines() if not line.startswith("{")]
    assert process.returncode == 1
    assert lines == [
        "leasehold test: the connection to NATS has failed: the task that reads has ended. "
        "The process ends, so that it is started again"
    ]


async def test_an_error_in_the_background_ends_what_it_serves_and_is_raised() -> None:
    async def fail() -> None:
        raise UnavailableError("gone")

    with pytest.raises(UnavailableError, match="gone"):
        async with in_background(fail()):
            await asyncio.Event().wait()
    with pytest.raises(KeyError):
        async with in_background(asyncio.Event().wait()):  # type: ignore[arg-type]
            raise KeyError


class SilentServer:
    """Accepts connections and, after the first `welcomed`, never says a word."""

    def __init__(self, welcomed: int) -> None:
        self.welcomed = welcomed
        self.url = ""
        self.accepted = 0
        self.open = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(cls, *, welcomed: int) -> AsyncIterator["SilentServer"]:
        silent = cls(welcomed)
        async with await asyncio.start_server(silent._serve, "127.0.0.1", 0) as server:
            silent.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield silent

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.open += 1
        try:
            if self.accepted <= self.welcomed:
                writer.write(b'INFO {"server_id":"x","version":"2.11.0","headers":true}\r\n')
                while line := await reader.readline():
                    if line.startswith(b"PING"):
                        writer.write(b"PONG\r\n")
            else:
                await reader.read()
        finally:
            self.open -= 1
            writer.close()


async def test_a_first_connection_that_is_given_up_is_closed() -> None:
    async with SilentServer.listening(welcomed=0) as server:
        with pytest.raises(UnavailableError):
            await connection.connected(
                server.url, name="test", credentials=ClientCredentials(), patience_s=0.3
            )
        assert server.accepted == 1
        await until(lambda: server.open, partial(eq, 0))


async def test_a_connection_whose_end_is_never_reported_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(_transport: TcpTransport) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(TcpTransport, "wait_closed", never)
    async with SilentServer.listening(welcomed=1) as server:
        client = await connection.connected(
            server.url, name="test", credentials=ClientCredentials(), patience_s=20
        )
        async with asyncio.timeout(3 * CLOSE_S):
            await client.close()
        await until(lambda: server.open, partial(eq, 0))


async def test_an_attempt_to_connect_again_closes_the_one_before() -> None:
    async with SilentServer.listening(welcomed=1) as server:
        client = await connection.connected(
            server.url, name="test", credentials=ClientCredentials(), patience_s=20
        )
        client.options["connect_timeout"] = 0.1
        await client.force_reconnect()
        await until(lambda: server.accepted, partial(lt, 4))
        assert server.open <= 2, "the attempt before the last may be closing"
        await client.close()
        await until(lambda: server.open, partial(eq, 0))

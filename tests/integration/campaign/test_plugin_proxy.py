"""A proxy on the sockets of device plugins: twins of sockets, and what is done to their bytes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.campaign.stack.plugin_proxy import PluginProxy
from tests.support.waiting import until

HELD_S = 0.2
NAME = "leasehold-gpu-0a1b2c.sock"


@contextlib.asynccontextmanager
async def echo(path: Path, received: list[bytes]) -> AsyncIterator[None]:
    """A server that sends back each line."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            received.append(line)
            writer.write(line)
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        yield


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[PluginProxy]:
    of_agent, of_kubelet = tmp_path / "agent", tmp_path / "kubelet"
    of_kubelet.mkdir()
    started = PluginProxy(of_agent, of_kubelet)
    await started.start()
    yield started
    await started.close()


@dataclass
class Client:
    """One connection to a socket."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self) -> bytes:
        self.writer.write(b"line\n")
        async with asyncio.timeout(HELD_S):
            return await self.reader.readline()


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Client]:
    """Connect when the socket is there."""
    await until(path.exists)
    client = Client(*await asyncio.open_unix_connection(path))
    yield client
    client.writer.close()
    with contextlib.suppress(OSError):
        await client.writer.wait_closed()


async def test_a_socket_of_the_agent_has_a_twin_when_its_registration_arrives(
    proxy: PluginProxy,
) -> None:
    lines: list[bytes] = []
    async with echo(proxy.of_kubelet / "kubelet.sock", lines):
        await until((proxy.of_agent / "kubelet.sock").exists)
        async with (
            echo(proxy.of_agent / NAME, lines),
            connected(proxy.of_agent / "kubelet.sock") as plugin,
        ):
            assert await plugin.send() == b"line\n"
            assert (proxy.of_kubelet / NAME).exists()
            async with connected(proxy.of_kubelet / NAME) as kubelet:
                assert await kubelet.send() == b"line\n"


async def test_what_is_removed_in_one_directory_goes_in_the_other(proxy: PluginProxy) -> None:
    kubelet, plugin = proxy.of_kubelet / "kubelet.sock", proxy.of_agent / NAME
    async with echo(kubelet, []), echo(plugin, []):
        await until((proxy.of_kubelet / NAME).exists)
        (proxy.of_kubelet / NAME).unlink()
        await until(lambda: not plugin.exists())
        kubelet.unlink()
        await until(lambda: not (proxy.of_agent / "kubelet.sock").exists())
    before = proxy.of_agent / NAME
    async with echo(before, []):
        await until((proxy.of_kubelet / NAME).exists)
        before.unlink()
        await until(lambda: not (proxy.of_kubelet / NAME).exists())


async def test_half_open_a_request_arrives_and_its_answer_does_not(proxy: PluginProxy) -> None:
    lines: list[bytes] = []
    async with (
        echo(proxy.of_agent / NAME, lines),
        connected(proxy.of_kubelet / NAME) as kubelet,
    ):
        assert await kubelet.send() == b"line\n"

        proxy.spoil("half-open")
        with pytest.raises(TimeoutError):
            await kubelet.send()
        await until(lambda: len(lines) == 2)
        proxy.heal()

        async with asyncio.timeout(5):
            assert await kubelet.reader.read() == b""


@pytest.mark.parametrize(("way", "delay_s"), [("cut", 0.0), ("slow", HELD_S)])
async def test_cut_or_slow_the_answer_comes_later(
    proxy: PluginProxy, way: str, delay_s: float
) -> None:
    async with echo(proxy.of_agent / NAME, []):
        await until((proxy.of_kubelet / NAME).exists)
        proxy.spoil(way, delay_s)
        async with connected(proxy.of_kubelet / NAME) as kubelet:
            with pytest.raises(TimeoutError):
                await kubelet.send()
            proxy.heal()

            async with asyncio.timeout(5):
                assert await kubelet.reader.readline() == b"line\n"

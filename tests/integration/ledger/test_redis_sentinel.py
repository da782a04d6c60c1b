"""A ledger whose primary Sentinels choose: found, followed when it changes, doubted if older."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shared.ledger.leases import RedisLeases
from shared.model.errors import RequestError, UnavailableError
from shared.model.lease import Lease
from tests.support.placer.ledger import NOW, device, facts, report, reservation, reserve, share
from tests.support.servers.sentinels import Servers, sentinels
from tests.support.waiting import until


@contextlib.contextmanager
def mute() -> Iterator[str]:
    """A Sentinel that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


async def begin(leases: RedisLeases) -> None:
    token = await leases.begin_rebuild(now=NOW)
    assert token is not None
    await leases.save_nodes([facts("a")])
    await leases.save_devices([report("a", [device("a", 0)])])
    assert await leases.finish_rebuild(token)


async def epoch(leases: RedisLeases) -> str | None:
    """Read the generation as soon as a primary responds."""

    async def read() -> tuple[str | None, ...]:
        with suppress(UnavailableError):
            return (await leases.generation(),)
        return ()

    found: tuple[str | None] = await until(read)
    return found[0]


async def kept(servers: Servers) -> None:
    """Wait until the replica has all that was written."""
    first = servers.ports["first"]
    async with asyncio.timeout(30):
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", first)
            writer.write(b"WAIT 1 1000\r\n")
            answer = await reader.readline()
            writer.close()
            if answer == b":1\r\n":
                return


async def test_the_primary_is_followed_past_a_sentinel_that_hangs() -> None:
    async with sentinels() as servers:
        with mute() as hung:
            url = servers.url().replace("sentinel://", f"sentinel://{hung},")
            async with RedisLeases.connect(url, detects_lost_writes=True) as leases:
                await begin(leases)
                [before] = await reserve(leases, reservation("p", share("a")))
                life = await leases.generation()
                await kept(servers)

                servers.signal("first", signal.SIGKILL)
                await servers.until("second", "replication", "role:master")

                assert await epoch(leases) == life
                assert await leases.load([before.pod]) == [before]
                [bound] = await leases.bind([before])
                assert isinstance(bound, Lease)


async def test_a_replica_that_was_behind_is_detected() -> None:
    async with (
        sentinels() as servers,
        RedisLeases.connect(servers.url(), detects_lost_writes=True) as leases,
    ):
        await begin(leases)
        await kept(servers)
        servers.signal("second", signal.SIGSTOP)
        await servers.part("first")
        [lost] = await reserve(leases, reservation("p", share("a")))

        servers.signal("first", signal.SIGKILL)
        servers.signal("second", signal.SIGCONT)
        await servers.until("second", "replication", "role:master")

        assert await epoch(leases) is None
        await begin(leases)
        [later] = await reserve(leases, reservation("p", share("a")))
        assert later.version > lost.version


async def test_connections_to_a_demoted_primary_are_closed() -> None:
    async with (
        sentinels() as servers,
        RedisLeases.connect(servers.url(), detects_lost_writes=True) as leases,
    ):
        await begin(leases)
        await kept(servers)

        reader, writer = await asyncio.open_connection("127.0.0.1", servers.ports["watch-0"])
        writer.write(b"SENTINEL FAILOVER ledger\r\n")
        assert await reader.readline() == b"+OK\r\n"
        writer.close()
        await servers.until("first", "replication", "role:slave")

        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(UnavailableError):
                    [held] = await reserve(leases, reservation("p", share("a")))
                    break
        assert await leases.load([held.pod]) == [held]


async def test_without_a_sentinel_the_ledger_is_unavailable_and_the_error_names_the_addresses() -> (
    None
):
    url = "redis+sentinel://127.0.0.1:1,127.0.0.1:2/ledger"
    async with RedisLeases.connect(url) as leases:
        with pytest.raises(UnavailableError, match="No master found for 'ledger'"):
            await leases.generation()


@pytest.mark.parametrize(
    "url", ["redis+sentinel://a,b", "redis+sentinel://a/", "redis+sentinel://u:p@a/ledger"]
)
async def test_an_address_without_a_primary_or_with_a_secret_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match=r"redis\+sentinel://HOST:26379") as refused:
        async with RedisLeases.connect(url):
            pass
    assert "u:p" not in str(refused.value)

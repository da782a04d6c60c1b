"""The library of functions on a real server: loaded again, in two versions, and after errors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
import redis.asyncio
from redis.exceptions import ResponseError

from shared.ledger.connection import LedgerConnection
from shared.ledger.function_libraries import FunctionLibraries
from shared.ledger.function_library import Library, bundled, library, modules
from shared.ledger.leases import RedisLeases
from shared.model.errors import UnavailableError
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import ReservedLease
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    facts,
    rebuild,
    reservation,
    reserve,
    share,
    uses,
)
from tests.support.servers.nats import free_port

_prefixes = count()
OTHER_TEXT = "-- Another version.\n"


def edited(module: str, before: str, after: str) -> Library:
    """Return a version of the library in which one piece of a module is another."""
    texts = modules()
    assert texts[module].count(before) == 1
    return bundled({**texts, module: texts[module].replace(before, after)})


@asynccontextmanager
async def opened(url: str, prefix: str, functions: Library) -> AsyncIterator[RedisLeases]:
    async with LedgerConnection(url, prefix=prefix, detects_lost_writes=True) as connection:
        connection.library = functions
        yield RedisLeases(connection)


@pytest.fixture
def prefix() -> str:
    return f"library-{next(_prefixes)}:"


@pytest.fixture
async def admin(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(url, decode_responses=True) as client:
        yield client


async def library_names(admin: redis.asyncio.Redis) -> set[str]:
    listed = await admin.function_list(library="leasehold_*")
    return {fields[fields.index("library_name") + 1] for fields in listed}


async def test_two_versions_of_the_services_share_a_ledger(url: str, prefix: str) -> None:
    other = bundled({**modules(), "status": OTHER_TEXT + modules()["status"]})
    async with opened(url, prefix, library()) as old, opened(url, prefix, other) as new:
        await rebuild(old, {"a": 2}, now=NOW)

        [first] = await reserve(old, reservation("p", share("a", 0)))
        [second] = await reserve(new, reservation("q", share("a", 0)))
        [bound] = await new.bind([first])

        assert isinstance(bound, Lease)
        assert second.version > first.version
        assert await old.load([bound.pod, second.pod]) == [bound, second]
        await assert_sound(old)


async def test_services_go_on_while_functions_are_flushed_again_and_again(
    url: str, prefix: str, admin: redis.asyncio.Redis
) -> None:
    async with opened(url, prefix, library()) as leases:
        await rebuild(leases, {"a": 2}, now=NOW)
        callers = [reserve(leases, reservation(f"p{i}", share("a", i % 2, 100))) for i in range(4)]
        flushes = [admin.function_flush() for _ in range(4)]

        await asyncio.gather(
            *(call for pair in zip(callers, flushes, strict=True) for call in pair)
        )

        assert len(await leases.load_node(facts("a").name)) == 4
        await assert_sound(leases)


async def test_a_call_is_one_command_once_the_server_has_the_functions(
    url: str, prefix: str, admin: redis.asyncio.Redis
) -> None:
    async with opened(url, prefix, library()) as leases:
        await rebuild(leases, {"a": 2}, now=NOW)
        await admin.config_resetstat()

        await reserve(leases, reservation("p", share("a", 0)))

        statistics = await admin.info("commandstats")
        assert statistics["cmdstat_fcall"]["calls"] == 1
        assert "cmdstat_function|load" not in statistics


async def test_an_error_in_a_function_names_its_file_and_line(url: str, prefix: str) -> None:
    wrong = edited("load_leases", "return function(pods, names, gangs)", WRONG)
    line = wrong_line("load_leases", "return function(pods, names, gangs)")
    async with opened(url, prefix, wrong) as leases:
        await rebuild(leases, {"a": 2}, now=NOW)

        with pytest.raises(ResponseError, match=rf"load_leases\.lua:{line}: .*nil") as raised:
            await leases.load([])

        assert "user_function" not in str(raised.value)


WRONG = "return function(pods, names, gangs)\n  local missing\n  missing.field = 1"


def wrong_line(module: str, before: str) -> int:
    """Return the line of what `WRONG` does wrong."""
    return modules()[module].splitlines().index(before) + 3


FAILING_WRITE = "  if cause == 'reserved' then error('not written') end\n"


async def test_nothing_of_a_call_that_failed_is_written_by_the_next_one(
    url: str, prefix: str
) -> None:
    start = "function M.write_changes(cause)\n"
    failing = edited("writes", start, start + FAILING_WRITE)
    async with opened(url, prefix, failing) as leases:
        await rebuild(leases, {"a": 2}, now=NOW)
        with pytest.raises(ResponseError, match=r"writes\.lua:\d+: not written"):
            await leases.reserve([reservation("p", share("a", 0))], now=NOW, ttl_s=5.0)

        await leases.save_nodes([facts("a", cpu=32_000)])

        assert await leases.load_node(facts("a").name) == []
        assert not any(use.memory_mib for use in (await uses(leases)).values())
        await assert_sound(leases)


async def test_a_reader_that_finds_lost_writes_closes_the_ledger_for_all(
    url: str, prefix: str, admin: redis.asyncio.Redis
) -> None:
    async with (
        opened(url, prefix, library()) as reader,
        opened(url, prefix, library()) as writer,
    ):
        await rebuild(writer, {"a": 2}, now=NOW)
        await reserve(reader, reservation("p", share("a", 0)))
        await admin.hset(f"{prefix}ledger", "version", "1")

        with pytest.raises(UnavailableError, match="has lost writes"):
            await reader.load_node(facts("a").name)

        assert await writer.generation() is None


async def test_libraries_that_no_binder_has_used_for_a_day_are_deleted(
    url: str, prefix: str, admin: redis.asyncio.Redis
) -> None:
    kept, unused = (
        bundled({**modules(), "status": f"-- {text}\n{modules()['status']}"})
        for text in ("kept", "unused")
    )
    async with opened(url, prefix, library()) as leases:
        libraries = leases.part(FunctionLibraries)
        for functions in (kept, unused):
            await admin.function_load(functions.text, replace=True)
        assert await libraries.remove_unused() == []
        now = (await admin.time())[0]
        await admin.hset(f"{prefix}libraries", unused.name, now - 86_401)
        await admin.hset(f"{prefix}libraries", library().name, now - 86_401)

        assert await libraries.remove_unused() == [unused.name]

        assert await library_names(admin) >= {library().name, kept.name}
        assert unused.name not in await library_names(admin)


async def test_a_reservation_is_the_same_in_every_later_call(url: str, prefix: str) -> None:
    """What one call computed of resources, devices and quotas is no part of the next one."""
    async with opened(url, prefix, library()) as leases:
        await rebuild(leases, {"a": 2}, now=NOW)
        for number in range(3):
            [outcome] = await leases.reserve(
                [reservation(f"p{number}", share("a", 0))], now=NOW, ttl_s=5.0
            )
            assert isinstance(outcome, ReservedLease)
            assert outcome.lease.shares[0].slot == number


async def test_a_library_is_not_deleted_while_the_server_is_away() -> None:
    async with LedgerConnection(f"redis://127.0.0.1:{free_port()}", prefix="away:") as connection:
        with pytest.raises(UnavailableError):
            await connection.delete_library("leasehold_000000000000")

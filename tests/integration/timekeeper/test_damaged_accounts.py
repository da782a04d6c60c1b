"""Arbitrary bytes in the accounts of one namespace stop no other's counting."""

import contextlib
import secrets
from collections.abc import AsyncIterator

import pytest

from shared.model.errors import UnavailableError
from shared.model.names import Namespace
from tests.support.servers.valkey import ValkeyServer
from tests.support.timekeeper.accounts import (
    MINUTE_MS,
    T0,
    TEAM,
    AccountLedger,
    account_ledger,
    budget,
    lease,
    units,
)

OTHER = Namespace("other")
GARBAGE = [b"", b"nan", b"-1e308", b"{", b"\xff\xfe", b"[1]"]
HASHES = ["revisions", "states", "budgets", "tenures:", "charged:", "windows:"]


@pytest.fixture
async def opened(server: ValkeyServer) -> AsyncIterator[AccountLedger]:
    """Two namespaces with a budget and half a GPU each, counted for a minute."""
    async with account_ledger(server.url, budget(100), budget(100, namespace=OTHER)) as found:
        await found.journal("held", T0, lease("p"), lease("q", namespace=OTHER, gpu=1))
        await found.count(T0 + MINUTE_MS)
        yield found


async def other_is_charged(found: AccountLedger) -> bool:
    """Count again and again; return whether a later lease of the other namespace is charged."""
    keeper = found.timekeeper()
    for minute in range(2, 6):
        with contextlib.suppress(UnavailableError):
            await found.count(T0 + minute * MINUTE_MS, keeper=keeper)
    before = sum(each.units for each in await found.charges(OTHER))
    later = lease("later", namespace=OTHER, gpu=2)
    await found.journal("held", T0 + 6 * MINUTE_MS, later)
    await found.count(T0 + 7 * MINUTE_MS, keeper=keeper)
    await found.journal("ended", T0 + 8 * MINUTE_MS, later)
    await found.count(T0 + 9 * MINUTE_MS, keeper=keeper)
    return sum(each.units for each in await found.charges(OTHER)) >= before + units(1)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("key", HASHES)
async def test_a_record_that_cannot_be_read_is_one_lost_account(
    opened: AccountLedger, key: str, garbage: bytes
) -> None:
    redis = opened.store._connection._redis
    name = f"{opened.store._keys.prefix}{key}{TEAM if key.endswith(':') else ''}"
    fields = await redis.hkeys(name)
    [field] = [each for each in fields if key.endswith(":") or each == TEAM.encode()]
    await redis.hset(name, field, garbage)

    assert await other_is_charged(opened)

    assert [each.namespace for each in await opened.store.load({TEAM: None})] == [TEAM]


@pytest.mark.parametrize("key", ["revisions", "states", "open", "journal", f"tenures:{TEAM}"])
async def test_a_key_of_another_type_is_deleted(opened: AccountLedger, key: str) -> None:
    redis = opened.store._connection._redis
    await redis.delete(f"{opened.store._keys.prefix}{key}")
    await redis.rpush(f"{opened.store._keys.prefix}{key}", secrets.token_bytes(9))

    await opened.count(T0 + 2 * MINUTE_MS)
    await opened.count(T0 + 3 * MINUTE_MS)

    assert await opened.store.load({TEAM: None})


async def test_a_cursor_that_is_none_begins_the_journal_again(opened: AccountLedger) -> None:
    redis = opened.store._connection._redis
    await redis.hset(f"{opened.store._keys.prefix}journal", "cursor", b"\xff")

    assert await other_is_charged(opened)

"""A ledger that has lost a key, or has a record that cannot be read, notices it and is rebuilt."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.ledger.rebuild_evidence import LedgerStaging
from shared.ledger.server_errors import RebuildPendingError
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import ListedPods, PodsListed
from shared.model.ledger import (
    CheckedRecords,
    FeedTruncatedError,
    NoCapacity,
    Reserved,
    UnreadableRecord,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.quota import Quota, QuotaLimits
from shared.model.request import Gang
from tests.support.placer.ledger import (
    NOW,
    device,
    ledger,
    queued,
    report,
    reservation,
    reserve,
    share,
    uuid,
    verdict,
)
from tests.support.servers.valkey import valkey_server

GARBAGE = [b"", b"\0", b"\xff" * 41, b"\x01" + b"\xff" * 60, bytes(range(200)), b"a" * 5_000]
HARMLESS = {"offers", "changed-gangs", "gone", "tenures", "feed"}
"""What these had is found again, or its readers begin anew."""


@asynccontextmanager
async def used_ledger(url: str) -> AsyncIterator[tuple[RedisLeases, Any, str]]:
    """A ledger with leases on two nodes, of a gang too, and with waiting pods."""
    async with ledger(url, {"a": 2, "b": 1}) as leases, redis.asyncio.Redis.from_url(url) as client:
        [bound, *_] = await reserve(
            leases,
            reservation("bound", share("a")),
            replace(reservation("ganged", share("a", 1), tag="apart"), gang="gang"),
            reservation("other", share("b"), node="b"),
        )
        await leases.bind([bound])
        waiting = queued("waits", units=16_001)
        gang = Gang(name="waiting-gang", min_member=2)
        request = structs.replace(waiting.request, gang=gang)
        member = replace(queued("member"), request=request)
        await leases.waiting_pods.enqueue(
            [verdict(each, await leases.capacity()) for each in (waiting, member)]
        )
        yield leases, client, leases._connection.prefix


async def keys_of(url: str) -> set[str]:
    async with used_ledger(url) as (_, client, prefix):
        found = [key.decode().removeprefix(prefix) async for key in client.scan_iter(f"{prefix}*")]
    return {key for key in found if not key.startswith(("node-revision:", "written"))}


async def may_be_rebuilt(leases: RedisLeases) -> bool:
    """Whether the ledger has closed itself, so that one caller rebuilds it."""
    await leases.checks.step()
    with pytest.raises(UnavailableError):
        await leases.capacity()
    return await leases.begin_rebuild(now=NOW) is not None


async def test_each_key_that_is_deleted_is_missed(url: str) -> None:
    keys = await keys_of(url)

    assert len(keys) > 15
    for key in sorted(keys - HARMLESS):
        async with used_ledger(url) as (leases, client, prefix):
            await client.delete(f"{prefix}{key}")

            assert await may_be_rebuilt(leases), key


@pytest.mark.parametrize("key", ["leases", "devices", "nodes", "lease-nodes"])
async def test_nothing_is_reserved_while_a_main_key_is_missing(url: str, key: str) -> None:
    async with used_ledger(url) as (leases, client, prefix):
        await client.delete(f"{prefix}{key}")

        with pytest.raises(RebuildPendingError, match="has 3 of its 4 main keys"):
            await leases.reserve([reservation("p", share("a"))], now=NOW, ttl_s=30)
        with pytest.raises(RebuildPendingError):
            await leases.save_devices([report("a", [device("a", 0)])])

        assert await client.exists(f"{prefix}{key}") == 0


@pytest.mark.parametrize("kind", ["leases", "devices", "nodes", "waiting"])
@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_record_that_cannot_be_read_is_set_aside_and_others_are_read(
    url: str, kind: str, garbage: bytes
) -> None:
    keys = {"leases": "bound", "devices": uuid("a", 0), "nodes": "a", "waiting": "waits"}
    async with used_ledger(url) as (leases, client, prefix):
        start = await leases.snapshot()
        await client.hset(f"{prefix}{kind}", keys[kind], garbage)

        [outcome, repeated] = await leases.reserve(
            [reservation("new", share("b"), node="b"), reservation("bound", share("a", 1))],
            now=NOW,
            ttl_s=30,
        )

        assert isinstance(outcome, Reserved)
        assert isinstance(repeated, NoCapacity if kind == "leases" else object)
        assert "b" in [node.facts.name for node in (await leases.snapshot()).nodes]
        assert {lease.pod for page in [p async for p in leases.load_all()] for lease in page} >= {
            "other",
            "new",
        }
        assert [lease.pod for lease in await leases.release([PodUid("new")], reason="gone")]
        async for changes in leases.changes(start.position):
            assert changes
            break
        pages = [page async for page in leases.totals.pages()]
        assert "b" in [totals.node.facts.name for page in pages for totals in page]
        await leases.waiting_pods.load()
        await leases.save_devices([report("a", [device("a", 0), device("a", 1)], at=NOW)])
        assert await client.hget(f"{prefix}{kind}", keys[kind]) == garbage

        found = await leases.checks.step()

        node = "a" if kind in {"devices", "nodes"} else ""
        assert found.unreadable == (UnreadableRecord(kind, keys[kind], node),)
        assert await client.hexists(f"{prefix}unreadable", f"{kind} {keys[kind]}")
        assert await leases.begin_rebuild(now=NOW) is not None


@pytest.mark.parametrize("kind", ["devices", "nodes"])
async def test_totals_of_an_older_state_are_not_those_of_the_leases_and_are_rebuilt(
    url: str, kind: str
) -> None:
    keys = {"devices": uuid("b", 0), "nodes": "b"}
    async with used_ledger(url) as (leases, client, prefix):
        older = await client.hget(f"{prefix}{kind}", keys[kind])
        await leases.release([PodUid("other")], reason="gone")
        assert await leases.checks.step() == CheckedRecords()
        await client.hset(f"{prefix}{kind}", keys[kind], older)

        assert UnreadableRecord(kind, keys[kind], "b") in (await leases.checks.step()).unreadable

        token = await leases.begin_rebuild(now=NOW)
        assert token is not None
        assert await leases.finish_rebuild(token)


@pytest.mark.parametrize("key", ["used-cores", "used-mib", "quota-used"])
async def test_the_use_of_a_namespace_of_an_older_state_is_rebuilt(url: str, key: str) -> None:
    quota = Quota(namespace=Namespace("default"), limits=QuotaLimits(cards=9))
    async with ledger(url, {"b": 2}) as leases, redis.asyncio.Redis.from_url(url) as client:
        await leases.quotas.save([quota], read_at=NOW)
        whole = structs.replace(share("b"), cores_percent=50)
        await reserve(leases, reservation("first", whole, node="b"))
        name = f"{leases._connection.prefix}{key}"
        older = await client.hgetall(name)
        await reserve(leases, reservation("second", share("b", 1), whole, node="b"))
        assert await leases.checks.step() == CheckedRecords()
        await client.hset(name, mapping=older)

        [found] = (await leases.checks.step()).unreadable

        assert found == UnreadableRecord("namespaces", "default")
        token = await leases.begin_rebuild(now=NOW)
        assert token is not None
        assert await leases.finish_rebuild(token)
        assert await leases.checks.step() == CheckedRecords()


async def test_an_entry_of_the_feed_that_cannot_be_read_begins_a_new_snapshot(url: str) -> None:
    async with used_ledger(url) as (leases, client, prefix):
        start = await leases.snapshot()
        generation, number, digest = start.position.split(":")
        entry = {"e": generation, "n": b"\xff" * 9, "d": b"\xff", "c": b"x", "p": digest}
        await client.xadd(f"{prefix}feed", entry, id=f"{int(number) + 1}-0")

        with pytest.raises(FeedTruncatedError, match="cannot be read"):
            await anext(leases.changes(start.position))
        await leases.release([PodUid("other")], reason="gone")

        again = await leases.snapshot()
        await leases.release([PodUid("ganged")], reason="gone")
        [change] = await anext(leases.changes(again.position))
        assert change.cause == "released: gone"


@pytest.mark.parametrize(
    "key",
    [
        "feed",
        "leases",
        "facts:a",
        "waiting",
        "expiring",
        "verdicts",
        "gone",
        "unreadable",
        "offers",
    ],
)
async def test_a_key_of_another_type_is_as_good_as_missing(url: str, key: str) -> None:
    async with used_ledger(url) as (leases, client, prefix):
        await client.set(f"{prefix}{key}", b"\xff\xfe")

        if key == "feed":
            await leases.release([PodUid("other")], reason="gone")
            assert await client.type(f"{prefix}feed") == b"stream"
        else:
            found = await leases.checks.step()
            assert found.missing
            token = await leases.begin_rebuild(now=NOW)
            assert token is not None
            assert await leases.finish_rebuild(token)
            assert await leases.checks.step() == CheckedRecords(must_list=False)


async def test_a_server_that_may_evict_keys_serves_nothing_until_its_policy_is_changed() -> None:
    with valkey_server() as server:
        await server.ready()
        async with ledger(server.url) as leases:
            await server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")

            refused = pytest.raises(
                UnavailableError, match="config set maxmemory-policy noeviction"
            )
            with refused:
                await leases.checks.step()
            with refused:
                await leases.reserve([reservation("p", share("a"))], now=NOW, ttl_s=30)
            assert "allkeys-lru" in str(leases.unready_reason())

            await server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
            await leases.checks.step()
            await reserve(leases, reservation("p", share("a")))
            assert await leases.load_node(NodeName("a"))


async def test_a_reader_of_a_feed_that_was_deleted_begins_with_a_snapshot(url: str) -> None:
    async with used_ledger(url) as (leases, client, prefix):
        start = await leases.snapshot()
        await leases.release([PodUid("other")], reason="gone")
        await client.delete(f"{prefix}feed")

        with pytest.raises(FeedTruncatedError, match="has no entry"):
            await anext(leases.changes(start.position))


@pytest.mark.parametrize("damage", ["deleted", "of another type"])
async def test_without_its_quotas_the_ledger_is_closed_until_they_are_saved(
    url: str, damage: str
) -> None:
    quota = Quota(namespace=Namespace("default"), limits=QuotaLimits(cards=0))
    async with used_ledger(url) as (leases, client, prefix):
        await leases.quotas.save([quota], read_at=NOW)
        key = f"{prefix.removesuffix(':')}-quotas"
        await client.delete(key)
        if damage != "deleted":
            await client.set(key, b"\xff")
            await leases.checks.step()

        with pytest.raises(RebuildPendingError):
            await leases.reserve([reservation("p", share("a"))], now=NOW, ttl_s=30)

        assert await leases.begin_rebuild(now=NOW) is not None
        staging = leases.part(LedgerStaging)
        await staging.save_chunk(
            PodsListed(
                listing_id="l", chunk=0, chunks=1, pods=ListedPods(), request_ids=("request",)
            )
        )
        assert await staging.complete_listing("request") is None
        await leases.quotas.save([quota], read_at=NOW)
        assert await staging.complete_listing("request") is not None


async def test_cordons_that_are_lost_are_missed(url: str) -> None:
    async with used_ledger(url) as (leases, client, prefix):
        await leases.set_cordoned({NodeName("a"): "its agent does not respond"})
        assert await leases.checks.step() == CheckedRecords()
        await client.delete(f"{prefix}cordons")

        assert (await leases.checks.step()).missing == ("cordons",)


async def test_a_main_hash_of_another_type_is_no_bug_but_an_empty_ledger(url: str) -> None:
    async with used_ledger(url) as (leases, client, prefix):
        for key in ("leases", "ledger"):
            await client.delete(f"{prefix}{key}")
            await client.set(f"{prefix}{key}", b"\xff")

            with pytest.raises(RebuildPendingError):
                await leases.reserve([reservation("p", share("a"))], now=NOW, ttl_s=30)

        assert await leases.begin_rebuild(now=NOW) is not None

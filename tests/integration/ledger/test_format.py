"""The format of what the ledger stores: pinned, served when it is ours, rebuilt or left when not.

Where a row changes, raise `FORMAT` in `functions/common/ledger.lua` (with the reason in
`CHANGELOG.md`) and pin the new rows with `python -m tests.integration.ledger.test_format`.
"""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from msgspec import structs

from shared.ledger.connection import unpack
from shared.ledger.leases import RedisLeases
from shared.model.devices.device import Device, DeviceMode
from shared.model.errors import UnavailableError
from shared.model.leases.lease import (
    ClaimAllocation,
    Lease,
    LeaseState,
    MigPlacement,
    RequestedUnits,
)
from shared.model.leases.lease_copy import load_lease
from shared.model.names import Namespace, PodUid
from shared.model.requests.request import SharingPolicy
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    device,
    facts,
    queued,
    rebuild,
    report,
    reservation,
    reserve,
    share,
    verdict,
)
from tests.support.recorded import put_back, recorded
from tests.support.servers.valkey import ValkeyServer, valkey_server

PINNED = Path(__file__).with_name("ledger_rows.json")
LATER = NOW + 10_000_000
PRESENT = (
    "nodes",
    "devices",
    "leases",
    "lease-nodes",
    "gang-leases",
    "expiring",
    "facts:a",
    "waiting",
    "waiting-groups",
)
"""Keys of the current state; the feed and the journal repeat it."""


@pytest.fixture
async def store(server: ValkeyServer) -> AsyncIterator[Any]:
    """The server, emptied."""
    await server.ready()
    async with redis.asyncio.Redis.from_url(server.url) as client:
        await client.flushall()
        yield client


async def rows_of(url: str) -> dict[str, Any]:
    """Have the ledger write one of everything, and return what it keeps."""
    async with RedisLeases.connect(url, prefix="rows:") as leases:
        token = await leases.begin_rebuild(now=NOW)
        assert token is not None
        await leases.save_nodes([replace(facts("a"), labels={"zone": "z"}, excluded_devices=(7,))])
        await leases.save_devices([report("a", [*map(_device, range(6))], at=NOW)])
        assert await leases.finish_rebuild(token)
        instance = MigPlacement(layout="1g.5gb,1g.5gb", position=1, profile="1g.5gb")
        terms = RequestedUnits(memory_mib=900, memory_bytes=943_718_401)
        bound, *_ = await reserve(
            leases,
            reservation("plain", share("a", 0, cores=20)),
            reservation("tagged", share("a", 1), tag="default/group"),
            reservation("whole", share("a", 2, 16_000, 100, whole=True)),
            reservation("pair", share("a", 0), share("a", 1, container="side", init=True)),
            reservation("instance", share("a", 3, 5_000, slot=1, mig=instance)),
            reservation(
                "terms",
                share(
                    "a", 4, 901, requested_units=terms, slots=100, sharing=SharingPolicy.BEST_EFFORT
                ),
            ),
            structs.replace(
                reservation("claim", share("a", 4, 100, share_id="9cbf", container="gpu")),
                claim=ClaimAllocation(generation="g1", consumers=(PodUid("p1"), PodUid("p2"))),
            ),
            structs.replace(
                reservation("ganged", share("a", 5)), gang="default/gang", memo="of a dialect"
            ),
        )
        await leases.bind([bound])
        waiting = queued("waits", units=16_000, priority=5)
        await leases.waiting_pods.enqueue([verdict(waiting, await leases.capacity())])
    async with redis.asyncio.Redis.from_url(url) as client:
        number = await client.hget("rows:ledger", "format")
        kept: dict[str, Any] = {"format": int(number)}
        for name in PRESENT:
            kind = (await client.type(f"rows:{name}")).decode()
            if kind == "hash":
                rows = await client.hgetall(f"rows:{name}")
            else:
                rows = dict(await client.zrange(f"rows:{name}", 0, -1, withscores=True))
            kept[name] = {key.decode("latin1"): _packed(name, value) for key, value in rows.items()}
    return kept


def _device(gpu: int) -> Device:
    return device("a", gpu, mode=DeviceMode.MIG if gpu == 3 else DeviceMode.HAMI_CORE)


def _packed(name: str, value: Any) -> Any:
    """Return what is packed; of texts, which grow as messages may, that they are there."""
    if name == "waiting":
        return ["..." if str(part).startswith("[{") else part for part in unpack(value)]
    if name.startswith("facts:"):
        return "..."
    return b64encode(value).decode() if isinstance(value, bytes) else value


async def test_the_stored_rows_of_a_format_do_not_change(store: Any, server: ValkeyServer) -> None:
    pinned = json.loads(PINNED.read_text())
    now = await rows_of(server.url)

    changed = sorted(name for name in pinned if pinned[name] != now[name])
    assert changed == [], (
        "what the ledger stores has changed: raise FORMAT in common/ledger.lua, so that older "
        "programs leave it alone, and pin it with `python -m tests.integration.ledger.test_format`"
    )


async def test_a_ledger_of_the_same_format_is_served_as_it_is(
    store: Any, server: ValkeyServer
) -> None:
    before = recorded("version-1")
    await put_back(before.ledger, store)
    async with RedisLeases.connect(server.url) as leases:
        kept = {lease.name: lease for lease in await assert_sound(leases)}

        copies = _leases(before.copies)
        assert {name: kept[name].shares for name in kept} == {
            lease.name: lease.shares for lease in copies
        }
        assert kept["apart-0"].anti_affinity_groups == ("default/group-a",)
        assert [waiting.queued.name for waiting in await leases.waiting_pods.load()] == ["large"]
        [ended] = await leases.release([kept["two"].pod], reason="gone")
        assert ended.shares == kept["two"].shares
        node = kept["two"].node
        uuid = kept["two"].shares[0].device
        [lease] = await reserve(
            leases,
            reservation("next", structs.replace(share("a"), device=uuid), node=node),
            now=LATER,
        )
        assert lease.shares[0].fence > kept["two"].shares[0].fence
        await assert_sound(leases)


async def test_a_ledger_of_an_older_format_is_rebuilt_by_one_caller(
    store: Any, server: ValkeyServer
) -> None:
    await _write_ledger(server.url)
    await store.hset("lh:ledger", "format", 0)
    async with RedisLeases.connect(server.url) as one, RedisLeases.connect(server.url) as other:
        with pytest.raises(UnavailableError, match=r"has format 0 and is being rebuilt in format"):
            await one.reserve([reservation("p", share("a"))], now=LATER, ttl_s=30)
        assert await one.generation() is None

        tokens = [await each.begin_rebuild(now=LATER) for each in (one, other)]

        assert tokens[0] is not None
        assert tokens[1] is None
        assert await one.finish_rebuild(tokens[0])
        assert await other.generation() == tokens[0]
        assert [page async for page in one.load_all()] == []


async def test_leases_survive_the_rebuild_of_a_ledger_of_an_older_format(
    store: Any, server: ValkeyServer
) -> None:
    before = recorded("version-1")
    await put_back(before.ledger, store)
    await store.hset("lh:ledger", "format", 0)
    copies = _leases(before.copies)
    async with RedisLeases.connect(server.url) as leases:
        with pytest.raises(UnavailableError, match="is being rebuilt"):
            await leases.load([copies[0].pod])

        await rebuild(leases, kept=copies, now=LATER)

        live = {lease.pod: lease for lease in await assert_sound(leases)}
        assert {pod: lease.shares for pod, lease in live.items()} == {
            lease.pod: lease.shares for lease in copies
        }
        assert {lease.state for lease in live.values()} == {LeaseState.BOUND}


async def test_a_ledger_of_a_newer_format_is_left_alone(store: Any, server: ValkeyServer) -> None:
    await _write_ledger(server.url)
    await store.hset("lh:ledger", "format", 2_000)
    before = await store.hgetall("lh:ledger"), await store.dbsize()
    newer = pytest.raises(UnavailableError, match="has format 2000, which a newer version writes")
    async with RedisLeases.connect(server.url) as leases:
        with newer:
            await leases.generation()
        with newer:
            await leases.reserve([reservation("p", share("a"))], now=LATER, ttl_s=30)
        with newer:
            await leases.begin_rebuild(now=LATER, force=True)
        with newer:
            await leases.quotas.save([], read_at=LATER)
        with newer:
            await leases.save_nodes([facts("a")])
        with newer:
            await leases.extend_rebuild("token", now=LATER, lock_s=1)

    assert (await store.hgetall("lh:ledger"), await store.dbsize()) == before


async def _write_ledger(url: str) -> None:
    async with RedisLeases.connect(url) as leases:
        await rebuild(leases, {"a": 1})
        await reserve(leases, reservation("p", share("a")))


def _leases(copies: dict[str, str]) -> list[Lease]:
    return [
        load_lease(text, namespace=Namespace("default"), name=name) for name, text in copies.items()
    ]


async def _pin() -> None:
    with valkey_server() as server:
        await server.ready()
        rows = await rows_of(server.url)
    PINNED.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    asyncio.run(_pin())

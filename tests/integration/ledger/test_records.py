"""What was reserved is what is read, whatever it contains; what was damaged is noticed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.binder.ledger_sync.record_watch import damages_in
from shared.ledger.leases import RedisLeases
from shared.ledger.rows.joined_texts import joined_texts, split_texts
from shared.ledger.rows.record_sizes import MOST_AMOUNT, MOST_GROUPS_BYTES, MOST_LEASE_BYTES
from shared.ledger.server_errors import RebuildPendingError
from shared.model.budgets.quota import Quota, QuotaLimits
from shared.model.devices.device import DeviceUse
from shared.model.devices.node import NodeFacts
from shared.model.errors import UnavailableError
from shared.model.leases.ledger import (
    FeedTruncatedError,
    GangIncomplete,
    LedgerSnapshot,
    NoCapacity,
    Reservation,
    ReservedLease,
    TooLarge,
    UnreadableRecord,
)
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.request import Gang
from shared.placing.mirror.cluster_mirror import ClusterMirror
from tests.support.effort import tries
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    damages,
    device,
    facts,
    ledger,
    queued,
    refusal,
    report,
    reservation,
    reserve,
    share,
    uses,
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
            structs.replace(reservation("ganged", share("a", 1), tag="apart"), gang="gang"),
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
        await leases.set_cordoned({NodeName("a"): "its agent does not respond"})
        yield leases, client, leases._connection.prefix


async def generation_of(client: Any, prefix: str) -> str:
    return str((await client.hget(f"{prefix}ledger", "generation")).decode())


async def keys_of(url: str) -> set[str]:
    async with used_ledger(url) as (_, client, prefix):
        found = [key.decode().removeprefix(prefix) async for key in client.scan_iter(f"{prefix}*")]
    of_one = ("node-revision:", "written", "queue", "group-order:")
    return {key for key in found if not key.startswith(of_one)}


async def may_be_rebuilt(leases: RedisLeases) -> bool:
    """Whether the ledger has closed itself, or is closed as damaged, so that one rebuilds it."""
    with contextlib.suppress(UnavailableError):
        reading = await leases.checks.read()
        assert damages_in(reading)
        assert await leases.checks.close(reading.generation, [])
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

        with pytest.raises(RebuildPendingError, match=r"has \d+ of its \d+ records"):
            await leases.reserve([reservation("p", share("a"))], now=NOW, ttl_s=30)
        assert await client.exists(f"{prefix}{key}") == 0


async def test_a_ledger_that_has_lost_one_record_is_closed_by_the_next_call(url: str) -> None:
    async with used_ledger(url) as (leases, client, prefix):
        await client.hdel(f"{prefix}leases", "other")

        with pytest.raises(RebuildPendingError, match=r"has \d+ of its \d+ records"):
            await leases.capacity()
        await client.hset(f"{prefix}nodes", "c", "another record")

        with pytest.raises(RebuildPendingError, match="is being rebuilt"):
            await leases.capacity()
        assert await leases.begin_rebuild(now=NOW) is not None


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

        assert isinstance(outcome, ReservedLease)
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

        reading = await leases.checks.read()

        node = "" if kind == "waiting" else "a"
        record = UnreadableRecord(kind, keys[kind], node)
        assert record in reading.unreadable
        assert await leases.checks.close(reading.generation, reading.unreadable)
        assert await leases.begin_rebuild(now=NOW) is not None
        assert await leases.finish_rebuild(await generation_of(client, prefix))
        assert record[:2] in [each[:2] for each in await leases.checks.unreadable()]


@pytest.mark.parametrize("kind", ["devices", "nodes"])
async def test_totals_of_an_older_state_are_not_those_of_the_leases(url: str, kind: str) -> None:
    keys = {"devices": uuid("b", 0), "nodes": "b"}
    async with used_ledger(url) as (leases, client, prefix):
        older = await client.hget(f"{prefix}{kind}", keys[kind])
        await leases.release([PodUid("other")], reason="gone")
        assert await damages(leases) == {}
        await client.hset(f"{prefix}{kind}", keys[kind], older)

        assert list(await damages(leases)) == [f"{kind.removesuffix('s')} {keys[kind]}"]


@pytest.mark.parametrize("key", ["used-cores", "used-mib", "quota-used"])
async def test_the_use_of_a_namespace_of_an_older_state_is_not_that_of_its_leases(
    url: str, key: str
) -> None:
    quota = Quota(namespace=Namespace("default"), limits=QuotaLimits(cards=9))
    async with ledger(url, {"b": 2}) as leases, redis.asyncio.Redis.from_url(url) as client:
        await leases.quotas.save([quota], read_at=NOW)
        whole = structs.replace(share("b"), cores_percent=50)
        await reserve(leases, reservation("first", whole, node="b"))
        name = f"{leases._connection.prefix}{key}"
        older = await client.hgetall(name)
        await reserve(leases, reservation("second", share("b", 1), whole, node="b"))
        assert await damages(leases) == {}
        await client.hset(name, mapping=older)

        [damage] = await damages(leases)

        assert damage == ("quota default" if key == "quota-used" else "namespace default")


async def test_an_entry_of_the_feed_that_cannot_be_read_begins_a_new_snapshot(url: str) -> None:
    async with used_ledger(url) as (leases, client, prefix):
        start = await leases.snapshot()
        generation, last = start.position.split(":")
        entry = {"e": generation, "n": b"\xff" * 9, "d": b"\xff", "c": b"x", "p": last}
        await client.xadd(f"{prefix}feed", entry)

        with pytest.raises(FeedTruncatedError, match="cannot be read"):
            await anext(leases.changes(start.position))
        await leases.release([PodUid("other")], reason="gone")

        again = await leases.snapshot()
        await leases.release([PodUid("ganged")], reason="gone")
        [change] = await anext(leases.changes(again.position))
        assert change.cause == "released: gone"


async def test_a_server_that_may_evict_keys_serves_nothing_until_its_policy_is_changed() -> None:
    with valkey_server() as server:
        await server.ready()
        async with ledger(server.url) as leases:
            await server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")

            refused = pytest.raises(
                UnavailableError, match="config set maxmemory-policy noeviction"
            )
            with refused:
                await leases.checks.check_policy()
            with refused:
                await leases.reserve([reservation("p", share("a"))], now=NOW, ttl_s=30)
            assert "allkeys-lru" in str(leases.unready_reason())

            await server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
            await leases.checks.check_policy()
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

        with pytest.raises(RebuildPendingError):
            await leases.reserve([reservation("p", share("a"))], now=NOW, ttl_s=30)

        token = await leases.begin_rebuild(now=NOW)
        assert token is not None
        assert not await leases.extend_rebuild(token, now=NOW, lock_s=60)
        await leases.quotas.save([quota], read_at=NOW)
        assert await leases.extend_rebuild(token, now=NOW, lock_s=60)


async def test_a_main_hash_of_another_type_is_no_bug_but_an_empty_ledger(url: str) -> None:
    async with used_ledger(url) as (leases, client, prefix):
        await client.delete(f"{prefix}leases")
        await client.set(f"{prefix}leases", b"\xff")

        with pytest.raises(RebuildPendingError):
            await leases.reserve([reservation("p", share("a"))], now=NOW, ttl_s=30)

        assert await leases.begin_rebuild(now=NOW) is not None


SEPARATORS = [
    "",
    "a",
    "a\n",
    "\na",
    "a|b",
    "|",
    "\0",
    "\\",
    "\\n",
    "\\e",
    "a\\p",
    "[]{}",
    "é|\U0001f600",
]
ODD = st.one_of(st.sampled_from(SEPARATORS), st.text(max_size=20))
LONG = st.sampled_from(["x" * 317, "é" * 5_000, "y" * 30_000, "|\n" * 35_000, "z" * 140_000])
TEXTS = st.one_of(ODD, ODD, ODD, LONG)
NUMBERS = st.sampled_from([-(2**63), -5, 0, 1, 100, 2**31, 2**33, MOST_AMOUNT, 2**63, 2**70])


@st.composite
def odd_reservations(draw: st.DrawFn) -> Reservation:
    """A reservation on node `a`, any part of which may be anything."""
    odd = structs.replace(share("a", mib=draw(NUMBERS), cores=draw(NUMBERS)), container=draw(TEXTS))
    return structs.replace(
        reservation("odd", odd),
        pod=PodUid("odd" + draw(TEXTS)),
        namespace=Namespace(draw(TEXTS)),
        name=draw(TEXTS),
        resources=draw(st.dictionaries(TEXTS, NUMBERS, max_size=3)),
        anti_affinity_groups=tuple(draw(st.lists(TEXTS, max_size=4, unique=True))),
        gang=draw(TEXTS),
        memo=draw(TEXTS),
        trace=draw(TEXTS),
        weighed=draw(TEXTS),
    )


@given(st.lists(TEXTS))
def test_joined_texts_are_the_same_when_they_are_split(texts: list[str]) -> None:
    assert split_texts(joined_texts(texts)) == texts
    assert joined_texts(texts).count("\n") == max(0, len(texts) - 1)


@settings(max_examples=tries(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(wanted=odd_reservations())
def test_an_odd_pod_is_leased_as_it_is_or_refused_and_others_are_placed(
    url: str, wanted: Reservation
) -> None:
    asyncio.run(_reserve_and_release(url, wanted))


async def _reserve_and_release(url: str, wanted: Reservation) -> None:
    async with ledger(url) as leases:
        start = await leases.snapshot()
        [odd, plain] = await leases.reserve(
            [wanted, reservation("plain", share("a", 1))], now=NOW, ttl_s=30
        )

        assert isinstance(plain, ReservedLease)
        assert isinstance(odd, ReservedLease | NoCapacity | TooLarge)
        if isinstance(odd, ReservedLease):
            assert await leases.load([wanted.pod]) == [odd.lease]
            assert odd.lease.anti_affinity_groups == wanted.anti_affinity_groups
            assert odd.lease.resources == wanted.resources
            assert odd.lease.gang == wanted.gang
        await assert_sound(leases)
        mirror = await _followed(leases, start)
        assert {
            each.uuid: each.ledger_use for each in mirror.nodes[NodeName("a")].devices
        } == await uses(leases)

        await leases.waiting_pods.remove([wanted.pod])
        await leases.release([wanted.pod, PodUid("plain")], reason="gone")
        assert await assert_sound(leases) == []
        assert {replace_fence(use) for use in (await uses(leases)).values()} == {DeviceUse()}
        assert await leases.totals.gangs() == {}
        assert (await leases.totals.fair_share()).used == {}


def replace_fence(use: DeviceUse) -> DeviceUse:
    return structs.replace(use, fence=0)


async def _followed(leases: RedisLeases, start: LedgerSnapshot) -> ClusterMirror:
    """Return a mirror that has followed the feed from the snapshot on."""
    mirror = ClusterMirror()
    mirror.reset(start.nodes)
    async for changes in leases.changes(start.position):
        mirror.apply(changes)
        break
    return mirror


@settings(max_examples=tries(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(node=ODD, gpu=st.one_of(ODD, st.sampled_from(["x" * 95])), resource=ODD)
def test_nodes_devices_and_resources_of_any_name_are_used_and_freed(
    url: str, node: str, gpu: str, resource: str
) -> None:
    asyncio.run(_use_and_free(url, NodeName(node), DeviceUuid(gpu), resource))


async def _use_and_free(url: str, node: NodeName, gpu: DeviceUuid, resource: str) -> None:
    async with ledger(url, {"plain": 1}) as leases:
        start = await leases.snapshot()
        await leases.save_nodes([NodeFacts(name=node, allocatable={"pods": 9, resource: 7})])
        await leases.save_devices([replace(report("a", [device("a", 0, uuid=gpu)]), node=node)])
        odd = structs.replace(
            reservation("odd", share("a", device=gpu), node=node),
            resources={"pods": 1, resource: 5},
        )
        plain = reservation("plain", share("plain"), node="plain")

        [of_odd, of_plain] = await leases.reserve([odd, plain], now=NOW, ttl_s=30)

        assert isinstance(of_plain, ReservedLease)
        assert isinstance(of_odd, ReservedLease if gpu else NoCapacity)
        await assert_sound(leases)
        mirror = await _followed(leases, start)
        assert mirror.nodes[node].used_resources.get(resource, 0) == (
            5 if isinstance(of_odd, ReservedLease) else 0
        )
        await leases.release([odd.pod, plain.pod], reason="gone")
        assert await assert_sound(leases) == []


async def test_a_group_that_is_too_long_is_refused_with_its_size_and_the_limit(
    leases: RedisLeases,
) -> None:
    wanted = [reservation("p", share("a"), tag="g" * 30_000), reservation("q", share("a"))]

    [refused, other] = await leases.reserve(wanted, now=NOW, ttl_s=30)

    assert isinstance(refused, TooLarge)
    assert refused.reason == (
        "the anti-affinity groups would have 30000 bytes, and the ledger stores at most "
        f"{MOST_GROUPS_BYTES}"
    )
    assert isinstance(other, ReservedLease)
    assert len(await assert_sound(leases)) == 1


async def test_a_lease_of_a_thousand_containers_is_refused_and_of_its_gang_nothing_is_reserved(
    leases: RedisLeases,
) -> None:
    shares = [share("a", mib=1, container=f"{n:0120}") for n in range(1_000)]
    wanted = [reservation("small", share("a")), reservation("large", *shares)]

    outcomes = await leases.reserve_gang(Gang(name="g", min_member=2), wanted, now=NOW, ttl_s=30)

    assert isinstance(outcomes[0], GangIncomplete)
    assert isinstance(outcomes[1], TooLarge)
    assert f"stores at most {MOST_LEASE_BYTES}" in outcomes[1].reason
    assert await assert_sound(leases) == []


@pytest.mark.nodes(a=1)
@pytest.mark.parametrize(
    ("one", "other"), [("a0\nprod/train", "prod/train"), ("a|b", "a"), ("", "a"), ("a", "a\n")]
)
async def test_groups_and_gangs_are_compared_as_a_whole(
    leases: RedisLeases, one: str, other: str
) -> None:
    first = structs.replace(
        reservation("p", share("a"), tag=one), gang=one, anti_affinity_groups=(one,)
    )
    second = structs.replace(reservation("q", share("a"), tag=other), gang=other)

    await reserve(leases, first, second)

    assert await _gang_counts(leases, [one, other]) == [int(bool(one)), int(bool(other))]
    again = structs.replace(first, pod=PodUid("r"))
    refused = await refusal(leases, again)
    assert refused.reason.startswith("a: anti-affinity of ")


async def _gang_counts(leases: RedisLeases, gangs: Sequence[str]) -> list[int]:
    return [len(await leases.load_reserved_gang(gang)) if gang else 0 for gang in gangs]


async def test_the_lease_of_a_copy_with_impossible_numbers_is_not_restored(
    leases: RedisLeases,
) -> None:
    [lease] = await reserve(leases, reservation("p", share("a")))
    await leases.release([lease.pod], reason="to be restored")
    impossible: list[dict[str, Any]] = [
        {"fence": 2**53},
        {"slot": 2**31 - 1},
        {"memory_mib": -5},
        {"cores_percent": 101},
        {"memory_mib": 2**70},
    ]
    copies = [
        structs.replace(
            lease, pod=PodUid(f"p{n}"), shares=(structs.replace(lease.shares[0], **numbers),)
        )
        for n, numbers in enumerate(impossible)
    ]
    copies.append(structs.replace(lease, version=2**60))

    refused = await leases.restore([*copies, lease], now=NOW)

    assert {each.pod for each, _ in refused} == {copy.pod for copy in copies}
    assert await assert_sound(leases) == [lease]


async def test_a_waiting_pod_that_is_too_large_is_left_out_and_others_wait(
    leases: RedisLeases,
) -> None:
    capacity = await leases.capacity()
    large = replace(queued("large"), labels={"a": "x" * 2_000_000})

    await leases.waiting_pods.enqueue(
        [verdict(large, capacity), verdict(queued("small", units=16_001), capacity)]
    )

    assert await leases.waiting_pods.uids() == ["small"]


@pytest.mark.nodes
async def test_a_node_with_too_many_resources_leaves_others_alone(leases: RedisLeases) -> None:
    many = {f"example.com/{n}": 1 for n in range(5_000)}

    await leases.save_nodes([facts("many", **many), facts("few")])

    assert [each.facts.name for each in (await leases.snapshot()).nodes] == ["few"]

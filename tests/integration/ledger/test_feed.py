"""Mirrors of the ledger: a snapshot and all changes after it are the present."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from shared.ledger.leases import RedisLeases
from shared.model.device import DeviceUse
from shared.model.errors import UnavailableError
from shared.model.ledger import FeedTruncatedError, LedgerChange, LedgerNode, LedgerSnapshot
from shared.model.names import DeviceUuid, NodeName, PodUid
from tests.support.placer.ledger import (
    NOW,
    device,
    facts,
    ledger,
    report,
    reservation,
    reservation_among,
    reserve,
    share,
)


class Replica:
    """Applies changes to a snapshot."""

    def __init__(self, snapshot: LedgerSnapshot) -> None:
        self.position = snapshot.position
        self.capacity = snapshot.capacity
        self.nodes = {node.facts.name: node for node in snapshot.nodes}

    def apply(self, change: LedgerChange) -> None:
        self.position, self.capacity = change.position, change.capacity
        for node in change.nodes:
            self.nodes[node.facts.name] = node
        for name in change.removed:
            self.nodes.pop(name, None)
        for name, node in self.nodes.items():
            use = change.used.get(name)
            self.nodes[name] = LedgerNode(
                facts=node.facts,
                version=use.version if use else node.version,
                used=use.used if use else node.used,
                devices=tuple((d, change.devices.get(d.uuid, old)) for d, old in node.devices),
                served=node.served,
            )

    async def catch_up(self, leases: RedisLeases, until: str) -> None:
        async with asyncio.timeout(30):
            changes = leases.changes(self.position)
            while self.position != until:
                for change in await anext(changes):
                    self.apply(change)
            await aclose(changes)


async def aclose(changes: AsyncIterator[list[LedgerChange]]) -> None:
    await changes.aclose()  # type: ignore[attr-defined]


async def first_of(changes: AsyncIterator[list[LedgerChange]]) -> list[LedgerChange]:
    return await anext(changes)


async def disturb(leases: RedisLeases, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    for step in range(60):
        match chance.randrange(6):
            case 0 | 1 | 2:
                where = [(node, [share(node, chance.randrange(2), 500)]) for node in "ab"]
                reservations = [reservation_among(f"{seed}-{step}-{n}", where) for n in range(3)]
                await leases.reserve(reservations, now=NOW + step, ttl_s=5)
            case 3:
                await leases.expire(NOW + step)
            case 4:
                devices = [device("b", gpu, healthy=chance.random() < 0.7) for gpu in range(2)]
                await leases.save_devices([report("b", devices[: chance.randint(1, 2)])])
            case _:
                if chance.random() < 0.5:
                    await leases.remove_node(NodeName("c"))
                else:
                    await leases.save_nodes([facts("c", pods=chance.randrange(50))])


async def test_a_replica_that_applies_changes_equals_a_fresh_snapshot(url: str) -> None:
    async with ledger(url, {"a": 2, "b": 2, "c": 1}) as leases:
        replica = Replica(await leases.snapshot())

        async with asyncio.TaskGroup() as tasks:
            for seed in range(3):
                tasks.create_task(disturb(leases, seed))
        fresh = await leases.snapshot()
        await replica.catch_up(leases, fresh.position)

        assert {node.facts.name: node for node in fresh.nodes} == replica.nodes
        assert fresh.capacity == replica.capacity


async def test_a_snapshot_read_amid_changes_is_completed_by_the_changes_after_it(url: str) -> None:
    async with ledger(url, {f"n{n:03d}": 1 for n in range(150)}) as leases:

        async def write() -> None:
            for n in range(150):
                await reserve(leases, reservation(f"p{n}", share(f"n{n:03d}"), node=f"n{n:03d}"))

        taken, _ = await asyncio.gather(leases.snapshot(), write())
        replica = Replica(taken)
        fresh = await leases.snapshot()
        await replica.catch_up(leases, fresh.position)

        assert {node.facts.name: node for node in fresh.nodes} == replica.nodes


async def test_a_change_carries_totals_and_its_cause(url: str) -> None:
    async with ledger(url) as leases:
        position = (await leases.snapshot()).position
        [lease] = await reserve(leases, reservation("p", share("a", 0, 700), tag="red"))
        await leases.release([PodUid("p")], reason="the pod is gone")

        changes = leases.changes(position)
        made, ended = await anext(changes)
        await aclose(changes)

        assert (made.cause, ended.cause) == ("reserved", "released: the pod is gone")
        assert made.devices == {
            lease.shares[0].device: DeviceUse(
                memory_mib=700,
                shares=1,
                fence=lease.shares[0].fence,
                anti_affinity_groups=frozenset({"red"}),
                slots_taken="1",
            )
        }
        assert ended.devices[DeviceUuid("GPU-a-0")].memory_mib == 0
        assert ended.capacity == made.capacity + 1
        assert ended.used[NodeName("a")].version > made.used[NodeName("a")].version


async def test_a_change_is_received_as_soon_as_it_happens(url: str) -> None:
    async with ledger(url) as leases:
        changes = leases.changes((await leases.snapshot()).position)
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            received = tasks.create_task(first_of(changes))
            await asyncio.sleep(0)
            await reserve(leases, reservation("p", share("a")))

        assert received.result()[0].cause == "reserved"
        await aclose(changes)


async def test_a_trimmed_feed_cannot_be_continued(url: str) -> None:
    async with ledger(url, feed_length=10) as leases:
        position = (await leases.snapshot()).position
        for n in range(300):
            await reserve(leases, reservation(f"p{n}", cpu=1, node="a"))
            await leases.release([PodUid(f"p{n}")], reason="test")

        with pytest.raises(FeedTruncatedError, match="it begins at"):
            await anext(leases.changes(position))


@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_feed_in_which_other_changes_have_replaced_some_is_read_anew(
    url: str, *, is_idle: bool
) -> None:
    """As after a rollback that nobody noticed: versions and numbers of entries are the same."""
    prefix = f"replaced-{is_idle}:"
    async with (
        RedisLeases.connect(url, prefix=prefix) as leases,
        redis.asyncio.Redis.from_url(url) as server,
    ):
        token = await leases.begin_rebuild(now=NOW)
        assert token is not None
        await leases.save_nodes([facts("a")])
        await leases.save_devices([report("a", [device("a", 0)])])
        assert await leases.finish_rebuild(token)
        saved = {key: await server.dump(key) for key in await server.keys(f"{prefix}*")}
        await reserve(leases, reservation("p", share("a", 0, 700)))
        position = (await leases.snapshot()).position
        await server.delete(*await server.keys(f"{prefix}*"))
        for key, content in saved.items():
            await server.restore(key, 0, content)
        await reserve(leases, reservation("p", share("a", 0, 300)))
        if not is_idle:
            await reserve(leases, reservation("q", share("a", 0, 300)))

        with pytest.raises(FeedTruncatedError, match="has lost changes"):
            await anext(leases.changes(position))


async def test_a_rebuilt_ledger_has_another_feed(url: str) -> None:
    async with ledger(url) as leases:
        position = (await leases.snapshot()).position
        token = await leases.begin_rebuild(now=NOW + 1, force=True)

        with pytest.raises(UnavailableError):
            await anext(leases.changes(position))

        assert token is not None
        await leases.finish_rebuild(token)
        with pytest.raises(FeedTruncatedError, match="rebuilt"):
            await anext(leases.changes(position))

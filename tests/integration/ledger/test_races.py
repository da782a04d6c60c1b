"""The ledger under concurrent writers, as mirrors see it, and after the loss of its server."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.budgets.quota import Quota
from shared.model.devices.device import DeviceUse
from shared.model.errors import ConflictError, UnavailableError
from shared.model.leases.lease import Lease, LeaseState, StaleLeaseError
from shared.model.leases.ledger import (
    FeedTruncatedError,
    LedgerChange,
    LedgerNode,
    LedgerSnapshot,
    ReservedLease,
)
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    device,
    facts,
    ledger,
    rebuild,
    report,
    reservation,
    reservation_among,
    reserve,
    share,
)
from tests.support.servers.valkey import ValkeyServer, valkey_server


class Replica:
    """Applies changes to a snapshot."""

    def __init__(self, snapshot: LedgerSnapshot) -> None:
        self.position = snapshot.position
        self.capacity = snapshot.capacity
        self.nodes = {node.facts.name: node for node in snapshot.nodes}

    def apply(self, change: LedgerChange) -> None:
        self.position = change.position
        self.capacity = change.capacity
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


@pytest.mark.nodes(a=2, b=2, c=1)
async def test_a_replica_that_applies_changes_equals_a_fresh_snapshot(leases: RedisLeases) -> None:
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


async def test_a_change_carries_totals_and_its_cause(leases: RedisLeases) -> None:
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
            mode="hami-core",
        )
    }
    assert ended.devices[DeviceUuid("GPU-a-0")].memory_mib == 0
    assert ended.capacity == made.capacity + 1
    assert ended.used[NodeName("a")].version > made.used[NodeName("a")].version


async def test_a_change_is_received_as_soon_as_it_happens(leases: RedisLeases) -> None:
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

        with pytest.raises(FeedTruncatedError, match="its next entry follows"):
            await anext(leases.changes(position))


@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_feed_in_which_other_changes_have_replaced_some_is_read_anew(
    url: str, *, is_idle: bool
) -> None:
    """As after a rollback that nobody noticed: versions are the same."""
    prefix = f"replaced-{is_idle}:"
    async with (
        RedisLeases.connect(url, prefix=prefix) as leases,
        redis.asyncio.Redis.from_url(url) as server,
    ):
        await rebuild(leases, {"a": 1})
        saved = {key: await server.dump(key) for key in await server.keys(f"{prefix}*")}
        await reserve(leases, reservation("p", share("a", 0, 700)))
        position = (await leases.snapshot()).position
        await server.delete(*await server.keys(f"{prefix}*"))
        for key, content in saved.items():
            await server.restore(key, 0, content)
        await reserve(leases, reservation("p", share("a", 0, 300)))
        if not is_idle:
            await reserve(leases, reservation("q", share("a", 0, 300)))

        with pytest.raises(FeedTruncatedError, match="its next entry follows"):
            await anext(leases.changes(position))


async def test_a_rebuilt_ledger_has_another_feed(leases: RedisLeases) -> None:
    position = (await leases.snapshot()).position
    token = await leases.begin_rebuild(now=NOW + 1, force=True)

    with pytest.raises(UnavailableError):
        await anext(leases.changes(position))

    assert token is not None
    await leases.finish_rebuild(token)
    with pytest.raises(FeedTruncatedError, match="rebuilt"):
        await anext(leases.changes(position))


WRITERS = 20


async def test_a_reservation_is_either_bound_or_expired(leases: RedisLeases) -> None:
    for attempt in range(20):
        pod = PodUid(f"p{attempt}")
        [lease] = await reserve(leases, reservation(pod, share("a")))

        expired, [bound] = await asyncio.gather(leases.expire(NOW + 31), leases.bind([lease]))

        assert isinstance(bound, StaleLeaseError) == bool(expired)
        assert [found.pod for found in await assert_sound(leases)] == [pod] * (not expired)
        await leases.release([pod], reason="next")


async def test_of_two_reservations_for_one_pod_one_is_made(leases: RedisLeases) -> None:
    outcomes = await asyncio.gather(
        *(
            leases.reserve([reservation("p", share("a", n % 2))], now=NOW, ttl_s=30)
            for n in range(WRITERS)
        )
    )

    assert sum(isinstance(outcome, ReservedLease) for [outcome] in outcomes) == 1
    assert len({outcome.lease.version for [outcome] in outcomes}) == 1  # type: ignore[union-attr]


async def refuses_everything(leases: RedisLeases) -> None:
    for call in (
        leases.reserve([reservation("p", share("a"))], now=NOW, ttl_s=30),
        leases.release([PodUid("p")], reason="x"),
        leases.load([PodUid("p")]),
        leases.snapshot(),
        leases.waiting_pods.choose_offers(now=NOW),
        leases.expire(NOW),
        leases.save_nodes([facts("a")]),
        leases.capacity(),
    ):
        with pytest.raises(UnavailableError, match="being rebuilt"):
            await call


async def test_a_flushed_ledger_serves_again_after_a_rebuild_and_loses_nothing() -> None:
    with valkey_server() as server:
        await server.ready()
        async with ledger(server.url) as leases:
            held = await reserve(
                leases,
                reservation("p", share("a", 0, cores=50), tag="red"),
                reservation("q", share("a", 0), share("a", 1, container="second")),
            )
            [bound] = await leases.bind(held[:1])
            assert isinstance(bound, Lease)
            kept = [bound, held[1]]
            await server.command("FUNCTION", "FLUSH")
            await server.command("FLUSHALL")

            await refuses_everything(leases)
            assert await leases.generation() is None
            tokens = await asyncio.gather(*(leases.begin_rebuild(now=NOW + 9) for _ in range(5)))
            [token] = [token for token in tokens if token]
            await leases.save_nodes([facts("a")])
            await leases.save_devices([report("a", [device("a", 0), device("a", 1)])])
            over = structs.replace(held[0], pod=PodUid("forged"))
            refused = await leases.restore([*kept, over], now=NOW + 9, token=token)
            assert [(lease.pod, why) for lease, why in refused] == [("forged", "anti-affinity")]
            assert await leases.restore(kept, now=NOW + 9, token=token) == []
            with pytest.raises(UnavailableError):
                await leases.snapshot()
            assert await leases.finish_rebuild(token)

            assert await leases.generation() == token
            assert sorted(await assert_sound(leases), key=lambda lease: lease.pod) == kept
            [later] = await reserve(leases, reservation("r", share("a", 0)))
            assert later.shares[0].slot == 2
            assert later.shares[0].fence > max(s.fence for lease in kept for s in lease.shares)
            assert later.version > bound.version


async def test_a_rebuild_that_stopped_half_way_is_continued_by_another_caller(
    leases: RedisLeases,
) -> None:
    first = await leases.begin_rebuild(now=NOW, force=True, lock_s=60)
    assert first is not None
    assert await leases.begin_rebuild(now=NOW + 59) is None

    second = await leases.begin_rebuild(now=NOW + 61)

    assert second is not None
    with pytest.raises(ConflictError):
        await leases.restore([lease_of_p()], now=NOW, token=first)
    assert not await leases.finish_rebuild(first)
    assert await leases.finish_rebuild(second)
    assert await leases.begin_rebuild(now=NOW + 1000) is None


def lease_of_p(slot: int = 0, fence: int = 5) -> Lease:
    return Lease(
        pod=PodUid("p"),
        namespace=Namespace("default"),
        name="p",
        node=NodeName("a"),
        shares=(share("a", slot=slot, fence=fence),),
        state=LeaseState.BOUND,
        version=3,
    )


@pytest.mark.nodes
async def test_a_lease_is_restored_before_its_node_is_known_and_higher_fences_count(
    leases: RedisLeases,
) -> None:
    fence = int(NOW * 1000) + 10**6
    lease = lease_of_p(slot=1, fence=fence)

    assert await leases.restore([lease], now=NOW) == []

    await leases.save_nodes([facts("a")])
    await leases.save_devices([report("a", [device("a", 0)])])
    await assert_sound(leases)
    [later] = await reserve(leases, reservation("q", share("a")))
    assert later.shares[0].fence == fence + 1
    assert later.shares[0].slot == 0
    clashing = structs.replace(lease_of_p(), pod=PodUid("r"))
    assert [why for _, why in await leases.restore([clashing], now=NOW)] == ["slot 0"]


async def restart_with_an_older_file(server: ValkeyServer) -> None:
    server.kill()
    server.start()
    await server.ready()


@pytest.mark.parametrize(
    "saw", ["reserve", "bind", "release", "feed", "quotas", "epoch", "snapshot"]
)
async def test_a_client_that_saw_later_versions_detects_lost_writes_and_stops_the_ledger(
    saw: str,
) -> None:
    """A replica that was behind takes over, or a file is loaded that lacks the last second."""
    with valkey_server() as server:
        await server.ready()
        async with ledger(server.url) as writer:
            prefix = writer._connection.prefix
            [old, ended] = await reserve(
                writer, reservation("old", share("a")), reservation("e", share("a"))
            )
            async with RedisLeases.connect(
                server.url, prefix=prefix, detects_lost_writes=True
            ) as detector:
                position = (await detector.snapshot()).position
                assert await server.command("SAVE") == b"+OK\r\n"
                match saw:
                    case "reserve":
                        await reserve(detector, reservation("p", share("a")))
                    case "bind":
                        await detector.bind([old])
                    case "release":
                        await detector.release([ended.pod], reason="its pod is gone")
                    case "quotas":
                        await writer.quotas.save([Quota(namespace=Namespace("n"))], read_at=NOW)
                        await anext(detector.changes(position))
                    case "snapshot":
                        await reserve(writer, reservation("p", share("a")))
                        await detector.snapshot()
                    case _:
                        await reserve(writer, reservation("p", share("a")))
                        read = anext(detector.changes(position))
                        await (read if saw == "feed" else detector.generation())
                await restart_with_an_older_file(server)

                with pytest.raises(UnavailableError, match="has lost writes"):
                    await detector.capacity()
                with pytest.raises(UnavailableError, match="being rebuilt"):
                    await detector.capacity()
                token = await detector.begin_rebuild(now=NOW + 9)
                assert token is not None
                assert await detector.finish_rebuild(token)
                assert await detector.generation() == token


async def test_a_reader_does_not_stop_a_ledger_that_lost_writes() -> None:
    with valkey_server() as server:
        await server.ready()
        async with ledger(server.url) as writer:
            prefix = writer._connection.prefix
            async with RedisLeases.connect(server.url, prefix=prefix) as reader:
                await server.command("SAVE")
                await reserve(writer, reservation("p", share("a")))
                assert await reader.generation() is not None
                await restart_with_an_older_file(server)

                assert await reader.generation() is not None
                assert await writer.generation() is None
                assert await reader.generation() is None


async def test_versions_rise_after_lost_writes_whatever_the_clock_shows() -> None:
    with valkey_server() as server:
        await server.ready()
        async with ledger(server.url) as leases:
            await server.command("SAVE")
            [lost] = await reserve(leases, reservation("p", share("a")))
            await restart_with_an_older_file(server)

            assert await leases.generation() is None
            token = await leases.begin_rebuild(now=NOW - 3600)
            assert token is not None
            assert await leases.finish_rebuild(token)

            assert await leases.generation() == token
            await leases.save_nodes([facts("a")])
            await leases.save_devices([report("a", [device("a", 0)])])
            [later] = await reserve(leases, reservation("p", share("a")))
            assert later.version > lost.version

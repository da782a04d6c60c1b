"""Node facts and device reports in the ledger."""

from dataclasses import replace

import pytest
import redis.asyncio
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.devices.node import NOT_LISTED_CODE, REPLACED_CODE, NodeRevision, cordon_reason
from shared.model.events.node_events import DevicesRegistered
from shared.model.leases.lease import LeaseState
from shared.model.leases.ledger import NoCapacity, ReservedLease
from shared.model.names import NodeName, PodUid
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    device,
    facts,
    ledger,
    refusal,
    report,
    reservation,
    reserve,
    share,
    uuid,
)


async def test_facts_of_a_lower_revision_are_ignored(leases: RedisLeases) -> None:
    first = NodeRevision(1)
    second = NodeRevision(2)
    third = NodeRevision(2, 5)
    fourth = NodeRevision(3, 4)
    assert await leases.save_nodes([facts("a", memory=2)], revisions=[third])
    assert not await leases.save_nodes([facts("a", memory=1)], revisions=[first])
    assert not await leases.save_nodes([facts("a", memory=3)], revisions=[second])
    assert not await leases.save_nodes([facts("a", memory=2)], revisions=[fourth])
    assert not await leases.save_nodes([facts("a", memory=3)], revisions=[third])

    [node] = (await leases.snapshot()).nodes
    assert node.facts.allocatable["memory"] == 2
    assert await leases.save_nodes([facts("a", memory=5)], revisions=[fourth]), "the later event"
    assert await leases.save_nodes([facts("a", memory=6)]), "an opaque version is not compared"


async def test_a_deletion_of_a_lower_revision_does_not_remove_the_node_that_came_back(
    leases: RedisLeases,
) -> None:
    name = NodeName("a")
    await leases.save_nodes([facts("a")], revisions=[NodeRevision(1, 9)])
    assert await leases.remove_node(name, revision=NodeRevision(2))
    assert not await leases.save_nodes([facts("a")], revisions=[NodeRevision(1, 9)]), (
        "deleted since"
    )
    assert (await leases.snapshot()).nodes == ()
    assert await leases.save_nodes([facts("a")], revisions=[NodeRevision(3, 9)])

    assert not await leases.remove_node(name, revision=NodeRevision(2))

    assert [node.facts.name for node in (await leases.snapshot()).nodes] == [name]
    assert await leases.remove_node(name, revision=NodeRevision(4))


async def test_an_api_server_restored_from_a_backup_is_followed_within_two_minutes(
    url: str,
) -> None:
    restored = NodeRevision(5, 5)
    name = NodeName("a")
    async with ledger(url) as leases, redis.asyncio.from_url(url) as client:
        await leases.save_nodes([facts("a")], revisions=[NodeRevision(1_000, 1_000)])
        assert not await leases.save_nodes([facts("a", memory=1)], revisions=[restored])

        [key] = await client.keys(f"{leases._connection.prefix}node-revision:{name}")
        assert 0 < await client.ttl(key) <= 120
        await client.expire(key, 0)

        assert await leases.save_nodes([facts("a", memory=1)], revisions=[restored])


async def test_a_cordoned_device_gets_no_shares_until_it_is_uncordoned(leases: RedisLeases) -> None:
    closed = replace(facts("a"), excluded_devices=(1,))
    await leases.save_nodes([closed])
    capacity = await leases.capacity()

    [refused, other] = await leases.reserve(
        [reservation("p", share("a", 1)), reservation("q", share("a", 0))], now=NOW, ttl_s=30
    )
    assert isinstance(refused, NoCapacity)
    assert refused.reason == f"a: device-excluded of {uuid('a', 1)}"
    assert isinstance(other, ReservedLease)

    more = [device("a", gpu, slots=5) for gpu in range(3)]
    await leases.save_devices([report("a", more, at=NOW)])
    await refusal(leases, reservation("p", share("a", 1)))  # a new report does not open it
    [third] = await leases.reserve([reservation("p", share("a", 2))], now=NOW, ttl_s=30)
    assert isinstance(third, ReservedLease), "devices that are not closed are open"

    await leases.save_nodes([facts("a")])
    assert await leases.capacity() > capacity
    await reserve(leases, reservation("r", share("a", 1)))
    await assert_sound(leases)


async def test_a_cordoned_node_serves_nothing_to_mirrors_and_is_offered_when_it_is_uncordoned(
    leases: RedisLeases,
) -> None:
    served = report("a", [device("a", 0)], at=NOW)
    await leases.save_nodes([facts("a")])
    await leases.save_devices([served])
    [held] = await leases.reserve([reservation("p", share("a", 0))], now=NOW, ttl_s=30)
    start = await leases.snapshot()
    name = start.nodes[0].facts.name
    feed = leases.changes(start.position)

    assert await leases.set_cordoned({name: "its agent is silent"}) == {name: "its agent is silent"}
    assert await leases.set_cordoned({name: "its agent is silent"}) == {name: "its agent is silent"}
    [[cordoned]] = [await anext(feed)]
    [seen] = (await leases.snapshot()).nodes
    before = await leases.capacity()
    assert await leases.set_cordoned({}) == {name: "its agent is silent"}
    await leases.save_devices([replace(served, reported_at=NOW + 1)])
    assert cordon_reason((await leases.snapshot()).nodes[0].serving) != ""
    assert await leases.set_cordoned({name: ""}) == {}
    [*_, opened] = await anext(feed)

    assert cordon_reason(cordoned.nodes[0].serving) == "its agent is silent"
    assert seen.serving == cordoned.nodes[0].serving
    assert [use for _, use in seen.devices] == [use for _, use in start.nodes[0].devices]
    assert opened.nodes[0].serving == {"volcano.sh/vgpu-number"}
    assert await leases.capacity() > before, "waiting pods are offered it"
    assert isinstance(held, ReservedLease)
    await assert_sound(leases)


async def test_an_allocatable_amount_of_0_counts_unless_the_resource_is_newly_served(
    leases: RedisLeases,
) -> None:
    number = "volcano.sh/vgpu-number"
    newly = replace(report("a", [device("a", 0)], at=NOW), newly_served=(number,))
    await leases.save_nodes([replace(facts("a"), unserved_resources=(number,))])
    await leases.save_devices([newly])
    start = await leases.snapshot()
    feed = leases.changes(start.position)
    await leases.save_devices([report("a", [device("a", 0)], at=NOW + 15)])
    [[changed]] = [await anext(feed)]

    assert start.nodes[0].serving == {number}
    assert changed.nodes[0].serving == set()
    assert (await leases.snapshot()).nodes[0].serving == set()


async def test_a_removed_node_is_not_cordoned_any_more_and_an_unknown_node_never(
    leases: RedisLeases,
) -> None:
    await leases.save_nodes([facts("a")])
    assert await leases.set_cordoned({facts("a").name: "why", facts("b").name: "why"}) == {
        "a": "why"
    }

    await leases.remove_node(facts("a").name)

    assert await leases.set_cordoned({}) == {}


async def test_all_nodes_of_a_large_cluster_are_cordoned_at_once(url: str) -> None:
    """The nodes of one call of a function share an entry of the feed."""
    silent = {NodeName(f"node-{number}"): "its agent is silent" for number in range(1_400)}
    async with ledger(url, {}) as leases:
        await leases.save_nodes([facts(name) for name in silent])
        start = await leases.snapshot()

        assert await leases.set_cordoned(silent) == silent

        seen: set[str] = set()
        async for changes in leases.changes(start.position):
            nodes = [node for change in changes for node in change.nodes]
            seen.update(node.facts.name for node in nodes if cordon_reason(node.serving))
            if seen == silent.keys():
                break


async def test_the_latest_report_decides_whether_a_node_has_our_agent(url: str) -> None:
    ours = report("a", [device("a", 0)], at=NOW)
    theirs = DevicesRegistered(
        node=ours.node, devices=ours.devices, served=ours.served, reported_at=NOW + 1
    )
    async with ledger(url, {}) as leases:
        seen = [await leases.reported_by_agent(ours.node)]
        for each in (ours, theirs, replace(ours, reported_at=NOW + 2)):
            await leases.save_devices([each])
            seen.append(await leases.reported_by_agent(ours.node))
        await leases.save_devices([theirs])
        seen.append(await leases.reported_by_agent(ours.node))

    assert seen == [False, True, False, True, True], "the last one came late"


@pytest.mark.nodes(a=1, b=1)
async def test_a_device_with_leases_stays_with_its_node_when_another_node_reports_it(
    leases: RedisLeases,
) -> None:
    await reserve(leases, reservation("p", share("a")))
    both = [device("b", 0), replace(device("a", 0), index=1)]

    await leases.save_devices([report("b", both, at=NOW)])
    refused = await refusal(leases, reservation("q", share("a", index=1), node="b"))
    assert refused.reason == f"b: device-moved of {uuid('a', 0)}"

    await leases.remove_node(NodeName("b"))
    await reserve(leases, reservation("r", share("a")))
    assert [
        each.pod for each in await leases.release([PodUid("p"), PodUid("r")], reason="test")
    ] == ["p", "r"]
    await assert_sound(leases)


@pytest.mark.nodes(a=1, b=0)
@pytest.mark.parametrize(
    "leaves",
    [
        "no longer reported",
        NOT_LISTED_CODE,
        f"cordoned: {NOT_LISTED_CODE}",
        REPLACED_CODE,
        "node deleted",
    ],
)
async def test_a_device_moves_once_its_node_does_not_report_it_and_its_leases_have_ended(
    leases: RedisLeases, leaves: str
) -> None:
    await reserve(leases, reservation("p", share("a")))
    moved = report("b", [device("a", 0)], at=NOW)
    if leaves == "node deleted":
        await leases.remove_node(NodeName("a"))
    else:
        missing = replace(device("a", 0), healthy=False, fault=f"{leaves}: gone")
        left = [] if leaves == "no longer reported" else [missing]
        await leases.save_devices([report("a", left, at=NOW)])

    await leases.save_devices([moved])
    held = await leases.totals.of_nodes([NodeName("b")])
    await leases.release([PodUid("p")], reason="test")
    await leases.save_devices([replace(moved, reported_at=NOW + 10)])

    assert [each for each, _ in held[0].node.devices] == []
    await reserve(leases, reservation("q", share("a"), node="b"))
    await assert_sound(leases)


@pytest.mark.nodes(a=1, b=1)
async def test_no_node_takes_an_idle_device_that_another_node_reports(leases: RedisLeases) -> None:
    [kept] = await reserve(leases, reservation("p", share("a")))
    await leases.release([kept.pod], reason="test")
    stolen = report("b", [device("b", 0), replace(device("a", 0), index=1)], at=NOW)

    shared = [
        await leases.save_devices([replace(stolen, reported_at=NOW + at, fences=fences)])
        for at, fences in enumerate(({}, {uuid("a", 0): 2**51}))
    ]

    assert shared == 2 * [{uuid("a", 0): (NodeName("b"), NodeName("a"))}]
    [after] = await reserve(leases, reservation("q", share("a")))
    assert after.shares[0].fence == kept.shares[0].fence + 1
    await assert_sound(leases)


@pytest.mark.nodes(a=1)
async def test_no_report_raises_a_fence_so_high_that_it_cannot_rise_any_more(
    leases: RedisLeases,
) -> None:
    [before] = await reserve(leases, reservation("p", share("a")))
    mine = replace(report("a", [device("a", 0)]), fences={uuid("a", 0): 2**52 - 1})
    await leases.save_devices([mine])
    await leases.save_devices([report("a", [], at=NOW)])
    await leases.release([PodUid("p")], reason="test")
    await leases.save_devices([report("a", [device("a", 0)], at=NOW + 1)])

    [after] = await reserve(leases, reservation("q", share("a")))

    assert after.shares[0].fence == before.shares[0].fence + 1


@pytest.mark.nodes(a=1)
@pytest.mark.parametrize("number", ["version", "fence"])
async def test_no_restored_lease_raises_versions_or_fences_so_high(
    leases: RedisLeases, number: str
) -> None:
    [lease] = await reserve(leases, reservation("p", share("a")))
    [known] = await leases.release([lease.pod], reason="its write was lost")
    [mine] = known.shares
    forged = {
        "version": structs.replace(known, version=2**52 - 1),
        "fence": structs.replace(known, shares=(structs.replace(mine, fence=2**52 - 1),)),
    }[number]

    active = structs.replace(forged, state=LeaseState.ACTIVE)

    ready = await leases.restore([active], now=NOW)
    token = await leases.begin_rebuild(now=NOW, force=True)
    rebuilt = await leases.restore([active], now=NOW, token=token or "")

    assert [why.split()[0] for _, why in (*ready, *rebuilt)] == [number, number]


@pytest.mark.nodes(a=1, b=1)
async def test_a_lease_that_only_an_agent_knows_takes_no_device_of_another_node(
    leases: RedisLeases,
) -> None:
    [lease] = await reserve(leases, reservation("p", share("a")))
    await leases.release([lease.pod], reason="test")
    stolen = structs.replace(lease, pod=PodUid("q"), node="b", state=LeaseState.ACTIVE)

    refused = await leases.restore([stolen], now=NOW, hearsay=[stolen.pod])

    assert [why for _, why in refused] == ["device-moved"]
    await reserve(leases, reservation("r", share("a")))


async def test_a_lease_that_only_an_agent_knows_begins_when_it_is_restored(
    leases: RedisLeases,
) -> None:
    [lease] = await reserve(leases, reservation("p", share("a")))
    await leases.release([lease.pod], reason="test")
    told = structs.replace(lease, created_at=1.0, activated_at=2.0, state=LeaseState.ACTIVE)

    assert await leases.restore([told], now=NOW, hearsay=[told.pod]) == []

    [restored] = await leases.load([told.pod])
    assert restored
    assert restored.created_at == restored.activated_at >= NOW


@pytest.mark.nodes(a=1, b=0)
async def test_a_device_is_back_after_a_late_report_of_the_node_that_had_it(
    leases: RedisLeases,
) -> None:
    """A report of what was saved before is skipped, unless the device itself has changed since."""
    here = report("b", [device("a", 0)], at=NOW + 1)
    await leases.save_devices([report("a", [], at=NOW)])
    await leases.save_devices([here])
    [lost] = await reserve(leases, reservation("p", share("a"), node="b"))
    await leases.release([lost.pod], reason="its write was lost")
    await leases.save_devices([report("b", [], at=NOW + 1)])
    await leases.save_devices([report("a", [device("a", 0)], at=NOW + 2)])
    await leases.save_devices([report("a", [], at=NOW + 3)])
    await leases.restore([structs.replace(lost, state=LeaseState.ACTIVE)], now=NOW)

    await leases.save_devices([replace(here, reported_at=NOW + 11)])

    await reserve(leases, reservation("q", share("a"), node="b"))
    await assert_sound(leases)


@pytest.mark.nodes(a=1, b=1)
async def test_reservations_expire_although_a_device_moved_and_its_node_was_removed(
    leases: RedisLeases,
) -> None:
    await reserve(leases, reservation("p", share("a")), reservation("q", share("b"), node="b"))
    await leases.save_devices([report("b", [device("b", 0), device("a", 0)], at=NOW)])
    await leases.remove_node(NodeName("b"))
    await leases.release([PodUid("q")], reason="test")

    assert [each.pod for each in await leases.expire(NOW + 60)] == ["p"]
    await assert_sound(leases)


@pytest.mark.nodes(a=1, b=1)
async def test_a_restored_lease_takes_its_device_back_from_another_node(
    leases: RedisLeases,
) -> None:
    [lease] = await reserve(leases, reservation("p", share("a")))
    token = await leases.begin_rebuild(now=NOW, force=True)
    assert token is not None
    for name in ("a", "b"):
        await leases.save_nodes([facts(name)])
    await leases.save_devices([report("b", [device("b", 0), device("a", 0)], at=NOW)])
    assert await leases.restore([lease], now=NOW, token=token) == []
    assert await leases.finish_rebuild(token)

    await leases.remove_node(NodeName("b"))

    assert [each.pod for each in await leases.release([PodUid("p")], reason="test")] == ["p"]
    await assert_sound(leases)


async def test_leases_end_and_expire_although_the_record_of_their_device_cannot_be_read(
    url: str,
) -> None:
    async with ledger(url) as leases, redis.asyncio.Redis.from_url(url) as client:
        await reserve(leases, reservation("p", share("a", 0)), reservation("q", share("a", 1)))
        await client.hset(f"{leases._connection.prefix}devices", uuid("a", 0), "rubbish")

        assert [each.pod for each in await leases.release([PodUid("p")], reason="test")] == ["p"]
        assert [each.pod for each in await leases.expire(NOW + 60)] == ["q"]


@pytest.mark.nodes(a=1, b=1)
async def test_a_device_s_next_fence_is_above_those_that_its_own_agent_has_honoured(
    leases: RedisLeases,
) -> None:
    [first] = await reserve(leases, reservation("p", share("a")))
    given = first.shares[0].fence
    for name, fence in (("a", given + 7), ("b", given + 9)):
        honoured = {uuid("a", 0): fence}
        await leases.save_devices([replace(report(name, [device(name, 0)]), fences=honoured)])

    [second] = await reserve(leases, reservation("q", share("a")))

    assert [each.fence for each in second.shares] == [given + 8]


@pytest.mark.nodes(a=1, b=1)
async def test_a_node_that_remembers_a_device_of_another_node_does_not_take_it(
    leases: RedisLeases,
) -> None:
    moved = device("a", 0)
    await leases.save_devices([report("b", [device("b", 0), moved], at=NOW + 1)])
    remembered = replace(moved, healthy=False, fault="NotListed")

    await leases.save_devices([report("a", [moved], at=NOW + 2)])
    await leases.save_devices([report("b", [device("b", 0), remembered], at=NOW + 3)])

    await reserve(leases, reservation("p", share("a", 0)))
    totals = await leases.totals.of_nodes([NodeName("a"), NodeName("b")])
    assert [each.reported for each in totals] == [(uuid("a", 0),), (uuid("b", 0),)]

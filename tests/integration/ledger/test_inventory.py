"""What the API server says of nodes, as the ledger takes it in."""

from dataclasses import replace

from shared.model.ledger import NoCapacity, Reserved
from shared.model.node import cordon_reason
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    device,
    facts,
    ledger,
    report,
    reserve,
    share,
    uuid,
    wish,
)


async def test_facts_that_were_seen_earlier_are_ignored(url: str) -> None:
    async with ledger(url) as leases:
        assert await leases.save_node(facts("a", memory=2), seen_at=NOW + 2)
        assert not await leases.save_node(facts("a", memory=1), seen_at=NOW + 1)
        assert not await leases.save_node(facts("a", memory=2), seen_at=NOW + 4)
        assert not await leases.save_node(facts("a", memory=3), seen_at=NOW + 3)

        [node] = (await leases.snapshot()).nodes
        assert node.facts.allocatable["memory"] == 2
        assert await leases.save_node(facts("a", memory=5), seen_at=NOW + 5)


async def test_a_closed_device_takes_no_shares_until_it_is_opened_again(url: str) -> None:
    closed = replace(facts("a"), excluded_devices=(1,))
    async with ledger(url) as leases:
        await leases.save_node(closed)
        capacity = await leases.capacity()

        [refused, other] = await leases.reserve(
            [wish("p", share("a", 1)), wish("q", share("a", 0))], now=NOW, ttl_s=30
        )
        assert isinstance(refused, NoCapacity)
        assert refused.reason == f"a: device-closed of {uuid('a', 1)}"
        assert isinstance(other, Reserved)

        more = [device("a", gpu, slots=5) for gpu in range(3)]
        await leases.save_devices(report("a", more, at=NOW))
        [still] = await leases.reserve([wish("p", share("a", 1))], now=NOW, ttl_s=30)
        assert isinstance(still, NoCapacity), "a new report does not open it"
        [third] = await leases.reserve([wish("p", share("a", 2))], now=NOW, ttl_s=30)
        assert isinstance(third, Reserved), "devices that are not closed are open"

        await leases.save_node(facts("a"))
        assert await leases.capacity() > capacity
        await reserve(leases, wish("r", share("a", 1)))
        await assert_sound(leases)


async def test_a_cordoned_node_serves_nothing_to_mirrors_and_is_offered_when_it_is_uncordoned(
    url: str,
) -> None:
    served = report("a", [device("a", 0)], at=NOW)
    async with ledger(url) as leases:
        await leases.save_node(facts("a"))
        await leases.save_devices(served)
        [held] = await leases.reserve([wish("p", share("a", 0))], now=NOW, ttl_s=30)
        start = await leases.snapshot()
        name = start.nodes[0].facts.name
        feed = leases.changes(start.position)

        assert await leases.set_cordoned({name: "its agent is silent"}) == {name}
        assert await leases.set_cordoned({name: "its agent is silent"}) == {name}
        [[shut]] = [await anext(feed)]
        [seen] = (await leases.snapshot()).nodes
        before = await leases.capacity()
        assert await leases.set_cordoned({}) == {name}
        await leases.save_devices(replace(served, reported_at=NOW + 1))
        assert cordon_reason((await leases.snapshot()).nodes[0].serving) != ""
        assert await leases.set_cordoned({name: ""}) == set()
        [*_, opened] = await anext(feed)

        assert cordon_reason(shut.nodes[0].serving) == "its agent is silent"
        assert seen.serving == shut.nodes[0].serving
        assert [use for _, use in seen.devices] == [use for _, use in start.nodes[0].devices]
        assert opened.nodes[0].serving == {"volcano.sh/vgpu-number"}
        assert await leases.capacity() > before, "who waits is told"
        assert isinstance(held, Reserved)
        await assert_sound(leases)


async def test_a_removed_node_is_not_cordoned_any_more_and_an_unknown_node_never(url: str) -> None:
    async with ledger(url) as leases:
        await leases.save_node(facts("a"))
        assert await leases.set_cordoned({facts("a").name: "why", facts("b").name: "why"}) == {"a"}

        await leases.remove_node(facts("a").name)

        assert await leases.set_cordoned({}) == set()


async def test_the_latest_report_decides_whether_a_node_has_our_agent(url: str) -> None:
    ours = report("a", [device("a", 0)], at=NOW)
    theirs = replace(ours, other_plugin=True, reported_at=NOW + 1)
    async with ledger(url, {}) as leases:
        seen = [await leases.reported_by_agent(ours.node)]
        for told in (ours, theirs, replace(ours, reported_at=NOW + 2)):
            await leases.save_devices(told)
            seen.append(await leases.reported_by_agent(ours.node))
        await leases.save_devices(theirs)
        seen.append(await leases.reported_by_agent(ours.node))

    assert seen == [False, True, False, True, True], "the last one came late"


async def test_a_report_of_an_agent_whose_clock_was_set_back_counts(url: str) -> None:
    two, one = [device("a", 0), device("a", 1)], [device("a", 0)]
    async with ledger(url) as leases:
        await leases.save_node(facts("a"))
        await leases.save_devices(report("a", one, at=NOW + 3600))

        assert not await leases.save_devices(report("a", two, at=NOW + 3590)), "it came late"
        assert await leases.save_devices(report("a", two, at=NOW))

        [node] = (await leases.snapshot()).nodes
        assert [found.index for found, _ in node.devices] == [0, 1]

"""What the API server says of nodes, as the ledger takes it in."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shared.model.ledger import Full, Reserved
from tests.support.ledger import (
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
from tests.support.valkey import ValkeyServer, valkey_server


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with valkey_server() as running:
        yield running


@pytest.fixture
async def url(server: ValkeyServer) -> str:
    await server.ready()
    return server.url


async def test_facts_seen_earlier_are_passed_over(url: str) -> None:
    async with ledger(url) as leases:
        assert await leases.save_node(facts("a", memory=2), seen_at=NOW + 2)
        assert not await leases.save_node(facts("a", memory=1), seen_at=NOW + 1)
        assert not await leases.save_node(facts("a", memory=2), seen_at=NOW + 4)
        assert not await leases.save_node(facts("a", memory=3), seen_at=NOW + 3)

        [node] = (await leases.snapshot()).nodes
        assert node.facts.allocatable["memory"] == 2
        assert await leases.save_node(facts("a", memory=5), seen_at=NOW + 5)


async def test_a_closed_device_takes_nothing_until_it_is_opened_again(url: str) -> None:
    closed = replace(facts("a"), closed_devices=(1,))
    async with ledger(url) as leases:
        await leases.save_node(closed)
        capacity = await leases.capacity()

        [refused, other] = await leases.reserve(
            [wish("p", share("a", 1)), wish("q", share("a", 0))], now=NOW, ttl_s=30
        )
        assert isinstance(refused, Full)
        assert refused.reason == f"a: device-closed of {uuid('a', 1)}"
        assert isinstance(other, Reserved)

        more = [device("a", gpu, slots=5) for gpu in range(3)]
        await leases.save_devices(report("a", more, at=NOW))
        [still] = await leases.reserve([wish("p", share("a", 1))], now=NOW, ttl_s=30)
        assert isinstance(still, Full), "a new report does not open it"
        [third] = await leases.reserve([wish("p", share("a", 2))], now=NOW, ttl_s=30)
        assert isinstance(third, Reserved), "devices that are not closed are open"

        await leases.save_node(facts("a"))
        assert await leases.capacity() > capacity
        await reserve(leases, wish("r", share("a", 1)))
        await assert_sound(leases)

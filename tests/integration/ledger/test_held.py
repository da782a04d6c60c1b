"""What an agent has given out beyond the leases is placed nowhere, and is in no total of leases."""

from dataclasses import replace

import pytest
import redis.asyncio
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.devices.device import Held
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.ledger import ReservedLease
from tests.support.hostile_agent import EXTREMES_OF_HELD, MOST_LEFT
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    device,
    ledger,
    refusal,
    report,
    reservation,
    reserve,
    share,
    uses,
)

CARD = device("a", 0)


async def hold(leases: RedisLeases, held: Held | None, at: float) -> None:
    await leases.save_devices([report("a", [replace(CARD, held=held)], at=at)])


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (Held(memory_mib=12_001), "memory"),
        (Held(cores_percent=91), "cores"),
        (Held(shares=4), "slots"),
        (Held(memory_mib=1, shares=1, layout="group1"), "layout"),
    ],
)
async def test_a_share_fits_beside_what_is_held_and_once_it_is_not_held(
    leases: RedisLeases, held: Held, reason: str
) -> None:
    wanted = reservation("new", share("a", mib=4_000, cores=10))
    await hold(leases, held, at=10)

    refused = await refusal(leases, wanted)
    assert reason in refused.reason
    assert refused.devices[CARD.uuid].held == held
    before = await leases.snapshot()
    await hold(leases, None, at=20)

    assert (await leases.snapshot()).capacity > before.capacity, "waiting pods are offered it"
    await reserve(leases, wanted)
    await assert_sound(leases)


async def test_slots_that_are_held_are_given_to_no_lease(leases: RedisLeases) -> None:
    await hold(leases, Held(shares=2, slots="101"), at=10)

    granted = await reserve(leases, *(reservation(f"p{n}", share("a", mib=100)) for n in range(2)))

    assert [lease.shares[0].slot for lease in granted] == [1, 3]
    await assert_sound(leases)


async def test_a_whole_device_needs_one_on_which_nothing_is_held(leases: RedisLeases) -> None:
    await hold(leases, Held(shares=1), at=10)

    refused = await refusal(leases, reservation("whole", share("a", mib=16_000, cores=100)))

    assert "not-idle" in refused.reason


async def test_a_lost_lease_is_restored_whatever_its_agent_holds_meanwhile(
    leases: RedisLeases,
) -> None:
    await hold(leases, None, at=5)
    [lease] = await reserve(leases, reservation("lost", share("a", mib=16_000)))
    [bound] = await leases.bind([lease])
    await leases.release([lease.pod], reason="lost")
    await hold(leases, Held(memory_mib=16_000, shares=1, slots="1"), at=10)

    assert isinstance(bound, Lease)
    active = structs.replace(bound, state=LeaseState.ACTIVE)
    misfits = await leases.restore([active], now=NOW)

    assert misfits == []
    use = (await uses(leases))[CARD.uuid]
    assert (use.memory_mib, use.taken.memory_mib) == (16_000, 32_000)
    await assert_sound(leases)


@pytest.mark.nodes(a=2, b=2)
@pytest.mark.parametrize("held", EXTREMES_OF_HELD, ids=range(len(EXTREMES_OF_HELD)))
async def test_an_agent_closes_its_own_devices_only_whatever_it_says_to_hold(
    leases: RedisLeases, held: Held
) -> None:
    own = [replace(device("b", n), held=held, leftovers=MOST_LEFT) for n in range(2)]
    others = [replace(device("a", n), index=n + 5, held=held) for n in range(2)]
    before = await leases.snapshot()

    await leases.save_devices([report("b", own, at=1)])
    await leases.save_devices([report("b", [*own, *others], at=2)])
    wanted = [reservation(f"a{n}", share("a", n, 16_000)) for n in range(2)]
    there = await reserve(leases, *wanted)
    [outcome] = await leases.reserve(
        [reservation("b", share("b", 0, 16_000), node="b")], now=NOW, ttl_s=30
    )
    await leases.save_devices([report("b", [device("b", n) for n in range(2)], at=100)])
    again = await reserve(leases, reservation("c", share("b", 1, 16_000), node="b"))

    assert [lease.node for lease in (*there, *again)] == ["a", "a", "b"]
    holds_nothing = held in (Held(), Held(layout=held.layout), Held(slots=held.slots))
    assert isinstance(outcome, ReservedLease) == holds_nothing, outcome
    assert (await leases.snapshot()).capacity >= before.capacity
    await assert_sound(leases)


async def test_reports_that_change_all_the_time_take_no_more_of_the_feed_than_others(
    url: str,
) -> None:
    entries = 200
    async with ledger(url, {"a": 1}, feed_length=entries) as leases:
        for at in range(2 * entries):
            left = replace(MOST_LEFT[0], memory_mib=at)
            large = replace(device("a", 0), leftovers=(left, *MOST_LEFT[1:]))
            await leases.save_devices([report("a", [large], at=at)])
        async with redis.asyncio.from_url(url) as client:
            names = [key async for key in client.scan_iter("*feed")]
            taken = await client.memory_usage(names[-1], samples=0) or 0

    assert taken < 2 * entries * 4096

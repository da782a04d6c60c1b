"""What an agent has given out beyond the leases is placed nowhere, and is in no total of leases."""

from dataclasses import replace

import pytest
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.device import Held
from shared.model.lease import Lease, LeaseState
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    device,
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

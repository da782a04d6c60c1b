"""A device has one sharing mode at a time: the ledger lets the first lease decide on it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.devices.device import Held
from shared.model.devices.enforcers import HAMI_CORE_ALONE, HeldBy, Offer
from shared.model.leases.ledger import LedgerNode, NoCapacity, ReservedLease
from shared.model.names import PodUid
from shared.model.requests.placement import Placement
from shared.placing.trial_cluster import TrialCluster
from tests.support.build import gpu, request
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    device,
    rebuild,
    refusal,
    report,
    reservation,
    reservation_among,
    reserve,
    share,
    uses,
)

BOTH = Offer(memory=("driver", "hami-core"), compute=("time", "hami-core"))
CARDS = [device("a", number, offer=BOTH) for number in range(2)]
UUID = CARDS[0].uuid


def in_mode(mode: Any, number: int = 0) -> Any:
    return share("a", number, mib=1_000, mode=mode)


async def test_of_two_placers_with_different_modes_one_wins_and_the_other_places_elsewhere(
    leases: RedisLeases,
) -> None:
    await leases.save_devices([report("a", CARDS, at=10)])
    demands = {"time": HeldBy(compute="time"), "driver": HeldBy(memory="driver")}
    for number in range(20):
        tried = []
        for name, demand in demands.items():
            placer = TrialCluster(await nodes_of(leases))
            wanted = request(gpu("main", 1, 1_000, held_by=demand), triggers=(), resources={})
            placement = placer.place(PodUid(name), wanted)
            assert isinstance(placement, Placement)
            candidates = [("a", moved(placement, other)) for other in range(2)]
            tried.append(reservation_among(f"{name}-{number}", candidates))

        outcomes = await asyncio.gather(
            *(leases.reserve([wanted], now=NOW, ttl_s=30) for wanted in tried)
        )

        devices = {
            outcome.lease.shares[0].device
            for [outcome] in outcomes
            if isinstance(outcome, ReservedLease)
        }
        assert devices == {card.uuid for card in CARDS}, "each mode has a device of its own"
        used = await uses(leases)
        assert {used[uuid].mode for uuid in devices} == {"time", "driver"}
        await assert_sound(leases)
        await leases.release([wanted.pod for wanted in tried], reason="test")


async def test_with_one_idle_device_one_of_two_modes_is_refused(leases: RedisLeases) -> None:
    for number in range(20):
        tried = [reservation(f"{mode}-{number}", in_mode(mode)) for mode in ("time", "driver")]

        outcomes = await asyncio.gather(
            *(leases.reserve([wanted], now=NOW, ttl_s=30) for wanted in tried)
        )

        refused = [outcome.reason for [outcome] in outcomes if isinstance(outcome, NoCapacity)]
        assert refused == [f"a: sharing-mode of {UUID}"]
        await assert_sound(leases)
        await leases.release([wanted.pod for wanted in tried], reason="test")


def moved(placement: Placement, number: int) -> list[Any]:
    """Return the shares of a placement on another device of the node."""
    return [
        structs.replace(share, device=CARDS[number].uuid, index=number)
        for share in placement.shares
    ]


async def nodes_of(leases: RedisLeases) -> list[LedgerNode]:
    return [account.node async for page in leases.totals.pages() for account in page]


async def test_the_mode_changes_once_the_last_lease_has_ended(leases: RedisLeases) -> None:
    await reserve(leases, reservation("one", in_mode("driver")))
    await reserve(leases, reservation("two", in_mode("driver")))

    other = reservation("other", in_mode("time"))
    assert f"sharing-mode of {UUID}" in (await refusal(leases, other)).reason
    await leases.release([PodUid("one")], reason="test")
    assert f"sharing-mode of {UUID}" in (await refusal(leases, other)).reason
    assert (await uses(leases))[UUID].mode == "driver"
    await leases.release([PodUid("two")], reason="test")

    assert (await uses(leases))[UUID].mode == ""
    await reserve(leases, other)
    assert (await uses(leases))[UUID].mode == "time"
    await assert_sound(leases)


async def test_the_mode_survives_a_rebuild_of_the_ledger(leases: RedisLeases) -> None:
    granted = await reserve(leases, reservation("one", in_mode("driver")))
    bound = [lease for lease in await leases.bind(granted) if not isinstance(lease, Exception)]

    await rebuild(leases, {"a": 2}, bound, force=True)

    assert (await uses(leases))[UUID].mode == "driver"
    assert "sharing-mode" in (await refusal(leases, reservation("x", in_mode("time")))).reason
    await reserve(leases, reservation("y", in_mode("driver")))


async def test_the_mode_survives_reports_of_agents_that_start_again(leases: RedisLeases) -> None:
    """Also of one that finds a driver which holds nothing, or no device at all for a while."""
    await leases.save_devices([report("a", CARDS, at=10)])
    await reserve(leases, reservation("one", in_mode("driver")))

    for at, cards in enumerate(
        (
            CARDS,
            [replace(CARDS[0], offer=HAMI_CORE_ALONE)],
            [replace(CARDS[0], healthy=False)],
            CARDS,
        ),
        start=20,
    ):
        await leases.save_devices([report("a", cards, at=at)])
        assert (await uses(leases))[UUID].mode == "driver"

    assert "sharing-mode" in (await refusal(leases, reservation("x", in_mode("time")))).reason
    await leases.release([PodUid("one")], reason="test")
    assert (await uses(leases))[UUID].mode == ""


async def test_a_lease_of_another_mode_is_not_restored(leases: RedisLeases) -> None:
    granted = await reserve(leases, reservation("one", in_mode("driver")))
    [bound] = await leases.bind(granted)
    assert not isinstance(bound, Exception)
    other = structs.replace(
        bound,
        pod=PodUid("other"),
        shares=(structs.replace(in_mode("time"), slot=3, fence=bound.shares[0].fence + 1),),
    )

    [(_, reason)] = await leases.restore([other], now=NOW)

    assert reason == "sharing-mode"
    await assert_sound(leases)


@pytest.mark.parametrize(("mode", "fits"), [("driver", True), ("hami-core", False)])
async def test_what_an_agent_holds_beyond_leases_has_its_mode(
    leases: RedisLeases, mode: Any, fits: bool
) -> None:
    held = Held(memory_mib=100, shares=1, mode="driver")
    await leases.save_devices([report("a", [replace(CARDS[0], held=held)], at=10)])

    [outcome] = await leases.reserve([reservation("p", in_mode(mode))], now=NOW, ttl_s=30)

    assert isinstance(outcome, ReservedLease) is fits
    if isinstance(outcome, NoCapacity):
        assert "sharing-mode" in outcome.reason

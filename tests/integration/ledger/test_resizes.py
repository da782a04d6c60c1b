"""Leases that change their size in the ledger while other clients write to it."""

import asyncio
import random
from dataclasses import replace

import pytest
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.errors import ConflictError
from shared.model.fair_share import GpuAmount
from shared.model.lease import Lease, ShareSize, StaleLeaseError, bookings
from shared.model.ledger import NoCapacity, Reserved
from shared.model.names import Namespace, PodUid
from shared.model.quota import Quota, QuotaExcess, QuotaLimits
from tests.support.placer.gangs import charge_of
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    device,
    queued,
    report,
    reservation,
    reserve,
    share,
    uses,
    uuid,
    verdict,
)
from tests.support.waiting import until

TEAM = Namespace("default")


async def running(leases: RedisLeases, pod: str = "p", mib: int = 4_000, gpu: int = 0) -> Lease:
    """Return the lease of a pod that runs."""
    [lease] = await reserve(leases, reservation(pod, share("a", gpu, mib)))
    await leases.bind([lease])
    [active] = await leases.activate([(lease.pod, lease.node)])
    assert active is not None
    return active


def sized(lease: Lease, mib: int, cores: int = 0) -> Lease:
    was = ShareSize(
        memory_mib=lease.shares[0].memory_mib, cores_percent=lease.shares[0].cores_percent
    )
    return structs.replace(
        lease,
        shares=tuple(
            structs.replace(
                each, memory_mib=mib, cores_percent=cores, requested_size=each.requested_size or was
            )
            for each in lease.shares
        ),
    )


async def assert_fair_share(leases: RedisLeases) -> None:
    """Check that what namespaces are counted to hold is what their leases take."""
    held = await assert_sound(leases)
    taken = [booking for lease in held for booking in bookings(lease.shares)]
    summed = GpuAmount(
        cores_percent=sum(each.cores_percent for each in taken),
        memory_mib=sum(each.memory_mib for each in taken),
    )
    assert (await leases.totals.fair_share()).used.get(TEAM, GpuAmount()) == summed


async def lock_of(leases: RedisLeases, pod: PodUid) -> str:
    token = await leases.resizes.lock(pod, ttl_s=60)
    assert token is not None
    return token


async def test_a_lease_keeps_its_slot_and_fence_and_rises_in_version(leases: RedisLeases) -> None:
    before = await running(leases)

    after = await leases.resizes.apply(sized(before, 6_000, 30))

    assert isinstance(after, Lease)
    assert after.shares == sized(before, 6_000, 30).shares
    assert after == structs.replace(
        before, shares=after.shares, version=after.version, resized_at=after.resized_at
    )
    assert after.version > before.version
    assert after.resized_at * 1000 == round(after.resized_at * 1000)
    assert await leases.load([before.pod]) == [after]
    assert await assert_sound(leases) == [after]
    again = await leases.resizes.apply(sized(after, 2_000))
    assert isinstance(again, Lease)
    assert again.resized_at > after.resized_at
    assert again.shares[0].requested_size == ShareSize(memory_mib=4_000, cores_percent=0)
    assert await assert_sound(leases) == [again]
    await assert_fair_share(leases)


async def test_a_size_that_does_not_fit_changes_nothing(leases: RedisLeases) -> None:
    lease = await running(leases)
    await running(leases, "q", 9_000)

    too_much = await leases.resizes.apply(sized(lease, 7_001))
    too_many = await leases.resizes.apply(sized(lease, 4_000, 101))
    fits = await leases.resizes.apply(sized(lease, 7_000, 100))

    assert isinstance(too_much, NoCapacity)
    assert too_much.reason == f"memory of {uuid('a', 0)}"
    assert too_much.devices[uuid("a", 0)].memory_mib == 13_000
    assert isinstance(too_many, NoCapacity)
    assert too_many.reason.startswith("cores")
    assert isinstance(fits, Lease)
    await assert_sound(leases)


async def test_a_lease_on_an_unhealthy_device_can_shrink_and_not_grow(leases: RedisLeases) -> None:
    lease = await running(leases)
    unhealthy = replace(device("a", 0), healthy=False)
    await leases.save_devices([report("a", [unhealthy, device("a", 1)], at=1.0)])

    more = await leases.resizes.apply(sized(lease, 5_000))
    less = await leases.resizes.apply(sized(lease, 3_000))

    assert isinstance(more, NoCapacity)
    assert more.reason.startswith("device-unhealthy")
    assert isinstance(less, Lease)


async def test_the_sizes_of_several_shares_change_together(leases: RedisLeases) -> None:
    [lease] = await reserve(leases, reservation("p", share("a", 0), share("a", 1), share("a", 1)))
    await leases.bind([lease])
    [active] = await leases.activate([(lease.pod, lease.node)])
    assert active is not None
    await running(leases, "q", 4_000, gpu=1)

    refused = await leases.resizes.apply(sized(active, 6_001))
    done = await leases.resizes.apply(sized(active, 6_000))

    assert isinstance(refused, NoCapacity)
    assert isinstance(done, Lease)
    taken = await uses(leases)
    assert [taken[uuid("a", gpu)].memory_mib for gpu in (0, 1)] == [6_000, 16_000]
    await assert_sound(leases)


async def test_a_resize_of_a_stale_or_ended_lease_changes_nothing(leases: RedisLeases) -> None:
    lease = await running(leases)
    await leases.resizes.apply(sized(lease, 5_000))

    stale = await leases.resizes.apply(sized(lease, 6_000))
    await leases.release([lease.pod], reason="over")
    ended = await leases.resizes.apply(sized(lease, 6_000))

    assert isinstance(stale, StaleLeaseError)
    assert stale.stored
    assert isinstance(ended, StaleLeaseError)
    assert ended.stored is None
    assert await assert_sound(leases) == []


async def test_a_lease_shrinks_only_while_its_lock_is_held(leases: RedisLeases) -> None:
    lease = await running(leases)
    token = await leases.resizes.lock(lease.pod, ttl_s=0.05)
    assert token is not None
    assert await leases.resizes.lock(lease.pod, ttl_s=60) is None
    other = await until(lambda: leases.resizes.lock(lease.pod, ttl_s=60))

    with pytest.raises(ConflictError, match="has expired"):
        await leases.resizes.apply(sized(lease, 3_000), token=token)
    await leases.resizes.unlock(lease.pod, token)
    done = await leases.resizes.apply(sized(lease, 3_000), token=other)

    assert isinstance(done, Lease)
    assert await leases.resizes.lock(lease.pod, ttl_s=60), "what was done ends the turn"


async def test_of_twenty_concurrent_resizes_of_one_lease_one_succeeds(leases: RedisLeases) -> None:
    lease = await running(leases)

    answers = await asyncio.gather(
        *(leases.resizes.apply(sized(lease, 1_000 + 500 * n)) for n in range(20))
    )

    (done,) = (each for each in answers if isinstance(each, Lease))
    assert sum(isinstance(each, StaleLeaseError) for each in answers) == 19
    assert await assert_sound(leases) == [done]


async def test_twenty_writers_that_resize_reserve_and_release_never_over_commit(
    leases: RedisLeases,
) -> None:
    async def write(writer: int) -> None:
        chance = random.Random(writer)  # noqa: S311
        for step in range(8):
            wanted = reservation(f"{writer}-{step}", share("a", chance.randint(0, 1), 2_000))
            [outcome] = await leases.reserve([wanted], now=NOW, ttl_s=30)
            if not isinstance(outcome, Reserved):
                continue
            await leases.bind([outcome.lease])
            [lease] = await leases.activate([(outcome.lease.pod, outcome.lease.node)])
            for _ in range(3):
                assert lease is not None
                changed = await leases.resizes.apply(
                    sized(lease, chance.choice([500, 3_000, 9_000]), chance.choice([0, 40]))
                )
                lease = changed if isinstance(changed, Lease) else lease
            if chance.random() < 0.7:
                await leases.release([outcome.lease.pod], reason="test")

    async with asyncio.TaskGroup() as tasks:
        for writer in range(20):
            tasks.create_task(write(writer))

    for use in (await uses(leases)).values():
        assert use.memory_mib <= 16_000
        assert use.cores_percent <= 100
    await assert_fair_share(leases)


async def test_what_a_smaller_lease_frees_is_offered_to_waiting_pods(leases: RedisLeases) -> None:
    lease = await running(leases, mib=15_000)
    await running(leases, "q", 15_000, gpu=1)
    waiting = queued("w", units=8_000)
    await leases.waiting_pods.enqueue([verdict(waiting, await leases.capacity())])
    assert not (await leases.waiting_pods.choose_offers(now=NOW)).pods

    await leases.resizes.apply(sized(lease, 8_000))

    assert [pod.pod for pod in (await leases.waiting_pods.choose_offers(now=NOW)).pods] == ["w"]


async def test_a_quota_counts_the_new_size(leases: RedisLeases) -> None:
    quota = Quota(namespace=TEAM, limits=QuotaLimits(memory_mib=6_000))
    await leases.quotas.save([quota], read_at=NOW)
    lease = await running(leases)

    over = await leases.resizes.apply(sized(lease, 6_001))
    within = await leases.resizes.apply(sized(lease, 6_000))

    assert isinstance(over, NoCapacity)
    assert over.reason == "quota"
    assert over.quotas == (QuotaExcess(measure="memoryMiB", limit=6_000, used=0, requested=6_001),)
    assert isinstance(within, Lease)
    accounts = await leases.quotas.totals()
    assert accounts.used[TEAM][""] == charge_of(within, {uuid("a", 0): 16_000})
    assert accounts.charges[lease.pod] == (TEAM, {"": accounts.used[TEAM][""]})


async def test_a_lease_can_shrink_while_its_namespace_exceeds_its_quota(
    leases: RedisLeases,
) -> None:
    lease = await running(leases)
    quota = Quota(namespace=TEAM, limits=QuotaLimits(memory_mib=1_000, cores_milli=500))
    await leases.quotas.save([quota], read_at=NOW)

    less = await leases.resizes.apply(sized(lease, 3_000, 20))

    assert isinstance(less, Lease)
    held = (await leases.quotas.totals()).used[TEAM][""]
    assert (held.memory_mib, held.cores_milli) == (3_000, 200)


async def test_resized_leases_are_unsynced_until_their_last_size_is_applied(
    leases: RedisLeases,
) -> None:
    first = await leases.resizes.apply(sized(await running(leases), 5_000))
    assert isinstance(first, Lease)
    second = await leases.resizes.apply(sized(first, 6_000))
    assert isinstance(second, Lease)

    assert await leases.resizes.unsynced(older_than_s=3600) == []
    assert not await leases.resizes.set_synced(first.pod, first.version)
    assert await leases.resizes.unsynced(older_than_s=0) == [first.pod]
    assert await leases.resizes.set_synced(first.pod, second.version)
    assert await leases.resizes.unsynced(older_than_s=0) == []


async def test_a_rebuild_restores_the_new_size(leases: RedisLeases) -> None:
    lease = await leases.resizes.apply(sized(await running(leases), 5_000))
    assert isinstance(lease, Lease)
    token = await leases.begin_rebuild(now=NOW + 5, force=True)
    assert token

    assert await leases.restore([lease], now=NOW + 5, token=token) == []
    await leases.resizes.set_unsynced([lease])
    assert await leases.finish_rebuild(token)

    assert await leases.load([lease.pod]) == [lease]
    assert await leases.resizes.unsynced(older_than_s=0) == [lease.pod]

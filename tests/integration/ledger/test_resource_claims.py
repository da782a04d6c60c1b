"""Leases of ResourceClaims, and what preemptions claim for a pod: on a real server."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from services.placer.service import Placer
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.budgets.quota import Quota, QuotaLimits
from shared.model.clock import SystemClock
from shared.model.events.pod_events import PlacementChosen, PlacementRefused
from shared.model.leases.lease import ClaimAllocation, Lease, LeaseState
from shared.model.leases.lease_copy import dump_lease, load_lease
from shared.model.leases.ledger import Reservation, ReservedLease, counted_use
from shared.model.leases.preemption import Preemption
from shared.model.names import Namespace, NodeName, PodUid
from tests.support.build import dice, gpu, pod_queued, request
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    rebuild,
    refusal,
    reservation,
    reserve,
    share,
    uuid,
)
from tests.support.servers.valkey import ValkeyServer
from tests.support.waiting import until

pytestmark = pytest.mark.nodes(a=3)


@pytest.fixture
async def preemptions(server: ValkeyServer, leases: RedisLeases) -> AsyncIterator[Preemptions]:
    async with Preemptions.connect(server.url, prefix=leases._connection.prefix) as opened:
        yield opened


def preemption(pod: str, *gpus: int, mib: int = 8_000, cpu: int = 100) -> Preemption:
    return Preemption(
        id=pod,
        victims=(),
        wanted=(reservation(pod, *(share("a", n, mib=mib) for n in gpus), cpu=cpu),),
    )


async def test_a_pod_and_a_device_are_claimed_once(
    leases: RedisLeases, preemptions: Preemptions
) -> None:
    assert await preemptions.open(preemption("p", 0, 1))

    assert not await preemptions.open(preemption("p", 2))
    assert not await preemptions.open(preemption("q", 1, 2))
    assert await preemptions.open(preemption("q", 2))
    await refusal(leases, reservation("r", share("a", 0)))
    await reserve(leases, reservation("p", share("a", 0), share("a", 1)))
    await reserve(leases, reservation("r", share("a", 0)))


async def test_placers_refuse_claimed_devices_with_the_reason(
    leases: RedisLeases, preemptions: Preemptions
) -> None:
    for number in range(3):
        await preemptions.open(preemption(f"p{number}", number))
    placer = Placer(leases, SystemClock(), dice(), ttl_s=30)
    following = asyncio.create_task(placer.follow_ledger())
    try:
        await until(lambda: not placer.unready_reason(), limit_s=30)
        other = pod_queued("other", request(gpu(memory=1_000), resources={"cpu": 100, "pods": 1}))

        [answer] = await placer.place_pods([other])
        assert isinstance(answer, PlacementRefused)
        assert "reserved for another pod" in answer.refusal.reason

        affairs = await preemptions.state(now=NOW)
        assert await preemptions.close(affairs.open[0])
        (answer,) = await until(
            lambda: placer.place_pods([other]),
            lambda answers: answers and isinstance(answers[0], PlacementChosen),
        )
        assert answer.lease.shares[0].device == uuid("a", 0)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize("seed", range(4))
async def test_totals_are_always_the_sum_of_leases_and_claims(
    leases: RedisLeases, preemptions: Preemptions, seed: int
) -> None:
    chance = random.Random(seed)  # noqa: S311
    pods = [f"p{number}" for number in range(10)]
    claims: dict[str, tuple[int, ...]] = {}
    for now in range(60):
        pod = chance.choice(pods)
        gpus = tuple(chance.sample(range(3), chance.randint(1, 2)))
        mine = {n for other, held in claims.items() if other != pod for n in held}
        what = chance.randrange(5)
        if what == 0:
            if await preemptions.open(preemption(pod, *gpus, cpu=chance.choice([100, 40_000]))):
                assert not mine & set(gpus)
                claims[pod] = gpus
        elif what == 1:
            wanted = reservation(pod, *(share("a", n, mib=6_000) for n in gpus), cpu=20_000)
            [outcome] = await leases.reserve([wanted], now=float(now), ttl_s=20)
            if isinstance(outcome, ReservedLease):
                assert not mine & set(gpus)
                claims.pop(pod, None)
        elif what == 2:
            await leases.release([PodUid(pod)], reason="over")
        elif what == 3:
            await leases.expire(float(now))
        else:
            for read in (await preemptions.state(now=NOW)).open:
                if read.preemption.id == pod:
                    assert await preemptions.close(read)
                    claims.pop(pod, None)
        await _sound(leases, claims)


async def _sound(leases: RedisLeases, claims: dict[str, tuple[int, ...]]) -> None:
    claimed = {uuid("a", n) for held in claims.values() for n in held}
    kept = (await leases.totals.claimed()).get(NodeName("a"), {})
    [[account]] = [page async for page in leases.totals.pages()]
    devices, nodes = counted_use(account.leases)
    summed = nodes.get(account.node.facts.name, {})
    for name in ("cpu", "pods"):
        assert account.node.used.get(name, 0) == summed.get(name, 0) + kept.get(name, 0)
        assert account.node.used.get(name, 0) <= account.node.facts.allocatable[name]
    for device, use in account.node.devices:
        assert use.claimed_by is (device.uuid in claimed)
        assert use.memory_mib == (devices[device.uuid].memory_mib if device.uuid in devices else 0)


async def test_nothing_is_claimed_beyond_the_quota_of_the_namespace(
    leases: RedisLeases, preemptions: Preemptions
) -> None:
    small = Quota(namespace=Namespace("default"), limits=QuotaLimits(memory_mib=4_000))
    await leases.quotas.save([small], read_at=NOW)

    assert not await preemptions.open(preemption("p", 0, mib=8_000))
    assert await preemptions.open(preemption("p", 0, mib=4_000))


def claimed(mib: int = 10_000) -> Reservation:
    shares = [
        share("a", gpu, mib, container=request, share_id=f"share-{request}")
        for gpu, request in enumerate(("one", "two"))
    ]
    allocation = ClaimAllocation(generation="g1", consumers=(PodUid("p1"), PodUid("p2")))
    return structs.replace(reservation("claim", *shares, cpu=0), claim=allocation, dialect="")


async def test_a_claims_lease_keeps_its_allocation_in_every_state(leases: RedisLeases) -> None:
    [reserved] = await reserve(leases, claimed())
    [bound] = await leases.bind([reserved])
    [active] = await leases.activate([(reserved.pod, reserved.node)])

    assert isinstance(active, Lease)
    for lease in (reserved, bound, active, *await leases.load([PodUid("claim")])):
        assert not isinstance(lease, Exception)
        assert lease
        assert lease.claim == claimed().claim
        assert [each.share_id for each in lease.shares] == ["share-one", "share-two"]
        assert lease.shares_of("two")[0].fence > 0
    await assert_sound(leases)


async def test_a_claim_gets_nothing_that_a_pod_has(leases: RedisLeases) -> None:
    await reserve(leases, reservation("pod", share("a", 1, 8_000)))

    outcome = await refusal(leases, claimed())

    assert "memory" in outcome.reason
    [lease] = await assert_sound(leases)
    assert lease.pod == "pod"


async def test_a_claims_lease_is_restored_from_its_copy(leases: RedisLeases) -> None:
    [reserved] = await reserve(leases, claimed())
    [bound] = await leases.bind([reserved])
    assert isinstance(bound, Lease)
    copy = load_lease(dump_lease(bound), namespace=bound.namespace, name=bound.name)
    await rebuild(leases, kept=[copy], now=NOW + 60, force=True)

    [restored] = await leases.load([PodUid("claim")])
    assert restored
    assert restored.state is LeaseState.BOUND
    assert (restored.claim, restored.shares) == (bound.claim, bound.shares)


async def test_the_consumers_of_a_lease_change_and_nothing_else(leases: RedisLeases) -> None:
    [reserved] = await reserve(leases, claimed())
    [bound] = await leases.bind([reserved])
    assert isinstance(bound, Lease)

    changed = await leases.claims.set_consumers(bound, [PodUid("p3")])

    assert changed
    assert changed.version > bound.version
    expected = ClaimAllocation(generation="g1", consumers=(PodUid("p3"),))
    assert changed == structs.replace(bound, version=changed.version, claim=expected)
    assert await leases.load([PodUid("claim")]) == [changed]
    assert await leases.claims.set_consumers(bound, [PodUid("p4")]) is None
    await assert_sound(leases)


async def test_a_deallocated_claims_lease_vanishes_only_as_it_was_read(
    leases: RedisLeases,
) -> None:
    [reserved] = await reserve(leases, claimed())
    [bound] = await leases.bind([reserved])
    assert isinstance(bound, Lease)

    assert await leases.claims.mark_deallocated([reserved]) == [False]
    assert await leases.load_vanished() == []
    assert await leases.claims.mark_deallocated([bound]) == [True]
    assert await leases.load_vanished() == [bound]

    await leases.release([bound.pod], reason="not prepared", version=bound.version)
    [again] = await reserve(leases, claimed())
    assert again.pod == bound.pod
    assert await leases.load_vanished() == []
    await assert_sound(leases)

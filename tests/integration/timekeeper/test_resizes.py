"""What a lease is charged that changes its size: each size for exactly as long as it was held."""

from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from msgspec import structs

from shared.model.lease import Lease
from shared.model.names import Namespace
from tests.support.placer.ledger import rebuild, reservation, reserve, share
from tests.support.servers.valkey import ValkeyServer
from tests.support.timekeeper.accounts import T0, TEAM, AccountLedger, account_ledger, budget, lease

DEFAULT = Namespace("default")
WHOLE, HALF, QUARTER = 1_000, 500, 250


@pytest.fixture
async def opened(server: ValkeyServer) -> AsyncIterator[AccountLedger]:
    async with account_ledger(server.url, budget(None)) as found:
        yield found


def sized(was: Lease, mib: int, resized_ms: int) -> Lease:
    """Return a lease as it is after a resize at an instant."""
    return structs.replace(
        was,
        shares=tuple(structs.replace(each, memory_mib=mib) for each in was.shares),
        resized_at=resized_ms / 1000,
        version=was.version + 1,
    )


async def rebuilt(found: AccountLedger, *leases: Lease, at_ms: int) -> None:
    """Have the ledger lose everything, and be built anew from these."""
    await rebuild(found.leases, {"a": 4}, kept=leases, now=at_ms / 1000, force=True)


async def total(found: AccountLedger, namespace: Namespace = TEAM) -> int:
    return sum(entry.units for entry in await found.charges(namespace))


@pytest.mark.parametrize("ticks", [1, 7, 300])
async def test_each_size_is_charged_to_the_millisecond_whatever_the_ticks(
    opened: AccountLedger, ticks: int
) -> None:
    small = lease("p")
    large = sized(small, 16_000, T0 + 61_337)
    last = sized(large, 4_000, T0 + 61_338)
    story = [
        (T0, "held", small),
        (T0 + 61_337, "ended", small),
        (T0 + 61_337, "held", large),
        (T0 + 61_338, "ended", large),
        (T0 + 61_338, "held", last),
        (T0 + 100_001, "ended", last),
    ]
    replicas = [opened.timekeeper(charge_every_s=0) for _ in range(3)]
    for tick in range(1, ticks + 1):
        at = T0 + 120_000 * tick // ticks
        while story and story[0][0] <= at:
            when, kind, pod = story.pop(0)
            await opened.journal(kind, when, pod)
        await opened.count(at, keeper=replicas[tick % 3])
        await opened.count(at, keeper=replicas[(tick + 1) % 3])

    assert await total(opened) == 61_337 * HALF + 1 * WHOLE + (100_001 - 61_338) * QUARTER


async def test_sizes_in_the_ledgers_journal_have_no_gap_and_no_overlap(
    opened: AccountLedger,
) -> None:
    timekeeper = opened.timekeeper(charge_every_s=0, store=opened.store)
    [reserved] = await reserve(opened.leases, reservation("p", share("a", 0, 8_000)))
    [bound] = await opened.leases.bind([reserved])
    assert isinstance(bound, Lease)
    await timekeeper.count()
    (first,) = (await opened.account(DEFAULT)).leases
    larger = structs.replace(bound, shares=(structs.replace(bound.shares[0], memory_mib=16_000),))
    resized = await opened.leases.resizes.apply(larger)
    assert isinstance(resized, Lease)
    await timekeeper.count()
    (second,) = (await opened.account(DEFAULT)).leases
    await opened.leases.release([bound.pod], reason="over")
    await timekeeper.count()

    entries = sorted(await opened.charges(DEFAULT), key=lambda entry: entry.from_ms)
    split = round(resized.resized_at * 1000)
    assert (first.weight, second.weight) == (HALF, WHOLE)
    assert second.since_ms == split
    assert {(e.lease, e.weight) for e in entries} <= {(first.id, HALF), (second.id, WHOLE)}
    for before, after in pairwise(entries):
        assert before.to_ms == after.from_ms
    halves = [e for e in entries if e.lease == first.id]
    assert not halves or halves[-1].to_ms == split
    assert sum(e.units for e in entries) == sum((e.to_ms - e.from_ms) * e.weight for e in entries)


async def test_a_resize_missing_from_the_journal_is_charged_from_the_time_in_its_lease(
    opened: AccountLedger,
) -> None:
    """The journal is lost; the lease itself has the time of its resize."""
    [reserved] = await reserve(opened.leases, reservation("p", share("a", 0, 8_000)), now=T0 / 1000)
    [bound] = await opened.leases.bind([reserved])
    assert isinstance(bound, Lease)
    await opened.count(T0 + 10_000)
    resized = sized(bound, 16_000, T0 + 30_000)
    (first,) = (await opened.account(DEFAULT)).leases
    await rebuilt(opened, resized, at_ms=T0 + 40_000)

    for at in (T0 + 50_000, T0 + 60_000):
        await opened.count(at, keeper=opened.timekeeper(charge_every_s=0))

    half = (T0 + 30_000 - first.since_ms) * HALF
    assert await total(opened, DEFAULT) == half + 30_000 * WHOLE


async def test_a_resize_lost_with_the_ledger_is_charged_until_the_loss(
    opened: AccountLedger,
) -> None:
    """What comes back is the lease before its resize: no time of it is charged twice."""
    was = lease("p")
    await opened.journal("held", T0, was)
    await opened.count(T0 + 5_000)
    await opened.journal("ended", T0 + 10_000, was)
    await opened.journal("held", T0 + 10_000, sized(was, 16_000, T0 + 10_000))
    await opened.count(T0 + 20_000, keeper=opened.timekeeper(charge_every_s=0))
    await rebuilt(opened, was, at_ms=T0 + 20_000)

    timekeeper = opened.timekeeper(charge_every_s=0)
    for at in (T0 + 30_000, T0 + 40_000):
        await opened.count(at, keeper=timekeeper)

    entries = sorted(await opened.charges(), key=lambda entry: entry.from_ms)
    for before, after in pairwise(entries):
        assert before.to_ms == after.from_ms
    assert sum(e.units for e in entries) == 10_000 * HALF + 10_000 * WHOLE + 20_000 * HALF

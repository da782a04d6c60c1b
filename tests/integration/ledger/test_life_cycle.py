"""Every operation on a lease in every state, on a real server, against the table of transitions."""

from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.ledger.script_sources import reachable
from shared.model.lease import LIVE, TRANSITIONS, Lease, LeaseState
from shared.model.ledger import AlreadyLeased, Reserved
from tests.support.placer.ledger import NOW, assert_sound, ledger, reservation, reserve, share
from tests.support.servers.valkey import ValkeyServer

RESERVED, BOUND, ACTIVE, RELEASED, EXPIRED = LeaseState
LATER = NOW + 31
PAIRS = [(state, to) for state in LeaseState for to in LeaseState]


@pytest.fixture
async def leases(server: ValkeyServer) -> AsyncIterator[RedisLeases]:
    await server.ready()
    async with ledger(server.url) as opened:
        yield opened


async def lease_in(state: LeaseState, leases: RedisLeases) -> Lease:
    """Bring a lease to a state, by the shortest way."""
    [lease] = await reserve(leases, reservation("p", share("a")))
    for step in {
        RESERVED: [],
        BOUND: [BOUND],
        ACTIVE: [BOUND, ACTIVE],
        RELEASED: [RELEASED],
        EXPIRED: [EXPIRED],
    }[state]:
        lease = await moved(lease, step, leases)
    assert lease.state is state
    return lease


async def moved(lease: Lease, to: LeaseState, leases: RedisLeases) -> Lease:
    """Try to move a lease on; return it as it is after that."""
    if to is BOUND:
        await leases.bind([lease])
    elif to is ACTIVE:
        await leases.activate([(lease.pod, lease.node)])
    ended: list[Lease] = []
    if to is RELEASED:
        ended = await leases.release([lease.pod], reason="test")
    elif to is EXPIRED:
        ended = await leases.expire(LATER)
    [stored] = [*ended, *(found for found in await leases.load([lease.pod]) if found)] or [lease]
    return stored


@pytest.mark.parametrize(("state", "to"), [pair for pair in PAIRS if pair[1] is not RESERVED])
async def test_an_operation_moves_a_lease_where_the_table_allows_and_nowhere_else(
    leases: RedisLeases, state: LeaseState, to: LeaseState
) -> None:
    before = await lease_in(state, leases)

    after = await moved(before, to, leases)

    if to in TRANSITIONS[state]:
        assert after.state is to
        assert after.version > before.version
    else:
        assert after == before
    assert bool(await assert_sound(leases)) is (after.state in LIVE)


@pytest.mark.parametrize("state", LeaseState)
async def test_only_a_pod_without_a_live_lease_gets_another_one(
    leases: RedisLeases, state: LeaseState
) -> None:
    before = await lease_in(state, leases)

    [outcome] = await leases.reserve([reservation("p", share("a"))], now=LATER, ttl_s=30)

    assert isinstance(outcome, Reserved | AlreadyLeased)
    if state in LIVE:
        assert outcome == AlreadyLeased(lease=before)
    else:
        assert isinstance(outcome, Reserved)
        assert outcome.lease.version > before.version


@pytest.mark.parametrize(("state", "to"), [pair for pair in PAIRS if {*pair} <= LIVE])
async def test_a_restored_lease_only_moves_forward_along_the_table(
    leases: RedisLeases, state: LeaseState, to: LeaseState
) -> None:
    before = await lease_in(state, leases)

    assert await leases.restore([structs.replace(before, state=to)], now=NOW) == []

    [after] = await leases.load([before.pod])
    assert after
    assert after.state is (to if to in reachable()[state] else state)
    assert (after == before) is (after.state is state)


@pytest.mark.parametrize("state", sorted(LIVE))
async def test_a_resize_leaves_the_state_as_it_is(leases: RedisLeases, state: LeaseState) -> None:
    before = await lease_in(state, leases)
    shares = tuple(structs.replace(each, memory_mib=5_000) for each in before.shares)

    after = await leases.resizes.apply(structs.replace(before, shares=shares))

    assert isinstance(after, Lease)
    assert after.state is state

"""Leases of ResourceClaims: as those of pods, with the claim's allocation, on a real server."""

from dataclasses import replace

from msgspec import structs

from shared.model.lease import ClaimAllocation, Lease, LeaseState
from shared.model.lease_copy import dump_lease, load_lease
from shared.model.ledger import NoCapacity, Reservation
from shared.model.names import PodUid
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    ledger,
    reservation,
    reserve,
    share,
)
from tests.support.servers.valkey import ValkeyServer


def claimed(mib: int = 10_000) -> Reservation:
    shares = [
        share("a", gpu, mib, container=request, share_id=f"share-{request}")
        for gpu, request in enumerate(("one", "two"))
    ]
    allocation = ClaimAllocation(generation="g1", consumers=(PodUid("p1"), PodUid("p2")))
    return replace(reservation("claim", *shares, cpu=0), claim=allocation, dialect="")


async def test_a_claims_lease_keeps_its_allocation_in_every_state(server: ValkeyServer) -> None:
    await server.ready()
    async with ledger(server.url) as leases:
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


async def test_a_claim_gets_nothing_that_a_pod_has(server: ValkeyServer) -> None:
    await server.ready()
    async with ledger(server.url) as leases:
        await reserve(leases, reservation("pod", share("a", 1, 8_000)))

        [outcome] = await leases.reserve([claimed()], now=NOW, ttl_s=30)

        assert isinstance(outcome, NoCapacity)
        assert "memory" in outcome.reason
        [lease] = await assert_sound(leases)
        assert lease.pod == "pod"


async def test_a_claims_lease_is_restored_from_its_copy(server: ValkeyServer) -> None:
    await server.ready()
    async with ledger(server.url) as leases:
        [reserved] = await reserve(leases, claimed())
        [bound] = await leases.bind([reserved])
        assert isinstance(bound, Lease)
        copy = load_lease(dump_lease(bound), namespace=bound.namespace, name=bound.name)
        token = await leases.begin_rebuild(now=NOW + 60, force=True)
        assert token

        assert await leases.restore([copy], now=NOW + 60, token=token) == []
        assert await leases.finish_rebuild(token)

        [restored] = await leases.load([PodUid("claim")])
        assert restored
        assert restored.state is LeaseState.BOUND
        assert (restored.claim, restored.shares) == (bound.claim, bound.shares)


async def test_the_consumers_of_a_lease_change_and_nothing_else(server: ValkeyServer) -> None:
    await server.ready()
    async with ledger(server.url) as leases:
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
    server: ValkeyServer,
) -> None:
    await server.ready()
    async with ledger(server.url) as leases:
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

"""A binder dies after it has chosen pods for freed capacity, before it has published them."""

from services.binder.ledger_sync.sweep import NEXT_OFFER_S, Sweeper
from shared.ledger.leases import RedisLeases
from shared.model.events.pod_events import PodQueued
from shared.model.names import PodUid
from tests.support.clock import FakeClock
from tests.support.placer.ledger import NOW, ledger, queued, reservation, reserve, share, verdict
from tests.support.servers.valkey import valkey_server

P4_S = 2.0
"""Freed capacity reaches a waiting pod that fits within this time."""


async def test_another_binder_offers_again_what_was_lost_with_the_first() -> None:
    with valkey_server() as server:
        await server.ready()
        async with ledger(server.url) as leases:
            clock = FakeClock(NOW)
            dying, other = Sweeper(leases, clock), Sweeper(leases, clock)
            await wait_for_full_devices(leases)
            await other.offer()
            await leases.release([PodUid("full-0")], reason="test")

            lost = await dying.offer()
            found: list[PodQueued] = []
            while not found and clock.now() < NOW + 60:
                clock.advance(NEXT_OFFER_S)
                found = await other.offer()

            assert [event.pod for event in lost] == ["w"]
            assert [event.pod for event in found] == ["w"]
            assert clock.now() - NOW <= P4_S + 2 * NEXT_OFFER_S


async def wait_for_full_devices(leases: RedisLeases) -> None:
    """Fill both devices, and let one pod wait."""
    await reserve(leases, *(reservation(f"full-{n}", share("a", n // 4, 4_000)) for n in range(8)))
    await leases.waiting_pods.enqueue([verdict(queued("w"), await leases.capacity())])

"""Evidence for a rebuild, collected by several binders."""

import redis.asyncio

from shared.ledger.rebuild_evidence import LedgerStaging
from shared.model.events.pod_events import ListedPods, PodsListed
from shared.model.lease import Lease
from tests.support.placer.ledger import (
    NOW,
    device,
    facts,
    ledger,
    report,
    reservation,
    reserve,
    share,
)

DEVICES = 32


def listing(name: str) -> PodsListed:
    return PodsListed(listing_id=name, chunk=0, chunks=1, pods=ListedPods())


async def test_the_index_of_listings_forgets_those_that_expired(url: str) -> None:
    prefix = "lh-listings:"
    async with (
        LedgerStaging.connect(url, prefix=prefix) as staging,
        redis.asyncio.from_url(url) as db,
    ):
        await staging.save_chunk(listing("old"))
        await db.delete(f"{prefix}stage:listing:old")  # as if ten minutes had passed
        await staging.save_chunk(listing("new"))
        known = await db.hkeys(f"{prefix}stage:listings")

    assert known == [b"new"]


async def test_leases_are_restored_with_less_than_one_command_each(url: str) -> None:
    async with ledger(url, {"a": DEVICES}) as leases, redis.asyncio.from_url(url) as db:
        wanted = [reservation(f"p{gpu}", share("a", gpu)) for gpu in range(DEVICES)]
        bound = await leases.bind(await reserve(leases, *wanted))
        kept = [lease for lease in bound if isinstance(lease, Lease)]
        token = await leases.begin_rebuild(now=NOW, force=True)
        assert token
        await leases.save_nodes([facts("a")])
        await leases.save_devices([report("a", [device("a", gpu) for gpu in range(DEVICES)])])
        await db.config_resetstat()

        assert await leases.restore(kept, now=NOW, token=token) == []

        commands = (await db.info("commandstats")).values()
        assert len(kept) == DEVICES
        assert sum(each["calls"] for each in commands) < DEVICES

"""Evidence for a rebuild, collected by several binders."""

import redis.asyncio

from shared.ledger.rebuild_evidence import LedgerStaging
from shared.model.events.pod_events import ListedPods, PodsListed


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

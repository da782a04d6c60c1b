"""Evidence that binders collect together, beside the ledger: listings and agents' reports.

The chunks of a listing and the reports of many nodes reach any replica; here each one finds them
complete, and reads them page by page. They are evidence for a rebuild or a comparison, and never
the ledger itself; they are deleted after some minutes, and when a rebuild begins.
"""

import contextlib
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from shared.ledger.connection import LedgerPart, unpack
from shared.ledger.rows.unreadable import UNREADABLE
from shared.model.errors import UnavailableError
from shared.model.events.node_events import Allocation, DeviceReported
from shared.model.events.pod_events import ListedPods, PodsListed
from shared.model.ledger import StagedListing
from shared.model.names import NodeName

CHUNKS_PER_CALL = 4
REPORTS_PER_CALL = 64

_encode = msgspec.json.Encoder().encode
_decode_pods = msgspec.json.Decoder(ListedPods).decode
_decode_allocations = msgspec.json.Decoder(tuple[Allocation, ...]).decode


class LedgerStaging(LedgerPart):
    """Evidence in Redis; usable whether or not the ledger is ready."""

    async def save_chunk(self, chunk: PodsListed) -> StagedListing | None:
        """Save one chunk; return the listing once all its chunks are there."""
        is_complete = await self._run(
            "save_chunk",
            chunk.listing_id,
            chunk.chunk,
            chunk.chunks,
            chunk.request_ids,
            _packed(chunk.pods),
        )
        return StagedListing(chunk.listing_id, chunk.chunks) if is_complete else None

    async def complete_listing(self, request_id: str) -> StagedListing | None:
        """Return a complete listing that began after a request with this ID, if there is one."""
        found = await self._run("listing", request_id)
        return StagedListing(*found) if found else None

    async def read_listing(self, listing: StagedListing) -> AsyncIterator[ListedPods]:
        """Yield the chunks of a listing. Raises UnavailableError if it has been deleted."""
        for first in range(0, listing.chunks, CHUNKS_PER_CALL):
            last = min(first + CHUNKS_PER_CALL, listing.chunks) - 1
            for text in await self._run_raw("chunks", listing.listing_id, first, last):
                if text is None:
                    raise UnavailableError(f"listing {listing.listing_id} was deleted meanwhile")
                try:
                    yield _decode_pods(zlib.decompress(text))
                except (zlib.error, *UNREADABLE) as error:
                    raise UnavailableError(
                        f"listing {listing.listing_id} cannot be read: {error}"
                    ) from error

    async def save_reports(self, reports: Sequence[DeviceReported]) -> None:
        """Save the allocations that these nodes' agents report; the newest report counts."""
        rows = [
            (report.node, report.reported_at, _packed(report.allocations)) for report in reports
        ]
        await self._run("save_reports", rows)

    async def reports_from(
        self, position: int
    ) -> tuple[int, dict[NodeName, tuple[Allocation, ...]]]:
        """Return the allocations of nodes whose reports were saved at `position` or later.

        At most `REPORTS_PER_CALL` nodes, with the position that follows. Positions begin at 0; a
        node's later report with other allocations has a position of its own.
        """
        found = await self._run_raw("reports", position, REPORTS_PER_CALL)
        reports = {}
        for node, text in zip(found[::2], found[1::2], strict=True):
            with contextlib.suppress(zlib.error, *UNREADABLE):
                reports[NodeName(node.decode())] = _decode_allocations(zlib.decompress(text))
        return position + len(found) // 2, reports

    async def extend_rebuild(self, token: str, *, now: float, lock_s: float) -> bool:
        """Extend the lock of our rebuild by `lock_s`; False if another rebuild has begun."""
        return bool(await self._run("extend_rebuild", token, now, lock_s))

    async def clear(self) -> None:
        """Delete reports and listings."""
        await self._run("clear")

    async def _run(self, *args: object) -> Any:
        return unpack(await self._run_raw(*args))

    async def _run_raw(self, *args: object) -> Any:
        return await self._connection.run_raw("staging", *args, state="any")


def _packed(evidence: ListedPods | tuple[Allocation, ...]) -> bytes:
    """Compress evidence: leases repeat one another, and Redis keeps all of it for some minutes."""
    return zlib.compress(_encode(evidence), 1)

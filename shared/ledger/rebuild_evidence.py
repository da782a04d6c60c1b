"""Evidence that binders collect together, beside the ledger: listings and agents' reports.

The chunks of a listing and the reports of many nodes reach any replica; here each one finds them
complete. They are evidence for a rebuild or a comparison, and never the ledger itself; they are
deleted after some minutes, and when a rebuild begins.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from shared.ledger.connection import LedgerPart
from shared.model.events.node_events import Allocation, DeviceReported
from shared.model.events.pod_events import ListedPods, PodsListed
from shared.model.names import NodeName

_encode = msgspec.json.Encoder().encode
_decode_pods = msgspec.json.Decoder(ListedPods).decode
_decode_allocations = msgspec.json.Decoder(tuple[Allocation, ...]).decode


class LedgerStaging(LedgerPart):
    """Evidence in Redis; usable whether or not the ledger is ready."""

    async def save_chunk(self, chunk: PodsListed) -> ListedPods | None:
        """Save one chunk; return the whole listing once all its chunks are there."""
        texts = await self._run(
            "save_chunk",
            chunk.listing_id,
            chunk.chunk,
            chunk.chunks,
            chunk.request_ids,
            _encode(chunk.pods).decode(),
        )
        return chunk.pods if chunk.chunks == 1 else _joined(texts)

    async def save_reports(self, reports: Sequence[DeviceReported]) -> None:
        """Save the allocations that these nodes' agents report; the newest report counts."""
        rows = [
            (report.node, report.reported_at, _encode(report.allocations).decode())
            for report in reports
        ]
        await self._run("save_reports", rows)

    async def reported_nodes(self) -> list[NodeName]:
        """Return the nodes with a saved report."""
        return list(map(NodeName, await self._run("reported_nodes")))

    async def reports(self) -> dict[NodeName, tuple[Allocation, ...]]:
        """Return the saved allocations, by node."""
        found = await self._run("reports")
        return {
            NodeName(node): _decode_allocations(text)
            for node, text in zip(found[::2], found[1::2], strict=True)
        }

    async def complete_listing(self, request_id: str) -> ListedPods | None:
        """Return a complete listing that began after a request with this ID, if there is one."""
        return _joined(await self._run("listing", request_id))

    async def extend_rebuild(self, token: str, *, now: float, lock_s: float) -> bool:
        """Extend the lock of our rebuild by `lock_s`; False if another rebuild has begun."""
        return bool(await self._run("extend_rebuild", token, now, lock_s))

    async def clear(self) -> None:
        """Delete reports and listings."""
        await self._run("clear")

    async def _run(self, *args: object) -> Any:
        return await self._connection.run("staging", *args, state="any")


def _joined(texts: Sequence[str] | None) -> ListedPods | None:
    if not texts:
        return None
    chunks = [_decode_pods(text) for text in texts]
    return ListedPods(
        bound=tuple(pod for chunk in chunks for pod in chunk.bound),
        unbound=tuple(pod for chunk in chunks for pod in chunk.unbound),
        claims=tuple(claim for chunk in chunks for claim in chunk.claims),
    )

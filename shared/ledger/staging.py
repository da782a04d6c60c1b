"""What several binders collect together, in the ledger's store: listings and agents' reports.

The pieces of a listing and the reports of many nodes arrive at whichever replica; here one of them
finds them complete. What is kept is evidence for a rebuild or a comparison, never the ledger
itself; it is forgotten after some minutes, and when a rebuild begins.
"""

from collections.abc import Sequence

import msgspec

from shared.ledger.connection import LedgerPart
from shared.model.events.node_events import Allocation, DeviceReported
from shared.model.events.pod_events import BoundPod, PodsListed
from shared.model.names import NodeName

_encode = msgspec.json.Encoder().encode
_pods_of = msgspec.json.Decoder(tuple[BoundPod, ...]).decode
_activations_of = msgspec.json.Decoder(tuple[Allocation, ...]).decode


class LedgerStaging(LedgerPart):
    """Evidence in Redis; usable whether or not the ledger is ready."""

    async def save_chunk(self, piece: PodsListed) -> tuple[BoundPod, ...] | None:
        """Keep one piece; return the whole listing once all its pieces are there."""
        if piece.chunks == 1:
            await self._keep(piece)
            return piece.pods
        return _joined(await self._keep(piece))

    async def save_reports(self, reports: Sequence[DeviceReported]) -> None:
        """Keep what these nodes' agents have activated; the newest report counts."""
        rows = [
            (report.node, report.reported_at, _encode(report.allocations).decode())
            for report in reports
        ]
        await self._connection.run("staging", "save_reports", rows, state="any")

    async def reports(self) -> dict[NodeName, tuple[Allocation, ...]]:
        """Return what was kept, by node."""
        found = await self._connection.run("staging", "reports", state="any")
        return {
            NodeName(node): _activations_of(text)
            for node, text in zip(found[::2], found[1::2], strict=True)
        }

    async def complete_listing(self, *, since: float) -> tuple[BoundPod, ...] | None:
        """Return the newest complete listing begun at or after `since`, if there is one."""
        return _joined(await self._connection.run("staging", "listing", since, state="any"))

    async def extend_rebuild(self, token: str, *, now: float, lock_s: float) -> bool:
        """Keep the rebuild ours for `lock_s` more seconds; False if it is not any more."""
        held = await self._connection.run(
            "staging", "extend_rebuild", token, now, lock_s, state="any"
        )
        return bool(held)

    async def clear(self) -> None:
        """Forget reports and listings."""
        await self._connection.run("staging", "clear", state="any")

    async def _keep(self, piece: PodsListed) -> list[str] | None:
        texts: list[str] | None = await self._connection.run(
            "staging",
            "save_piece",
            piece.listing_id,
            piece.chunk,
            piece.chunks,
            piece.listed_at,
            _encode(piece.pods).decode(),
            state="any",
        )
        return texts


def _joined(texts: Sequence[str] | None) -> tuple[BoundPod, ...] | None:
    if not texts:
        return None
    return tuple(pod for text in texts for pod in _pods_of(text))

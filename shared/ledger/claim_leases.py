"""Leases of ResourceClaims, as far as they differ from those of pods: they follow allocations."""

from collections.abc import Sequence

from msgspec import structs

from shared.ledger.connection import LedgerPart, unpack
from shared.ledger.rows.lease_rows import decode_lease, encode_lease
from shared.model.lease import ClaimAllocation, Lease
from shared.model.names import PodUid


class ClaimLeases(LedgerPart):
    """Changes of leases with the versions they were read with; others stay as they are."""

    async def mark_deallocated(self, leases: Sequence[Lease]) -> list[bool]:
        """Mark leases to end once their nodes' agents confirm that the claims are not prepared.

        Returns for each whether it still had the version it was read with.
        """
        rows = [(lease.pod, lease.version) for lease in leases]
        (packed,) = await self._connection.run_raw("resource_claims", "deallocated", rows)
        return [bool(marked) for marked in unpack(packed)]

    async def set_consumers(self, lease: Lease, consumers: Sequence[PodUid]) -> Lease | None:
        """Replace the consumers of a claim's lease; None: it has changed since it was read."""
        generation = lease.claim.generation if lease.claim else ""
        claim = ClaimAllocation(generation=generation, consumers=tuple(consumers))
        packed, *stored = await self._connection.run_raw(
            "resource_claims",
            "consumers",
            lease.pod,
            lease.version,
            tail=encode_lease(structs.replace(lease, claim=claim)),
        )
        return decode_lease(stored[0]) if unpack(packed) else None

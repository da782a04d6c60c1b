"""Leases that change their size while their pods run, in the ledger.

A smaller lease gives memory to others, so the node must limit its container first: a caller locks
the lease, limits the container, and writes before the lock expires by the ledger's own clock, or
not at all. A larger lease is written first.
"""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from msgspec import structs

from shared.ledger.connection import LedgerPart, unpack
from shared.ledger.rows.lease_rows import decode_lease, encode_lease
from shared.ledger.rows.outcome_rows import decode_resize_refusal
from shared.model.errors import ConflictError
from shared.model.lease import Lease, StaleLeaseError
from shared.model.ledger import NoCapacity
from shared.model.names import PodUid

_PLACEHOLDER_S = 1.0
"""Placeholder for the time of the resize, which the script writes."""


class LeaseResizes(LedgerPart):
    """Changes the size of leases, and records which nodes and annotations may be outdated."""

    async def lock(self, pod: PodUid, *, ttl_s: float) -> str | None:
        """Lock the pod's lease for `ttl_s`; return the token to shrink it; None: it is locked."""
        token = uuid4().hex
        is_locked = await self._run("lock", pod, token, round(ttl_s * 1000))
        return token if is_locked else None

    async def unlock(self, pod: PodUid, token: str) -> None:
        """Release a lock before its time."""
        await self._run("unlock", pod, token)

    async def apply(self, lease: Lease, *, token: str = "") -> Lease | NoCapacity | StaleLeaseError:
        """Give a lease the shares it has here, and return it with its version raised.

        Its node, devices, slots and fences are those it was read with. NoCapacity: a device, or the
        namespace's quota, has no room for what it has more; StaleLeaseError: it has changed since
        it was read, or ended. Raises ConflictError if the lock of `token` has expired. In each of
        these cases nothing has changed.
        """
        value = encode_lease(structs.replace(lease, resized_at=lease.resized_at or _PLACEHOLDER_S))
        packed, *stored = await self._connection.run_raw(
            "resize", "resize", lease.pod, lease.version, token, tail=value
        )
        outcome, *details = unpack(packed)
        if outcome == "resized":
            return decode_lease(stored[0])
        if outcome == "stale":
            return StaleLeaseError(lease.pod, read=lease.version, stored=details[0] or None)
        if outcome == "unlocked":
            raise ConflictError(f"the lock to resize the lease of pod {lease.pod} has expired")
        return decode_resize_refusal(lease.pod, *details)

    async def unsynced(self, *, older_than_s: float, most: int = 100) -> list[PodUid]:
        """Return the pods of leases whose node or annotations may be outdated after a resize."""
        found = await self._run("unsynced", round(older_than_s * 1000), most)
        return [PodUid(pod) for pod in found]

    async def set_synced(self, pod: PodUid, version: int) -> bool:
        """Record that node and annotations match the lease at `version`.

        False: it has been resized since, or was synced before.
        """
        return bool(await self._run("set_synced", pod, version))

    async def set_unsynced(self, leases: Sequence[Lease]) -> None:
        """Record that nodes or annotations of these may be outdated; also during a rebuild."""
        rows = [(lease.pod, lease.version) for lease in leases]
        await self._run("set_unsynced", rows, state="open")

    async def _run(self, *args: object, state: str = "ready") -> Any:
        (packed,) = await self._connection.run_raw("resize", *args, state=state)
        return unpack(packed)

"""Leases that change their size while their pods run, in the ledger.

A smaller lease gives memory to others, so that its container must have been held to less before:
whoever makes one smaller takes a turn first, asks the node, and writes within the turn's time by
the ledger's own clock, or not at all. A larger lease is written first.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from shared.ledger.connection import LedgerStore, unpacked
from shared.ledger.rows.lease_rows import lease_of, lease_value
from shared.ledger.rows.node_rows import resize_full_of
from shared.model.errors import ConflictError
from shared.model.lease import Lease, StaleLeaseError
from shared.model.ledger import NoCapacity
from shared.model.names import PodUid

_SOME_TIME = 1.0
"""In place of the instant, which the script writes."""


class ResizedLeases(LedgerStore):
    """The part of the ledger (`RedisLeases`) that changes the size of running leases."""

    async def take_turn(self, pod: PodUid, *, lasts_s: float) -> str | None:
        """Return a token with which alone the pod's lease can be made smaller for `lasts_s`.

        None: somebody else has it.
        """
        token = uuid4().hex
        taken = await self._run("lock", pod, token, round(lasts_s * 1000))
        return token if taken else None

    async def leave_turn(self, pod: PodUid, token: str) -> None:
        """Give a turn back before its time."""
        await self._run("unlock", pod, token)

    async def resize(self, lease: Lease, *, turn: str = "") -> Lease | NoCapacity | StaleLeaseError:
        """Give a lease the shares it has here, and return it with its version raised.

        Its node, devices, slots and fences are those it was read with. Full: a device, or the
        namespace's quota, has no room for what it has more; StaleLeaseError: it has moved on since
        it was read, or ended. Raises ConflictError if the time of the `turn` is over. In each of
        these cases nothing has changed.
        """
        value = lease_value(replace(lease, resized_at=lease.resized_at or _SOME_TIME))
        packed, *stored = await self._connection.run_raw(
            "resize", "resize", lease.pod, lease.version, turn, tail=value
        )
        what, *said = unpacked(packed)
        if what == "resized":
            return lease_of(stored[0])
        if what == "stale":
            return StaleLeaseError(lease.pod, read=lease.version, stored=said[0] or None)
        if what == "unlocked":
            raise ConflictError(f"the time to resize the lease of pod {lease.pod} was over")
        return resize_full_of(lease.pod, *said)

    async def unsettled(self, *, older_than_s: float, most: int = 100) -> list[PodUid]:
        """Return pods whose leases were resized so long ago, and whose views may lag behind."""
        found = await self._run("unsynced", round(older_than_s * 1000), most)
        return [PodUid(pod) for pod in found]

    async def settled(self, pod: PodUid, version: int) -> bool:
        """Note that node and annotations say what the lease does as of `version`.

        False: it has been resized since, or was settled before.
        """
        return bool(await self._run("set_synced", pod, version))

    async def unsettle(self, leases: Sequence[Lease]) -> None:
        """Note that nodes or annotations may lag behind these; also possible during a rebuild."""
        rows = [(lease.pod, lease.version) for lease in leases]
        await self._run("set_unsynced", rows, state="open")

    async def _run(self, *args: object, state: str = "ready") -> Any:
        (packed,) = await self._connection.run_raw("resize", *args, state=state)
        return unpacked(packed)

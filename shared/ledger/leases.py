"""The ledger of leases in Redis or Valkey: which pod holds which share of which device.

A function writes all or nothing, and keeps totals, indexes and feed in agreement. Each call may be
repeated: the second one returns what the first one did. All raise UnavailableError while the server
does not reply or refuses to write, and while the ledger is empty or being rebuilt.

Versions, fences and the capacity number only rise. A rebuild starts them at the present in
milliseconds, above all earlier ones, so that leases of an earlier life of a pod, and servers that
have lost writes, are recognised.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import structs

from shared.ledger.connection import LedgerConnection, LedgerPart, in_batches, unpack
from shared.ledger.ledger_inventory import LedgerInventory
from shared.ledger.ledger_totals import PAGE_SIZE, LedgerQuotas, LedgerTotals, read_nodes
from shared.ledger.record_checks import RecordChecks
from shared.ledger.records import RefusalRecord
from shared.ledger.rows.joined_texts import escaped
from shared.ledger.rows.lease_rows import (
    decode_lease,
    encode_lease,
    encode_leases,
    encode_repelled,
    encode_reservation,
    joined,
    new_lease,
)
from shared.ledger.rows.node_rows import device_use, node_use
from shared.ledger.rows.quota_rows import as_excess
from shared.ledger.rows.unreadable import readable
from shared.ledger.rows.waiting_rows import rank_of
from shared.ledger.waiting_pods import WaitingPods
from shared.model.errors import ConflictError
from shared.model.leases.lease import (
    ClaimAllocation,
    Lease,
    LeaseState,
    StaleLeaseError,
    will_end_by,
)
from shared.model.leases.ledger import (
    AlreadyLeased,
    GangIncomplete,
    GonePod,
    NoCapacity,
    Reservation,
    ReservationOutcome,
    ReservedLease,
    TooLarge,
    UnreadableRecord,
)
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import Gang
from shared.placing.run_times import RunTimes

_decode_refusal = msgspec.msgpack.Decoder(RefusalRecord).decode

_ALREADY_LEASED = 0
_GANG_INCOMPLETE = -2
_GONE = -3
_TOO_LARGE = -4


def decode_outcome(
    wanted: Reservation,
    numbers: Iterator[int],
    values: Iterator[bytes],
    now: float,
    expires_at: float,
) -> ReservationOutcome:
    number = next(numbers)
    if number > 0:
        return ReservedLease(lease=new_lease(wanted, number, numbers, now, expires_at))
    if number == _ALREADY_LEASED:
        return AlreadyLeased(lease=decode_lease(next(values)))
    if number == _GANG_INCOMPLETE:
        return GangIncomplete(pod=wanted.pod)
    if number == _GONE:
        return GonePod(pod=wanted.pod)
    if number == _TOO_LARGE:
        return TooLarge(pod=wanted.pod, reason=next(values).decode())
    return _refusal(wanted.pod, next(values))


def _refusal(pod: PodUid, value: bytes) -> NoCapacity:
    record = _decode_refusal(value)
    return NoCapacity(
        pod=pod,
        reason=record.reason,
        devices={device.uuid: device_use(device) for device in record.devices},
        nodes={node.name: node_use(node) for node in record.nodes},
        quotas=tuple(map(as_excess, record.excesses)),
        reserved_for_other=record.reserved_for_other,
    )


MOST_UNSYNCED = 100


class LeaseResizes(LedgerPart):
    async def lock(self, pod: PodUid, *, ttl_s: float) -> str | None:
        """Lock the lease for `ttl_s`; return the token to shrink it, or None if it is locked."""
        token = uuid4().hex
        is_locked = await self._run("lock", pod, token, round(ttl_s * 1000))
        return token if is_locked else None

    async def unlock(self, pod: PodUid, token: str) -> None:
        await self._run("unlock", pod, token)

    async def apply(self, lease: Lease, *, token: str = "") -> Lease | NoCapacity | StaleLeaseError:
        """Give a lease the shares it has here, and return it with its version raised.

        Returns NoCapacity if a device, or the namespace's quota, has no room for the increase, and
        StaleLeaseError if the lease has changed since it was read, or ended. Raises ConflictError
        if the lock of `token` has expired.
        """
        _, values, refused = encode_leases([lease])
        if refused:
            return NoCapacity(pod=lease.pod, reason=refused[0][1])
        packed, *stored = await self._connection.run_raw(
            "resize", "resize", lease.pod, lease.version, token, tail=values[0]
        )
        outcome, *details = unpack(packed)
        if outcome == "resized":
            return decode_lease(stored[0])
        if outcome == "stale":
            return StaleLeaseError(lease.pod, read=lease.version, stored=details[0] or None)
        if outcome == "unlocked":
            raise ConflictError(f"the lock to resize the lease of pod {lease.pod} has expired")
        return _refusal(lease.pod, stored[0])

    async def unsynced(self, *, older_than_s: float) -> list[PodUid]:
        unsynced = await self._run("unsynced", round(older_than_s * 1000), MOST_UNSYNCED)
        return [PodUid(pod) for pod in unsynced]

    async def set_synced(self, pod: PodUid, version: int) -> bool:
        """Return False if the lease was resized since `version`, or synced before."""
        return bool(await self._run("set_synced", pod, version))

    async def set_unsynced(self, leases: Sequence[Lease]) -> None:
        rows = [(lease.pod, lease.version) for lease in leases]
        await self._run("set_unsynced", rows, state="open")

    async def _run(self, *args: object, state: str = "ready") -> Any:
        return await self._connection.run("resize", *args, state=state)


class ClaimLeases(LedgerPart):
    async def mark_deallocated(self, leases: Sequence[Lease]) -> list[bool]:
        """Mark leases to end once their nodes' agents confirm that the claims are not prepared.

        Returns for each whether it still had the version it was read with.
        """
        rows = [(lease.pod, lease.version) for lease in leases]
        return list(map(bool, await self._connection.run("resource_claims", "deallocated", rows)))

    async def set_consumers(self, lease: Lease, consumers: Sequence[PodUid]) -> Lease | None:
        """Return None if the lease changed since it was read."""
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


class LearnedRunTimes(LedgerPart):
    """May be lost without harm."""

    async def load(self) -> RunTimes:
        (data,) = await self._connection.run_raw("read_run_times", state="any")
        return RunTimes.load(data)

    async def save(self, learned: RunTimes) -> None:
        await self._connection.run_raw("save_run_times", "save", state="any", tail=learned.dump())


EXPIRE_BATCHES = 4
_MOVED = -1
GangNeeds = tuple[str, int, bool, int]
"""A gang, how many of its pods must hold leases, whether before the call, and how many must hold
one before it exactly; -1 for any number."""


class RedisLeases(LedgerInventory):
    def __init__(self, connection: LedgerConnection) -> None:
        super().__init__(connection)
        self.waiting_pods = WaitingPods(connection)
        self.resizes = LeaseResizes(connection)
        self.claims = ClaimLeases(connection)
        self.totals = LedgerTotals(connection)
        self.quotas = LedgerQuotas(connection)
        self.checks = RecordChecks(connection)
        self.run_times = LearnedRunTimes(connection)
        self.freed = asyncio.Event()

    # Leases

    async def reserve(
        self, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve for each pod the first candidate that still fits, until `now + ttl_s`.

        A pod that has a live lease keeps it; one that is gone gets none.
        """
        return await self._reserve_each(wanted, now, now + ttl_s)

    async def reserve_gang(
        self, gang: Gang, wanted: Sequence[Reservation], *, now: float, ttl_s: float, live: int = -1
    ) -> list[ReservationOutcome]:
        """Reserve for all of the pods or, as one atomic step, for none, until `now + ttl_s`.

        For none if one of them fits nowhere (NoCapacity; the others are GangIncomplete), if fewer
        than `gang.min_member` would then hold a lease, or other than `live` held one before: two
        placers must not choose different domains for a gang.
        """
        needs = (escaped(gang.name), gang.min_member, False, live)
        return await self._reserve_batch(wanted, now, now + ttl_s, needs)

    async def reserve_further(
        self, gang: Gang, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve for further pods, each on its own.

        Returns GangIncomplete if fewer than `gang.min_member` of the gang still hold a lease.
        """
        needs = (escaped(gang.name), gang.min_member, True, -1)
        return await self._reserve_each(wanted, now, now + ttl_s, needs)

    async def _reserve_each(
        self,
        wanted: Sequence[Reservation],
        now: float,
        expires_at: float,
        gang_needs: GangNeeds | None = None,
    ) -> list[ReservationOutcome]:
        batches = in_batches(wanted)
        if len(batches) == 1:  # the usual case, without a task
            return await self._reserve_batch(batches[0], now, expires_at, gang_needs)
        answers = await asyncio.gather(
            *(self._reserve_batch(batch, now, expires_at, gang_needs) for batch in batches),
            return_exceptions=True,
        )
        outcomes: list[ReservationOutcome] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            outcomes += answer
        return outcomes

    async def _reserve_batch(
        self,
        batch: Sequence[Reservation],
        now: float,
        expires_at: float,
        gang_needs: GangNeeds | None = None,
    ) -> list[ReservationOutcome]:
        texts: dict[tuple[Any, ...], str] = {}
        encoded = [encode_reservation(reservation, texts) for reservation in batch]
        pieces_of = [piece for piece in encoded if not isinstance(piece, TooLarge)]
        if len(pieces_of) < len(batch):
            return await self._reserve_encodable(batch, encoded, now, expires_at, gang_needs)
        pods = [reservation.pod for reservation in batch]
        counts = [len(reservation.candidates) for reservation in batch]
        bounds, pieces = joined(list(chain.from_iterable(pieces_of)))
        ranks = [rank_of(reservation.priority) for reservation in batch]
        packed, *values = await self._connection.run_raw(
            "reserve",
            now,
            expires_at,
            pods,
            counts,
            bounds,
            gang_needs or False,
            ranks,
            *_anti_affinity(batch),
            _ends(batch, now),
            _rules(batch),
            tail=pieces,
        )
        numbers = iter(unpack(packed))
        following = iter(values)
        outcomes = [
            decode_outcome(reservation, numbers, following, now, expires_at)
            for reservation in batch
        ]
        self._observe(outcome.lease for outcome in outcomes if isinstance(outcome, ReservedLease))
        return outcomes

    async def _reserve_encodable(
        self,
        batch: Sequence[Reservation],
        encoded: Sequence[list[bytes] | TooLarge],
        now: float,
        expires_at: float,
        gang_needs: GangNeeds | None,
    ) -> list[ReservationOutcome]:
        together = gang_needs is not None and not gang_needs[2]
        rest = [
            wanted
            for wanted, piece in zip(batch, encoded, strict=True)
            if not isinstance(piece, TooLarge)
        ]
        outcomes = (
            [GangIncomplete(pod=wanted.pod) for wanted in rest]
            if together
            else await self._reserve_batch(rest, now, expires_at, gang_needs)
        )
        following = iter(outcomes)
        return [piece if isinstance(piece, TooLarge) else next(following) for piece in encoded]

    async def bind(self, leases: Sequence[Lease]) -> list[Lease | StaleLeaseError]:
        """Bind reservations to their nodes; from then on only a release ends them.

        A repetition gets the same reply. A lease that is gone, expired, or from another reservation
        gets StaleLeaseError.
        """
        bound: list[Lease | StaleLeaseError] = []
        for batch in in_batches(leases):
            rows = [(lease.pod, lease.version, *_first_grant(lease)) for lease in batch]
            packed, *values = await self._connection.run_raw("advance", "bound", rows)
            following = iter(values)
            for lease, stored in zip(batch, unpack(packed), strict=True):
                if stored == _MOVED:
                    bound.append(decode_lease(next(following)))
                else:
                    bound.append(
                        StaleLeaseError(lease.pod, read=lease.version, stored=stored or None)
                    )
        self._observe(lease for lease in bound if isinstance(lease, Lease))
        return bound

    async def extend(self, leases: Sequence[Lease], *, until: float) -> list[bool]:
        """Keep reservations until a later instant; return for each whether it is kept."""
        kept: list[bool] = []
        for batch in in_batches(leases):
            rows = [(lease.pod, lease.version) for lease in batch]
            kept += map(bool, await self._connection.run("extend", rows, until))
        return kept

    async def activate(self, pods: Sequence[tuple[PodUid, NodeName]]) -> list[Lease | None]:
        """Return None for a pod without a bound lease on that node."""
        active: list[Lease | None] = []
        for batch in in_batches(pods):
            packed, *values = await self._connection.run_raw("advance", "active", batch)
            following = iter(values)
            active += [
                decode_lease(next(following)) if stored == _MOVED else None
                for stored in unpack(packed)
            ]
        self._observe(lease for lease in active if lease)
        return active

    async def release(
        self, pods: Sequence[PodUid], *, reason: str, version: int | None = None
    ) -> list[Lease]:
        """End the pods' leases, whatever their state, and return those that ended.

        With `version`, a lease of any other version stays. If a reservation of a gang ends of which
        no pod is bound, all reservations of the gang end.
        """
        ended: list[Lease] = []
        for batch in in_batches(pods):
            _, *values = await self._connection.run_raw(
                "end_leases", "released", batch, version if version is not None else False, reason
            )
            ended += readable(decode_lease, values)
        self._observe(ended)
        if ended:
            self.freed.set()
        return ended

    async def expire(self, now: float) -> list[Lease]:
        expired: list[Lease] = []
        has_more = True
        while has_more:
            packed, *values = await self._connection.run_raw(
                "end_leases", "expired", now, EXPIRE_BATCHES
            )
            has_more = unpack(packed)
            expired += readable(decode_lease, values)
        if expired:
            self.freed.set()
        return expired

    async def load(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        values = await self._connection.run_raw("load_leases", pods, [], [])
        return [next(readable(decode_lease, [value]), None) if value else None for value in values]

    async def load_node(self, node: NodeName) -> list[Lease]:
        return await self._load_all([node], [])

    async def list_vanished(self) -> dict[PodUid, float | None]:
        """Return pods that are gone, but whose containers may still run.

        Each with the instant since which its node's agent has not replied, or None if it replies.
        """
        pods, silent_since = await self._connection.run("query", "vanished")
        return {
            pod: float(since) if since else None
            for pod, since in zip(pods, silent_since, strict=True)
        }

    async def save_silence(self, pods: Sequence[PodUid], since: float | None) -> None:
        for batch in in_batches(pods):
            await self._connection.run("silence", since or False, batch)

    async def load_vanished(self) -> list[Lease]:
        pods = await self.list_vanished()
        loaded = await self.load(list(pods)) if pods else []
        return [lease for lease in loaded if lease and lease.state is not LeaseState.RESERVED]

    async def load_reserved_gang(self, gang: str) -> list[Lease]:
        """Return no leases if a pod of the gang is bound."""
        return await self._load_all([], [escaped(gang)])

    async def load_all(self) -> AsyncIterator[list[Lease]]:
        """Yield pages of nodes; a new lease may be missing."""
        names = (await read_nodes(self._connection, [])).names
        for batch in in_batches(sorted(names), PAGE_SIZE):
            yield await self._load_all(batch, [])

    async def _load_all(self, nodes: Sequence[str], gangs: Sequence[str]) -> list[Lease]:
        values = await self._connection.run_raw("load_leases", [], nodes, gangs)
        return list(readable(decode_lease, filter(None, values)))

    # Rebuilds

    async def begin_rebuild(
        self, *, now: float, lock_s: float = 60.0, force: bool = False
    ) -> str | None:
        """Empty the ledger for a rebuild; return the token of the one caller that rebuilds it.

        Returns None if it is ready (unless forced), or another rebuild began less than `lock_s`
        ago.
        """
        token = uuid4().hex[:16]
        won = await self._connection.run("rebuild", "begin", token, now, lock_s, force, state="any")
        return token if won else None

    async def restore(
        self,
        leases: Sequence[Lease],
        *,
        now: float,
        token: str = "",
        lock_s: float = 60.0,
        hearsay: Collection[PodUid] = (),
    ) -> list[tuple[Lease, str]]:
        """Write leases as they were, with slots and fences; return those that conflict, and why.

        Leases of the pods in `hearsay` are known from agents alone: they take no device that
        another node has. Raises ConflictError if another rebuild has begun since `token` was given.
        """
        refused: list[tuple[Lease, str]] = []
        for batch in in_batches(leases):
            refused += await self._restore(batch, hearsay, (token, now, lock_s), ())
        return refused

    async def renew(
        self,
        damaged: Sequence[UnreadableRecord],
        leases: Sequence[Lease],
        *,
        generation: str,
        now: float,
        hearsay: Collection[PodUid] = (),
    ) -> list[tuple[Lease, str]]:
        """Set damaged records aside, and restore the leases that were among them, in one step.

        All else that they counted for is counted again. Returns the leases that are not restored,
        and why. Raises ConflictError if the ledger was rebuilt since `generation`.
        """
        return await self._restore(leases, hearsay, (generation, now, 0.0), damaged)

    async def _restore(
        self,
        leases: Sequence[Lease],
        hearsay: Collection[PodUid],
        generation: tuple[str, float, float],
        damaged: Sequence[UnreadableRecord],
    ) -> list[tuple[Lease, str]]:
        """`generation`: its token, the time, and seconds by which its lock is extended."""
        packed, values, too_large = encode_leases(leases)
        bounds, tail = joined(values)
        is_hearsay = [lease.pod in hearsay for lease in packed]
        args = (*generation, bounds, is_hearsay, list(map(tuple, damaged)))
        state = "ready" if damaged else "open"
        replies = await self._connection.run("restore", *args, state=state, tail=tail)
        conflicts = [(lease, why) for lease, why in zip(packed, replies, strict=True) if why]
        return [*too_large, *conflicts]

    async def extend_rebuild(self, token: str, *, now: float, lock_s: float) -> bool:
        """Return whether all quotas are known.

        Raises ConflictError if another rebuild has begun.
        """
        args = ("extend", token, now, lock_s)
        return bool(await self._connection.run("rebuild", *args, state="any"))

    async def finish_rebuild(self, token: str) -> bool:
        return bool(await self._connection.run("rebuild", "finish", token, state="any"))

    def _observe(self, leases: Iterable[Lease]) -> None:
        self._connection.observe_version(max((lease.version for lease in leases), default=0))


def _anti_affinity(batch: Sequence[Reservation]) -> tuple[object, object]:
    read = [
        reservation.read_version for reservation in batch if reservation.read_version is not None
    ]
    repels = any(reservation.repels for reservation in batch)
    return min(read, default=False), repels and [
        encode_repelled(reservation.repels) for reservation in batch
    ]


def _rules(batch: Sequence[Reservation]) -> object:
    if not any(reservation.selected_as or reservation.guards for reservation in batch):
        return False
    return [
        [wanted.selected_as, wanted.guards, list(chain.from_iterable(wanted.uncounted))]
        if wanted.selected_as or wanted.guards
        else False
        for wanted in batch
    ]


def _ends(batch: Sequence[Reservation], now: float) -> object:
    ends = [will_end_by(reservation.term, now) for reservation in batch]
    return [end or False for end in ends] if any(ends) else False


def _first_grant(lease: Lease) -> tuple[str, int]:
    """No other lease has this device and fence."""
    return (lease.shares[0].device, lease.shares[0].fence) if lease.shares else ("", -1)

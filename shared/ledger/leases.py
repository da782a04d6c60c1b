"""The ledger of leases in Redis or Valkey: who holds which share of which device.

Every method is one script, or pages of one script, on one server (keys are computed, so there is
no cluster mode; replicas are fine): a script sees and leaves totals, slots, fences, versions,
indexes and feed in agreement, and writes nothing by halves. Every method may be repeated: the
second time answers what the first did. None is tried again here. All raise UnavailableError when
the server does not answer or refuses to write, and while the ledger is not ready: it is empty
(never used, or flushed), or its rebuild is not finished. `now` is the caller's, Unix seconds.

    async with RedisLeases.connect("redis://127.0.0.1:6379") as leases:

    reserve(wanted, now, ttl_s) -> Reserved | Held | Full per pod: the first candidate that fits
    muster(gang, pods), reserve_gang(gang, wanted, now, ttl_s)      all or nothing
    bind(leases)                -> per lease: the bound lease, or StaleLeaseError (a value)
    activate(pods)              -> per pod: the active lease, or None if none is bound
    resize(lease, turn)         -> the lease with its new shares; Full, StaleLeaseError (values)
    release(pods, reason)       -> the leases that ended;   expire(now) -> the same for reservations
    load(pods), load_node(node), load_all()                 live leases
    save_node(facts), save_devices(report), remove_node(name)   inventory; True if it changed
    keep_shut(words)            -> the nodes that no pod may be bound to now
    snapshot(), changes(position), capacity()               for mirrors
    wait(verdicts), waiting(), forget_waiting(pods), offers(now)    pods that fit nowhere yet
    epoch(), begin_rebuild(now), restore(leases, ...), finish_rebuild(token)
    save_quotas(quotas, told_at), quota_accounts()
    totals(), gangs()                                       for the auditor

Versions, fences and the capacity number only rise, also across a rebuild, which starts them at the
present in milliseconds: above whatever was handed out before. A version is never used twice, so
that a lease of an earlier life of the same pod is always recognised as stale, and a server that
lost writes it had answered (a replica that was behind took over) is recognised by its versions.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Self
from uuid import uuid4

from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.ledger.connection import LedgerConnection, in_groups, unpacked
from shared.ledger.lease_resizes import ResizedLeases
from shared.ledger.ledger_totals import PAGE, Accounts
from shared.ledger.rows.lease_rows import (
    joined,
    lease_of,
    lease_value,
    reservation_pieces,
    reserved,
)
from shared.ledger.rows.node_rows import (
    account_of,
    change_of,
    facts_row,
    full_of,
    is_known,
    report_row,
)
from shared.ledger.rows.waiting_rows import rank_of
from shared.ledger.waiting_pods import WaitingPods
from shared.model.errors import UnavailableError
from shared.model.events.node_events import DeviceReported
from shared.model.lease import Lease, StaleLeaseError
from shared.model.ledger import (
    AlreadyLeased,
    FeedTruncatedError,
    GangIncomplete,
    LedgerChange,
    Reservation,
    ReservationOutcome,
    Reserved,
    Snapshot,
)
from shared.model.names import NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.request import Gang

EXPIRE_GROUPS = 4
"""Groups that were reserved together, per script call that ends them."""
_WITHHELD = -2
BLOCK_S = 1.0
"""How long a reader of the feed waits before it looks whether the ledger is still the same."""


class RedisLeases(WaitingPods, ResizedLeases, Accounts):
    """The ledger, as everybody who may write it sees it."""

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str,
        *,
        prefix: str = "lh:",
        keys: ClientCredentials = NO_CREDENTIALS,
        timeout_s: float = 5.0,
        feed_length: int = 10_000,
        is_witness: bool = False,
    ) -> AsyncIterator[Self]:
        """Open the ledger at `url` (`redis://`, `rediss://`, `unix://`); connects when used.

        The feed keeps about `feed_length` script calls. A witness, who must be allowed to write,
        closes a ledger that has lost what it told him before, so that it is rebuilt.
        """
        async with LedgerConnection(
            url,
            prefix=prefix,
            keys=keys,
            timeout_s=timeout_s,
            feed_length=feed_length,
            is_witness=is_witness,
        ) as connection:
            yield cls(connection)

    async def reserve(
        self, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve for each pod the first candidate that still fits, until `now + ttl_s`.

        A pod that has a live lease keeps it. What is being offered to a waiting pod of higher
        priority is `kept` for that one. Each 64 are one atomic group; the next is packed while
        the server works on the one before. If one group gets no answer, the call raises; repeat it.
        """
        answers = await asyncio.gather(
            *(self._reserve_group(group, now, now + ttl_s) for group in in_groups(wanted)),
            return_exceptions=True,
        )
        outcomes: list[ReservationOutcome] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            outcomes += answer
        return outcomes

    async def reserve_gang(
        self, gang: Gang, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve for all of the pods or, as one atomic step, for none, until `now + ttl_s`.

        None: one fits nowhere (Full; the others are Withheld), or fewer than `gang.min_member` of
        the gang would hold a lease then.
        """
        return await self._reserve_group(wanted, now, now + ttl_s, gang)

    async def _reserve_group(
        self,
        group: Sequence[Reservation],
        now: float,
        expires_at: float,
        together: Gang | None = None,
    ) -> list[ReservationOutcome]:
        pods = [reservation.pod for reservation in group]
        counts = [len(reservation.candidates) for reservation in group]
        bounds, pieces = joined(reservation_pieces(group))
        ranks = [rank_of(reservation.priority) for reservation in group]
        packed, *others = await self._connection.run_raw(
            "reserve", now, expires_at, pods, counts, bounds, _needs(together), ranks, tail=pieces
        )
        numbers, following = iter(unpacked(packed)), iter(others)
        outcomes = [_outcome(each, numbers, following, now, expires_at) for each in group]
        self._hear(outcome.lease for outcome in outcomes if isinstance(outcome, Reserved))
        return outcomes

    async def bind(self, leases: Sequence[Lease]) -> list[Lease | StaleLeaseError]:
        """Commit reservations to their nodes; from here only a release ends them.

        A lease that this reservation was bound to before gets the same answer again. One that is
        gone, expired, or another reservation's is answered with StaleLeaseError.
        """
        bound: list[Lease | StaleLeaseError] = []
        for group in in_groups(leases):
            rows = [
                (lease.pod, lease.version, lease.shares[0].fence if lease.shares else -1)
                for lease in group
            ]
            packed, *moved = await self._connection.run_raw("advance", "bound", rows)
            following = iter(moved)
            for lease, stored in zip(group, unpacked(packed), strict=True):
                if stored == -1:
                    bound.append(lease_of(next(following)))
                else:
                    bound.append(
                        StaleLeaseError(lease.pod, read=lease.version, stored=stored or None)
                    )
        self._hear(lease for lease in bound if isinstance(lease, Lease))
        return bound

    async def activate(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        """Note that the kubelet was told; None for a pod without a lease that is bound."""
        active: list[Lease | None] = []
        for group in in_groups(pods):
            rows = [(pod,) for pod in group]
            packed, *moved = await self._connection.run_raw("advance", "active", rows)
            following = iter(moved)
            active += [
                lease_of(next(following)) if stored == -1 else None for stored in unpacked(packed)
            ]
        self._hear(lease for lease in active if lease)
        return active

    async def release(
        self, pods: Sequence[PodUid], *, reason: str, version: int | None = None
    ) -> list[Lease]:
        """End the pods' leases, whatever their state, and return those that ended.

        With `version`, a lease of any other version stays.
        """
        ended: list[Lease] = []
        for group in in_groups(pods):
            _, *values = await self._connection.run_raw(
                "end_leases", "released", group, version if version is not None else False, reason
            )
            ended += map(lease_of, values)
        self._hear(ended)
        return ended

    async def expire(self, now: float) -> list[Lease]:
        """End every reservation whose time is over, and return them."""
        expired: list[Lease] = []
        more = True
        while more:
            packed, *values = await self._connection.run_raw(
                "end_leases", "expired", now, EXPIRE_GROUPS
            )
            more = unpacked(packed)
            expired += map(lease_of, values)
        return expired

    async def load(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        """Return each pod's live lease, or None."""
        values = await self._connection.run_raw("load_leases", pods, [])
        return [lease_of(value) if value else None for value in values]

    async def load_node(self, node: NodeName) -> list[Lease]:
        """Return the live leases of a node."""
        values = await self._connection.run_raw("load_leases", [], [node])
        return [lease_of(value) for value in values if value]

    async def load_all(self) -> AsyncIterator[list[Lease]]:
        """Yield all live leases, in pages of nodes; one that comes meanwhile may be missing."""
        (_, _, _, names, _), _ = await self._survey([])
        for page in in_groups(sorted(names), PAGE):
            values = await self._connection.run_raw("load_leases", [], page)
            yield [lease_of(value) for value in values if value]

    async def save_node(self, facts: NodeFacts, *, seen_at: float = 0.0) -> bool:
        """Write what the API server says of a node; also possible during a rebuild.

        Facts that were seen before the stored ones were are passed over.
        """
        row = facts_row(facts)
        return bool(await self._connection.run("save_node", *row, seen_at, state="open"))

    async def save_devices(self, report: DeviceReported) -> bool:
        """Write what a node's agent reports; also possible during a rebuild.

        A report less than two minutes older than the stored one is passed over; one that is older
        still is of an agent whose clock was set back. Leases stay, whatever it says: a device
        that is missing, unhealthy or smaller than its use takes nothing new. A device's fence is
        raised to those that its agent has honoured.
        """
        return bool(await self._connection.run("save_devices", *report_row(report), state="open"))

    async def has_agent(self, node: NodeName) -> bool:
        """Say whether it was an agent of ours that told last of the node's devices."""
        return bool(await self._connection.run("query", "by_agent", node))

    async def remove_node(self, name: NodeName) -> bool:
        """Note that a node is gone; its leases stay until they are released."""
        return bool(await self._connection.run("remove_node", name, state="open"))

    async def keep_shut(self, words: Mapping[NodeName, str]) -> frozenset[NodeName]:
        """Note why no pod may be bound to nodes now; empty: one may be. Return all that are shut.

        Their leases stay, and so does what they report; mirrors are told that they serve nothing.
        """
        parts = [part for word in words.items() for part in word]
        return frozenset(map(NodeName, await self._connection.run("cordon", parts)))

    async def capacity(self) -> int:
        """Return the capacity number: it rises whenever something is freed or added."""
        _, capacity, _ = await self._connection.run("query", "position")
        return int(capacity)

    async def snapshot(self) -> Snapshot:
        """Return all nodes that the API server has told of, and where to go on in the feed."""
        (epoch, feed, capacity, names, _), _ = await self._survey([])
        nodes = []
        for page in in_groups(sorted(names), PAGE):
            (now_epoch, _, _, _, rows), none = await self._survey(page)
            if now_epoch != epoch:
                raise UnavailableError("the ledger was rebuilt while it was read; read it again")
            nodes += [account_of(row, none).node for row in rows if is_known(row)]
        return Snapshot(position=f"{epoch}:{feed}", capacity=capacity, nodes=tuple(nodes))

    async def changes(self, position: str) -> AsyncIterator[list[LedgerChange]]:
        """Yield everything that happens after `position`, for ever, as soon as it happens.

        Raises FeedLostError if the feed no longer goes back that far, or the ledger was rebuilt.
        """
        epoch, _, number = position.rpartition(":")
        at = int(number)
        while True:
            entries = await self._connection.read_feed(at, count=200, block_s=BLOCK_S)
            if not entries:
                (now_epoch, feed, _, _, _), _ = await self._survey([])
                if now_epoch != epoch or int(feed) < at:
                    raise FeedTruncatedError(position, "the ledger was rebuilt")
                continue
            heard = []
            for entry, fields in entries:
                if fields[b"e"].decode() != epoch:
                    raise FeedTruncatedError(position, "the ledger was rebuilt")
                if entry != at + 1:
                    raise FeedTruncatedError(position, f"it begins at {entry}")
                at = entry
                heard.append(change_of(f"{epoch}:{at}", fields))
            self._connection.hear(
                max((use.version for change in heard for use in change.used.values()), default=0)
            )
            yield heard

    async def epoch(self) -> str | None:
        """Return the name of the ledger's present life, or None while it is not ready."""
        try:
            epoch, _, version = await self._connection.run("query", "position")
        except UnavailableError as error:
            if "being rebuilt" in str(error):
                return None
            raise
        self._connection.hear(version)
        return str(epoch)

    def _hear(self, leases: Iterable[Lease]) -> None:
        self._connection.hear(max((lease.version for lease in leases), default=0))

    async def begin_rebuild(
        self, *, now: float, lock_s: float = 60.0, force: bool = False
    ) -> str | None:
        """Empty the ledger to build it anew; return the token of the one caller who shall do it.

        None: it is ready (and not `force`d), or somebody is at it, less than `lock_s` ago.
        """
        token = uuid4().hex[:16]
        won = await self._connection.run("rebuild", "begin", token, now, lock_s, force, state="any")
        return token if won else None

    async def restore(
        self, leases: Sequence[Lease], *, now: float, token: str = "", lock_s: float = 60.0
    ) -> list[tuple[Lease, str]]:
        """Write leases as they were, slots and fences included; return those that clash, and why.

        A lease that would over-commit a device is not written. One that is there is not written
        twice. Raises ConflictError if another rebuild has begun since `token` was given.
        """
        refused: list[tuple[Lease, str]] = []
        for group in in_groups(leases):
            bounds, values = joined([lease_value(lease) for lease in group])
            answers = await self._connection.run(
                "restore", token, now, lock_s, bounds, state="open", tail=values
            )
            refused += [
                (lease, reason) for lease, reason in zip(group, answers, strict=True) if reason
            ]
        return refused

    async def finish_rebuild(self, token: str) -> bool:
        """Open the ledger for service; False if another rebuild has begun since."""
        return bool(await self._connection.run("rebuild", "finish", token, state="any"))


def _needs(together: Gang | None) -> tuple[str, int] | bool:
    return (together.name, together.min_member) if together else False


def _outcome(
    wanted: Reservation,
    numbers: Iterator[int],
    following: Iterator[bytes],
    now: float,
    expires_at: float,
) -> ReservationOutcome:
    number = next(numbers)
    if number > 0:
        return reserved(wanted, number, numbers, now, expires_at)
    if number == 0:
        return AlreadyLeased(lease=lease_of(next(following)))
    if number == _WITHHELD:
        return GangIncomplete(pod=wanted.pod)
    return full_of(wanted.pod, next(following))

"""Budgets in Redis or Valkey, beside the ledger of leases: what was charged, windows, entries.

Every write is one script that first compares what the caller decided on: the revision of the
account, or how far the journal of tenures was taken in. A write on anything older is refused whole,
so any number of timekeepers may run, crash and repeat themselves. The keys have a prefix of their
own: a rebuild of the ledger of leases leaves them alone. All methods raise UnavailableError when
the server does not answer.

    meta        hash   epoch (of the ledger of leases), cursor (entry of its journal taken in last)
    revisions   hash   namespace -> revision
    standings, budgets  hashes  namespace -> JSON
    held:NS     hash   tenure -> JSON;   charged:NS, ended:NS   hashes  tenure -> ms
    windows:NS  hash   window -> JSON;   starts:NS  zset  window -> start
    open        hash   namespace -> its open window
    entries:NS  stream append only, its ids are instants of the server's clock
    grants:NS   hash   the caller's name of a grant -> its window
    done:TENURE        for a day: up to when a tenure that ended was charged
"""

import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, fields, replace
from typing import Any, Self, TypeVar

import msgspec

from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.ledger.connection import LedgerConnection, unpack
from shared.ledger.rows.lease_rows import decode_lease
from shared.model.budget import (
    Account,
    AccountChange,
    AccountUpdate,
    Budget,
    BudgetState,
    BudgetWindow,
    ChargedLease,
    ChargeEntry,
    Journal,
    JournalEntry,
    StoredBudgetState,
)
from shared.model.names import Namespace

R = TypeVar("R")

PAGE = 500
FAR_MS = 1 << 52
DONE_KEPT_S = 86_400
"""A lease that was given back may come again from its pod's copy; it is not charged twice."""


class Budgets:
    """The accounts of all namespaces."""

    def __init__(self, connection: LedgerConnection, prefix: str) -> None:
        self._connection = connection
        self._prefix = prefix

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str,
        *,
        ledger_prefix: str = "lh:",
        prefix: str = "lh-budget:",
        credentials: ClientCredentials = NO_CREDENTIALS,
    ) -> AsyncIterator[Self]:
        """Open the budgets beside the ledger with the prefix `ledger`; connects when used."""
        async with LedgerConnection(
            url, prefix=ledger_prefix, credentials=credentials
        ) as connection:
            yield cls(connection, prefix)

    def unready_reason(self) -> str | None:
        """Say why the server did not serve the last call, or None."""
        return self._connection.unready_reason

    # The journal of tenures

    async def unread_journal(self, most: int = 200) -> Journal:
        """Read what happened to leases since it was taken in last.

        Raises UnavailableError while the ledger of leases is being rebuilt.
        """
        packed, *values = await self._connection.run_raw("budget_journal", self._prefix, most)
        epoch, now, known, cursor, lost, whole, rows = unpack(packed)
        following = iter(values)
        moments = tuple(
            JournalEntry(
                at_ms=_ms_of(entry),
                kind=kind,
                leases=tuple(decode_lease(next(following)) for _ in range(int(count))),
            )
            for entry, kind, count in rows
        )
        last = rows[-1][0] if rows else cursor
        return Journal(
            generation=epoch,
            known_generation=known,
            cursor=cursor,
            lost=lost,
            entries=moments,
            last=last,
            horizon_ms=max(int(now), _ms_of(last)) if whole else None,
        )

    async def apply_journal(self, journal: Journal, taken: Iterable[AccountChange]) -> bool:
        """Write what the journal means and move the cursor past it; False if another did."""
        commands: list[list[str]] = []
        guards: list[list[str]] = []
        revisions = f"{self._prefix}revisions"
        for one in taken:
            name = one.namespace
            if one.revision is not None:
                guards.append([revisions, name, str(one.revision) if one.revision else ""])
            for tenure in one.held:
                commands += [
                    ["HSETNX", self._key("tenures", name), tenure.id, _held_text(tenure)],
                    ["HSETNX", self._key("charged", name), tenure.id, str(tenure.charged_ms)],
                    ["HDEL", self._key("ended", name), tenure.id],
                ]
            commands += [
                ["HSET", self._key("ended", name), id_, str(at)] for id_, at in one.ended.items()
            ]
            commands.append(["HINCRBY", revisions, name, "1"])
        meta = f"{self._prefix}journal"
        commands += [
            ["HSET", meta, "generation", journal.generation, "cursor", journal.last],
            ["XTRIM", f"{self._connection.prefix}tenures", "MINID", journal.last],
        ]
        before = journal.cursor if journal.known_generation == journal.generation else None
        guards.append([meta, "generation", journal.known_generation])
        if before is not None:
            guards.append([meta, "cursor", before])
        return await self._write(guards, commands)

    # Accounts

    async def revisions(self) -> dict[Namespace, int]:
        """Return every account's revision."""
        found = await self._look("revisions")
        return {Namespace(name): int(number) for name, number in _pairs(found)}

    async def load(self, wanted: Mapping[Namespace, int | None]) -> list[Account]:
        """Load accounts with their open windows, and all windows begun since an instant in ms.

        A namespace that nobody knows gets an empty account.
        """
        rows = [(name, FAR_MS if since is None else since) for name, since in wanted.items()]
        accounts = []
        for at in range(0, len(rows), PAGE):
            found = await self._connection.run(
                "budget_load", self._prefix, rows[at : at + PAGE], state="any"
            )
            accounts += [_account(row) for row in found]
        return accounts

    async def charged_until(self, tenures: Sequence[str]) -> dict[str, int]:
        """Return up to when those of the tenures are charged that ended during the last day."""
        keys = [self._key("done", id_) for id_ in tenures]
        found = await self._look("charged", keys) if keys else []
        return {id_: int(at) for id_, at in zip(tenures, found, strict=True) if at}

    async def windows(self, namespace: Namespace) -> list[BudgetWindow]:
        """Return all windows of a namespace, by start."""
        found = [_read(BudgetWindow, text) for text in await self._look("windows", namespace)]
        return sorted(found, key=lambda window: window.place)

    async def save(self, update: AccountUpdate, *, kept_since_ms: int | None = None) -> bool:
        """Write one step; False if the account has moved on since it was decided.

        Entries and closed windows from before `kept_since_ms` are cut off.
        """
        name = update.namespace
        held, charged, ended = (self._key(key, name) for key in ("tenures", "charged", "ended"))
        commands: list[list[str]] = []
        for window in update.windows:
            commands += [
                ["HSET", self._key("windows", name), window.id, _text(window)],
                ["ZADD", self._key("starts", name), str(window.start_ms), window.id],
            ]
        if update.windows:
            commands.append(["HSET", f"{self._prefix}open", name, update.windows[-1].id])
        commands += [["HSET", charged, id_, str(at)] for id_, at in update.charged.items()]
        commands += [["HDEL", key, id_] for id_ in update.ended for key in (held, charged, ended)]
        commands += [
            ["SET", self._key("done", id_), str(at), "EX", str(DONE_KEPT_S)]
            for id_, at in update.ended.items()
        ]
        entries = self._key("entries", name)
        commands += [["XADD", entries, "*", "e", _text(entry)] for entry in update.entries]
        old: list[str] = []
        if kept_since_ms is not None and update.windows:
            commands.append(["XTRIM", entries, "MINID", "~", str(kept_since_ms)])
            old = [self._key("starts", name), self._key("windows", name)]
            old += [update.windows[-1].id, str(kept_since_ms)]
        if update.state is not None:
            standings = f"{self._prefix}states"
            commands.append(["HSET", standings, name, _text(update.state)])
        if update.budget is not None:
            text = msgspec.json.encode(update.budget).decode()
            commands.append(["HSET", f"{self._prefix}budgets", name, text])
        revisions = f"{self._prefix}revisions"
        guards = [[revisions, name, str(update.revision) if update.revision else ""]]
        if update.grant_key:
            grants = self._key("grants", name)
            guards.append([grants, update.grant_key, ""])
            commands.append(["HSET", grants, update.grant_key, update.windows[-1].id])
        commands.append(["HINCRBY", revisions, name, "1"])
        return await self._write(guards, commands, old)

    async def entries(
        self, namespace: Namespace, *, after: str = "", most: int = PAGE
    ) -> list[ChargeEntry]:
        """Return the entries after the one named, oldest first."""
        rows = await self._look("entries", namespace, after, most)
        return [_entry(id_, text) for id_, text in rows]

    async def now_ms(self) -> int:
        """Return the instant by the server's clock."""
        return int(await self._look("now"))

    async def acquire_lock(self, name: str, *, every_ms: int) -> bool:
        """Return whether the caller is the first to ask by this name within the time."""
        return bool(await self._look("lock", name, every_ms))

    async def _write(
        self,
        guards: Sequence[Sequence[str]],
        commands: Sequence[Any],
        old: Sequence[str] = (),
    ) -> bool:
        done = await self._connection.run("budget_write", guards, commands, old, state="any")
        return bool(done)

    async def _look(self, what: str, *more: object) -> Any:
        return await self._connection.run("budget_query", self._prefix, what, *more, state="any")

    def _key(self, kind: str, namespace: str) -> str:
        return f"{self._prefix}{kind}:{namespace}"


def _ms_of(entry: str) -> int:
    return int(entry.partition("-")[0])


def _pairs(flat: Sequence[str]) -> Iterable[tuple[str, str]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _text(value: Any) -> str:
    """Write a dataclass as JSON, without what is as by default."""
    known = {each.name: each.default for each in fields(value)}
    said = {key: each for key, each in asdict(value).items() if each != known[key]}
    return json.dumps(said, separators=(",", ":"))


def _read(kind: type[R], text: str) -> R:
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: each for key, each in json.loads(text).items() if key in known})


def _held_text(tenure: ChargedLease) -> str:
    said = {key: each for key, each in asdict(tenure).items() if key not in _ELSEWHERE}
    return json.dumps(said, separators=(",", ":"))


_ELSEWHERE = ("id", "charged_ms", "ended_ms")


def _entry(id_: str, text: str) -> ChargeEntry:
    said = json.loads(text)
    known = {each.name for each in fields(ChargeEntry)}
    return ChargeEntry(
        **{key: each for key, each in said.items() if key in known}
        | {"id": id_, "ts_ms": _ms_of(id_)}
    )


def _account(row: Sequence[Any]) -> Account:
    namespace, revision, held, charged, ended, standing, windows, budget = row
    until, over = dict(_pairs(charged)), dict(_pairs(ended))
    known = {each.name for each in fields(ChargedLease)}.difference(_ELSEWHERE)
    tenures = tuple(
        ChargedLease(
            id=id_,
            charged_ms=int(until[id_]),
            ended_ms=int(over[id_]) if id_ in over else None,
            **{key: each for key, each in json.loads(text).items() if key in known},
        )
        for id_, text in _pairs(held)
    )
    known_windows = {
        window.id: window for window in (_read(BudgetWindow, text) for text in windows)
    }
    stood = _read(StoredBudgetState, standing) if standing else StoredBudgetState()
    return Account(
        namespace=Namespace(namespace),
        revision=int(revision or 0),
        leases=tuple(sorted(tenures, key=lambda tenure: (tenure.since_ms, tenure.id))),
        windows=tuple(sorted(known_windows.values(), key=lambda each: each.place)),
        state=replace(stood, state=BudgetState(stood.state)),
        budget=msgspec.json.decode(budget, type=Budget) if budget else None,
    )

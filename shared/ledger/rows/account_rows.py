"""Budget accounts as stored: each `AccountRecord` as JSON, and the commands of a write; pure.

journal      hash    generation (of the ledger of leases), cursor (the last entry of its journal of
tenures that was taken over)
revisions    hash    namespace -> revision
states, budgets  hashes  namespace -> JSON
tenures:NS   hash    tenure -> JSON as it began;   charged:NS, ended:NS  hashes  tenure -> ms
windows:NS   hash    window -> JSON;   starts:NS  zset  window -> start
open         hash    namespace -> its open window
entries:NS   stream  append only; ids are instants of the server's clock
grant:NS:KEY hash    window -> that of a grant with this idempotency key; for a month
cost         hash    at (until when costs are recorded, ms), sizes; generation, cursor as of journal
costs        hash    start of an hour in ms -> JSON
done:TENURE  string  for a day: until when a tenure that ended was charged
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import structs

from shared.ledger.rows.lease_rows import text
from shared.model.budgets.budget import (
    FIRST_STATE,
    Account,
    AccountChange,
    AccountUpdate,
    Budget,
    BudgetWindow,
    ChargedLease,
    ChargeEntry,
    Journal,
    StoredBudgetState,
)
from shared.model.budgets.cost_records import CostMark
from shared.model.names import Namespace

DONE_TTL_S = 86_400
"""A released lease may return from the copy on its pod; it is not charged twice."""
GRANT_TTL_S = 30 * 86_400
"""A request for a grant that is repeated within this time adds it once."""


@dataclass(slots=True)
class AccountWrite:
    """Guards must be unchanged since they were read."""

    guards: list[Sequence[str]] = field(default_factory=list)
    """Key of a hash, field, and value as it was read."""
    commands: list[Sequence[str]] = field(default_factory=list)
    old_windows: Sequence[str] = ()
    """Keys of windows by start and of windows, the open window, and the instant before which others
    are deleted."""


class AccountKeys:
    def __init__(self, ledger_prefix: str) -> None:
        self.tenures = f"{ledger_prefix}tenures"
        self.prefix = prefix = f"{ledger_prefix.removesuffix(':')}-budget:"
        self.journal = f"{prefix}journal"
        self.cost = f"{prefix}cost"
        self.costs = f"{prefix}costs"
        self.revisions = f"{prefix}revisions"
        self.states = f"{prefix}states"
        self.budgets = f"{prefix}budgets"
        self.open = f"{prefix}open"

    def of(self, kind: str, name: str) -> str:
        return f"{self.prefix}{kind}:{name}"


def journal_write(
    keys: AccountKeys, journal: Journal, changes: Iterable[AccountChange]
) -> AccountWrite:
    write = AccountWrite()
    for change in changes:
        name = change.namespace
        ended = keys.of("ended", name)
        if change.revision is not None:
            write.guards.append(_revision_guard(keys, name, change.revision))
        for lease in change.held:
            write.commands += [
                ("HSETNX", keys.of("tenures", name), lease.id, text(lease)),
                ("HSETNX", keys.of("charged", name), lease.id, str(lease.charged_ms)),
                ("HDEL", ended, lease.id),
            ]
        write.commands += [("HSET", ended, id_, str(at)) for id_, at in change.ended.items()]
        write.commands.append(("HINCRBY", keys.revisions, name, "1"))
    write.commands.append(
        ("HSET", keys.journal, "generation", journal.generation, "cursor", journal.last)
    )
    write.guards.append((keys.journal, "generation", journal.known_generation))
    if journal.known_generation == journal.generation:
        write.guards.append((keys.journal, "cursor", journal.cursor))
    return write


def cost_write(
    keys: AccountKeys, journal: Journal, before: CostMark, after: CostMark
) -> AccountWrite:
    """Record hours, delete old ones, and trim the journal to what both of its readers need."""
    write = AccountWrite(guards=[(keys.cost, "at", str(before.at_ms or ""))])
    mark = ("at", str(after.at_ms), "sizes", after.sizes)
    write.commands.append(
        ("HSET", keys.cost, *mark, "generation", journal.generation, "cursor", journal.last)
    )
    write.commands += [
        ("HSET", keys.costs, str(start), text(hour)) for start, hour in after.hours.items()
    ]
    write.commands += [("HDEL", keys.costs, str(start)) for start in after.expired]
    read = min(journal.last, before.journal_cursor, key=_entry_order)
    write.commands.append(("XTRIM", keys.tenures, "MINID", read))
    return write


def _entry_order(entry_id: str) -> tuple[int, int]:
    at_ms, _, number = entry_id.partition("-")
    return int(at_ms), int(number)


def update_write(
    keys: AccountKeys, update: AccountUpdate, *, kept_since_ms: int | None
) -> AccountWrite:
    name = update.namespace
    write = AccountWrite(
        guards=[_revision_guard(keys, name, update.revision)],
        commands=[*_window_commands(keys, update), *_tenure_commands(keys, update)],
    )
    entries = keys.of("entries", name)
    write.commands += [("XADD", entries, "*", "e", text(entry)) for entry in update.entries]
    if kept_since_ms is not None and update.windows:
        write.commands.append(("XTRIM", entries, "MINID", "~", str(kept_since_ms)))
        starts = keys.of("starts", name)
        windows = keys.of("windows", name)
        write.old_windows = (starts, windows, update.windows[-1].id, str(kept_since_ms))
    if update.state is not None:
        write.commands.append(("HSET", keys.states, name, text(update.state)))
    if update.budget is not None:
        write.commands.append(("HSET", keys.budgets, name, text(update.budget)))
    if update.grant_key:
        grant = keys.of("grant", f"{name}:{update.grant_key}")
        write.guards.append((grant, "window", ""))
        write.commands.append(("HSET", grant, "window", update.windows[-1].id))
        write.commands.append(("EXPIRE", grant, str(GRANT_TTL_S)))
    write.commands.append(("HINCRBY", keys.revisions, name, "1"))
    return write


def _revision_guard(keys: AccountKeys, namespace: Namespace, revision: int) -> Sequence[str]:
    return (keys.revisions, namespace, str(revision) if revision else "")


def _window_commands(keys: AccountKeys, update: AccountUpdate) -> Iterable[Sequence[str]]:
    windows, starts = (keys.of(kind, update.namespace) for kind in ("windows", "starts"))
    for window in update.windows:
        yield ("HSET", windows, window.id, text(window))
        yield ("ZADD", starts, str(window.start_ms), window.id)
    if update.windows:
        yield ("HSET", keys.open, update.namespace, update.windows[-1].id)


def _tenure_commands(keys: AccountKeys, update: AccountUpdate) -> Iterable[Sequence[str]]:
    name = update.namespace
    hashes = [keys.of(kind, name) for kind in ("tenures", "charged", "ended")]
    for id_, at in update.charged.items():
        yield ("HSET", keys.of("charged", name), id_, str(at))
    for id_, at in update.ended.items():
        yield from (("HDEL", key, id_) for key in hashes)
        yield ("SET", keys.of("done", id_), str(at), "EX", str(DONE_TTL_S))


def decode_account(row: Sequence[Any]) -> Account:
    namespace, revision, tenures, charged, ended, state, windows, budget = row
    charged_ms = dict(pairs(charged))
    ended_ms = dict(pairs(ended))
    leases = (
        _decode_tenure(stored, charged_ms[id_], ended_ms.get(id_)) for id_, stored in pairs(tenures)
    )
    by_id = {window.id: window for window in map(decode_window, windows)}
    return Account(
        namespace=Namespace(namespace),
        revision=int(revision or 0),
        leases=tuple(sorted(leases, key=lambda lease: (lease.since_ms, lease.id))),
        windows=tuple(sorted(by_id.values(), key=lambda window: window.place)),
        state=msgspec.json.decode(state, type=StoredBudgetState) if state else FIRST_STATE,
        budget=msgspec.json.decode(budget, type=Budget) if budget else None,
    )


def decode_window(stored: str) -> BudgetWindow:
    return msgspec.json.decode(stored, type=BudgetWindow)


def decode_charge_entry(id_: str, stored: str) -> ChargeEntry:
    """The ID is the entry's instant."""
    entry = msgspec.json.decode(stored, type=ChargeEntry)
    return structs.replace(entry, id=id_, ts_ms=instant_of(id_))


def instant_of(entry_id: str) -> int:
    return int(entry_id.partition("-")[0])


def pairs(flat: Sequence[str]) -> Iterable[tuple[str, str]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _decode_tenure(stored: str, charged_ms: str, ended_ms: str | None) -> ChargedLease:
    return structs.replace(
        msgspec.json.decode(stored, type=ChargedLease),
        charged_ms=int(charged_ms),
        ended_ms=None if ended_ms is None else int(ended_ms),
    )

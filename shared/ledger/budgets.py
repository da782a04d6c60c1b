"""Budget accounts in Redis or Valkey, beside the ledger of leases.

A write does nothing if what it was decided on has changed: any number of timekeepers may run, crash
and retry. All methods raise UnavailableError when the server does not respond.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from shared.ledger.connection import LedgerConnection, LedgerPart, in_batches, unpack
from shared.ledger.rows.account_rows import (
    AccountKeys,
    AccountWrite,
    cost_write,
    decode_account,
    decode_charge_entry,
    decode_window,
    instant_of,
    journal_write,
    pairs,
    update_write,
)
from shared.ledger.rows.lease_rows import decode_lease
from shared.ledger.rows.unreadable import readable
from shared.model.budgets.budget import (
    Account,
    AccountChange,
    Accounts,
    AccountUpdate,
    BudgetWindow,
    ChargeEntry,
    Journal,
    JournalEntry,
    PolicyType,
)
from shared.model.budgets.cost_records import CostHour, CostMark, hours_of
from shared.model.names import Namespace

PAGE_SIZE = 500
_decode_hour = msgspec.json.Decoder(CostHour).decode
NO_EARLIER_WINDOWS_MS = 1 << 52


class Budgets(LedgerPart):
    def __init__(self, connection: LedgerConnection) -> None:
        super().__init__(connection)
        self._keys = AccountKeys(connection.prefix)
        self._damaged: set[Namespace] = set()
        """Since the last `discard_damaged`."""

    # The journal of tenures

    async def unread_journal(self, most: int = 200, *, reader: str = "journal") -> Journal:
        """Read changes of leases after the cursor of a reader: `journal` or `cost`.

        Raises UnavailableError while the ledger of leases is being rebuilt.
        """
        packed, *values = await self._connection.run_raw("budget_journal", most, reader)
        generation, now, known_generation, cursor, is_lost, is_complete, rows = unpack(packed)
        leases = iter(values)
        entries = tuple(
            JournalEntry(
                at_ms=instant_of(entry_id),
                kind=kind,
                leases=tuple(readable(decode_lease, list(islice(leases, int(count))))),
            )
            for entry_id, kind, count in rows
        )
        last = rows[-1][0] if rows else cursor
        return Journal(
            generation=generation,
            known_generation=known_generation,
            cursor=cursor,
            lost=is_lost,
            entries=entries,
            last=last,
            horizon_ms=max(int(now), instant_of(last)) if is_complete else None,
        )

    async def apply_journal(self, journal: Journal, changes: Iterable[AccountChange]) -> bool:
        """Return False, with nothing written, if another caller has moved the cursor."""
        return await self._write(journal_write(self._keys, journal, changes))

    # Costs

    async def costs(self, from_ms: int, to_ms: int) -> CostMark:
        """Return until when costs are recorded, and the hours that the interval touches."""
        hours: dict[int, CostHour] = {}
        mark = CostMark()
        for batch in in_batches([*hours_of(from_ms, to_ms)] or [0], PAGE_SIZE):
            (at, sizes), texts, cursor = await self._read("costs", batch)
            rows = [(start, text) for start, text in zip(batch, texts, strict=True) if text]
            hours |= readable(lambda row: (row[0], _decode_hour(row[1])), rows)
            mark = CostMark(
                at_ms=int(at or 0), sizes=sizes or "", hours=hours, journal_cursor=cursor or "0-0"
            )
        return mark

    async def cost_hours(self) -> list[int]:
        return list(readable(int, await self._read("cost_hours")))

    async def record_costs(self, journal: Journal, before: CostMark, after: CostMark) -> bool:
        """Return False, with nothing written, if another caller has moved the cursor."""
        return await self._write(cost_write(self._keys, journal, before, after))

    # Accounts

    async def revisions(self) -> dict[Namespace, int]:
        entries = list(pairs(await self._read("revisions")))
        revisions = dict(readable(lambda row: (Namespace(row[0]), int(row[1])), entries))
        self._damaged.update(Namespace(name) for name, _ in entries if name not in revisions)
        return revisions

    async def discard_damaged(self) -> list[str]:
        """Delete accounts that could not be read, and stray records; return what was deleted.

        A deleted account counts as lost, and so does the journal.
        """
        discarded = await self._discard()
        await self.revisions()
        return discarded + (await self._discard() if self._damaged else [])

    async def _discard(self) -> list[str]:
        damaged = sorted(self._damaged)
        discarded: list[str] = await self._run("discard", damaged)
        self._damaged.difference_update(damaged)
        return discarded

    async def load(self, wanted: Mapping[Namespace, int | None]) -> list[Account]:
        """Load accounts with all windows since an instant in ms, or the open ones for None.

        An unknown namespace gets an empty account.
        """
        rows = [
            (name, NO_EARLIER_WINDOWS_MS if since is None else since)
            for name, since in wanted.items()
        ]
        accounts: list[Account] = []
        for batch in in_batches(rows, PAGE_SIZE):
            accounts += readable(decode_account, await self._read("load", batch))
        self._damaged.update(wanted.keys() - {account.namespace for account in accounts})
        return accounts

    async def all_accounts(self, names: Iterable[Namespace]) -> Accounts:
        """Return accounts with the windows that their balances need; sliding ones need several."""
        now_ms = await self.now_ms()
        accounts = await self.load(dict.fromkeys(names))
        sliding_since = {
            account.namespace: now_ms
            - account.budget.policy.length_ms
            - account.budget.policy.bucket_ms
            for account in accounts
            if account.budget is not None and account.budget.policy.type is PolicyType.SLIDING
        }
        complete = {account.namespace: account for account in await self.load(sliding_since)}
        return Accounts(
            now_ms=now_ms,
            accounts=tuple(complete.get(account.namespace, account) for account in accounts),
        )

    async def charged_until(self, tenures: Sequence[str]) -> dict[str, int]:
        """Return instants of tenures that ended during the last day."""
        charged: dict[str, int] = {}
        for batch in in_batches(tenures, PAGE_SIZE):
            rows = await self._read("charged", [self._keys.of("done", id_) for id_ in batch])
            ended = ((id_, at) for id_, at in zip(batch, rows, strict=True) if at)
            charged |= readable(lambda row: (row[0], int(row[1])), ended)
        return charged

    async def windows(self, namespace: Namespace) -> list[BudgetWindow]:
        windows = readable(decode_window, await self._read("windows", namespace))
        return sorted(windows, key=lambda window: window.place)

    async def save(self, update: AccountUpdate, *, kept_since_ms: int | None = None) -> bool:
        """Return False if the account has changed since the step was decided.

        Entries and closed windows from before `kept_since_ms` are deleted.
        """
        return await self._write(update_write(self._keys, update, kept_since_ms=kept_since_ms))

    async def entries(
        self, namespace: Namespace, *, after: str = "", most: int = PAGE_SIZE
    ) -> list[ChargeEntry]:
        rows = await self._read("entries", namespace, after, most)
        return list(readable(lambda row: decode_charge_entry(*row), rows))

    async def all_entries(
        self, namespace: Namespace, *, after: str = ""
    ) -> AsyncIterator[ChargeEntry]:
        while page := await self.entries(namespace, after=after):
            for entry in page:
                yield entry
            after = page[-1].id

    async def now_ms(self) -> int:
        return int(await self._read("now"))

    async def acquire_lock(self, name: str, *, every_ms: int) -> bool:
        return bool(await self._run("lock", name, every_ms))

    async def _write(self, write: AccountWrite) -> bool:
        parts = (write.guards, write.commands, write.old_windows)
        return bool(await self._run("write", *parts))

    async def _run(self, *args: object) -> Any:
        return await self._connection.run("budgets", *args, state="any")

    async def _read(self, *args: object) -> Any:
        return await self._connection.run("read_budgets", *args, state="any")

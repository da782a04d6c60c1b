"""Applies the ledger's journal of leases to the accounts, from entries or from all live leases."""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from services.timekeeper.accounts.journal import (
    JournalChanges,
    charged_lease_id,
    journal_changes,
    reconcile,
)
from services.timekeeper.config.budget_sources import ConfiguredBudgets
from services.timekeeper.metrics import RUN_TIME_RATIO, VIOLATIONS
from shared.ledger.budgets import Budgets
from shared.ledger.leases import RedisLeases
from shared.model.budgets.budget import Account, AccountChange, Journal
from shared.model.budgets.weights import LeaseWeight, weigh
from shared.model.errors import UnavailableError
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import Namespace

logger = logging.getLogger(__name__)

JOURNAL_PAGE = 200
WHOLE_JOURNAL = 200_000


class JournalReader:
    def __init__(
        self,
        *,
        store: Budgets,
        ledger: RedisLeases,
        configuration: ConfiguredBudgets,
        factors: Mapping[str, Fraction],
    ) -> None:
        self.store = store
        self.ledger = ledger
        self.configuration = configuration
        self.factors = factors
        self.ended: deque[tuple[Lease, float]] = deque(maxlen=WHOLE_JOURNAL)
        """With the seconds that their pods ran, for `learn_run_times`."""

    async def learn_run_times(self) -> None:
        if not self.ended:
            return
        learned = await self.ledger.run_times.load()
        for lease, run_s in self.ended:
            expected_s = lease.term.expected_run_s or learned.expected_s(lease)
            if expected_s is not None:
                source = "author" if lease.term.expected_run_s else "learned"
                RUN_TIME_RATIO.labels(source).observe(run_s / expected_s)
        learned.learn(self.ended)
        self.ended.clear()
        await self.ledger.run_times.save(learned)

    async def apply(self, known_ms: int) -> int:
        """Return the instant up to which the journal is complete.

        Until `known_ms`, accounts are known to be complete.
        """
        while True:
            journal = await self.store.unread_journal(JOURNAL_PAGE)
            if journal.lost or journal.known_generation != journal.generation:
                await self._reconcile(known_ms)
                continue
            if journal.entries:
                await self._apply_entries(journal)
            elif journal.horizon_ms is not None:
                return journal.horizon_ms

    async def _apply_entries(self, journal: Journal) -> None:
        restored = [
            lease for entry in journal.entries if entry.kind == "restored" for lease in entry.leases
        ]
        accounts, counted_ms = await self._charged_so_far(restored) if restored else ({}, {})
        changes = journal_changes(journal.entries, self._weigh, counted_ms)
        await self._write_changes(journal, changes, accounts)

    async def _reconcile(self, known_ms: int) -> None:
        """The journal was lost or trimmed."""
        live = [lease async for page in self.ledger.load_all() for lease in page]
        journal = await self.store.unread_journal(WHOLE_JOURNAL)
        if journal.lost:
            logger.error("the journal was trimmed before it was read: ends of leases are lost")
            VIOLATIONS.labels("journal-cut").inc()
        journaled = [lease for entry in journal.entries for lease in entry.leases]
        accounts, counted_ms = await self._charged_so_far([*live, *journaled])
        changes = journal_changes(journal.entries, self._weigh, counted_ms)
        reconcile(changes, live, accounts.values(), self._weigh, counted_ms, known_ms=known_ms)
        await self._write_changes(journal, changes, accounts)

    async def _charged_so_far(
        self, leases: Sequence[Lease]
    ) -> tuple[dict[Namespace, Account], dict[str, int]]:
        names = {*await self.store.revisions(), *(lease.namespace for lease in leases)}
        accounts = {
            account.namespace: account for account in await self.store.load(dict.fromkeys(names))
        }
        if unreadable := sorted(names - accounts.keys()):
            raise UnavailableError(
                f"the accounts of {', '.join(unreadable[:5])} cannot be read; they are restored"
            )
        ids = {charged_lease_id(lease): lease.namespace for lease in leases}
        done = await self.store.charged_until(list(ids))
        counted_ms = {
            id_: max(accounts[name].state.restored_ms, done.get(id_, 0))
            for id_, name in ids.items()
        }
        return accounts, counted_ms

    async def _write_changes(
        self,
        journal: Journal,
        changes: Mapping[Namespace, JournalChanges],
        accounts: Mapping[Namespace, Account],
    ) -> None:
        account_changes = [
            AccountChange(
                namespace=name,
                held=tuple(of_namespace.charged.values()),
                ended=of_namespace.ended,
                revision=accounts[name].revision if name in accounts else None,
            )
            for name, of_namespace in changes.items()
            if of_namespace.charged or of_namespace.ended
        ]
        if await self.store.apply_journal(journal, account_changes):
            self.ended.extend(_run_times(journal))

    def _weigh(self, lease: Lease) -> LeaseWeight:
        budget = self.configuration.budget_of(lease.namespace)
        is_priced = budget.currency and not budget.unreadable
        prices = self.configuration.prices.prices.models if is_priced else self.factors
        return weigh(lease, budget, prices)


def _run_times(journal: Journal) -> Iterator[tuple[Lease, float]]:
    """With the seconds that they ran."""
    for entry in journal.entries:
        for lease in entry.leases:
            has_run = lease.activated_at > 0 and lease.claim is None
            if entry.kind == "ended" and has_run and lease.state is LeaseState.RELEASED:
                yield lease, entry.at_ms / 1000 - lease.activated_at

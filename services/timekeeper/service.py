"""The timekeeper: takes in the journal of leases, charges namespaces, says how budgets stand.

Any number of replicas may run: every step is decided on a revision and refused on any other, and
all time is the ledger's own clock, so that neither pauses nor clocks of hosts change a total.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Protocol

from services.timekeeper.accounts.accrual import advance, applied, restored, trimmed
from services.timekeeper.accounts.budget import balance
from services.timekeeper.accounts.journal import Intake, intake, reconcile, tenure_id
from services.timekeeper.accounts.weights import Card, Weighed, weigh
from services.timekeeper.accounts.windows import kept_since_ms
from services.timekeeper.report.budget_changes import differs, told
from shared.model.budget import (
    Account,
    AccountChange,
    AccountUpdate,
    Balance,
    Budget,
    BudgetWindow,
    Journal,
    PolicyType,
)
from shared.model.clock import Clock
from shared.model.errors import ConflictError
from shared.model.events.event import Event
from shared.model.events.pod_events import BudgetChanged
from shared.model.lease import Lease
from shared.model.ledger import Snapshot
from shared.model.names import DeviceUuid, Namespace
from shared.runtime.service import loops, publishes

logger = logging.getLogger(__name__)

TELL_AGAIN_MS = 60_000
TAKE_IN = 200
"""Entries of the journal taken in at once."""
ALL = 200_000
NEVER_S = 3600.0


class Store(Protocol):
    """The accounts; `shared.ledger.budgets.Budgets` is it."""

    async def unread_journal(self, most: int = TAKE_IN) -> Journal:
        """Read what happened to leases since it was taken in last."""
        ...

    async def apply_journal(self, journal: Journal, taken: Iterable[AccountChange]) -> bool:
        """Write what that means; False if another did."""
        ...

    async def revisions(self) -> dict[Namespace, int]:
        """Return every account's revision."""
        ...

    async def load(self, wanted: Mapping[Namespace, int | None]) -> list[Account]:
        """Load accounts, with windows begun since an instant besides the open one."""
        ...

    async def charged_until(self, tenures: Sequence[str]) -> dict[str, int]:
        """Return up to when tenures that ended lately are charged."""
        ...

    async def save(self, update: AccountUpdate, *, kept_since_ms: int | None = None) -> bool:
        """Write one step; False if the account has moved on."""
        ...

    async def acquire_lock(self, name: str, *, every_ms: int) -> bool:
        """Return whether the caller is the first to ask by this name within the time."""
        ...


class Ledger(Protocol):
    """Live leases and the devices they are on."""

    def load_all(self) -> AsyncIterator[list[Lease]]:
        """Yield all live leases."""
        ...

    async def snapshot(self) -> Snapshot:
        """Return all nodes with their devices."""
        ...


class Copy(Protocol):
    """What an account's last copy outside the store says."""

    @property
    def window(self) -> BudgetWindow:
        """The window that was open, with its use and its level."""
        ...

    @property
    def at_ms(self) -> int:
        """When it was written."""
        ...


class Configuration(Protocol):
    """The budgets as configured now."""

    def budget_of(self, namespace: Namespace) -> Budget:
        """Return a namespace's budget; without any it has no limit."""
        ...

    def namespaces(self) -> Iterable[Namespace]:
        """Return the namespaces that have budgets of their own."""
        ...

    def copies(self) -> Mapping[Namespace, Copy]:
        """Return the copies of accounts that were seen."""
        ...

    async def ready(self) -> None:
        """Return once everything that can be known is known."""
        ...

    async def follow(self) -> None:
        """Keep it as it is configured, for ever."""
        ...


class Publishing(Protocol):
    """The bus."""

    async def publish(self, events: Sequence[Event]) -> None:
        """Publish events."""
        ...


class Telling(Protocol):
    """Who is told how budgets stand, besides the bus: objects' statuses, metrics."""

    async def tell(self, budget: Budget, account: Account, seen: Balance, *, changed: bool) -> None:
        """Hear how a budget stands."""
        ...

    def late(self, behind_ms: int) -> None:
        """Hear how much later than usual something was charged."""
        ...

    def mistake(self, kind: str, count: int) -> None:
        """Hear of something that must not happen."""
        ...


class RenewedCertificate(Protocol):
    """What the REST interface shows, where it speaks TLS."""

    async def run(self, pause: Callable[[float], Awaitable[None]]) -> None:
        """Keep it valid, until cancelled."""
        ...


@publishes(BudgetChanged)
class Timekeeper:
    """Keeps a copy of every account, and drops it where another replica has written."""

    def __init__(
        self,
        *,
        store: Store,
        ledger: Ledger,
        configuration: Configuration,
        bus: Publishing,
        telling: Telling,
        clock: Clock,
        factors: Mapping[str, Fraction],
        tick_s: float,
        charge_every_s: float,
        keep_days: int,
        certificate: RenewedCertificate | None = None,
    ) -> None:
        self.store = store
        self.ledger = ledger
        self.configuration = configuration
        self.bus = bus
        self.telling = telling
        self.clock = clock
        self.factors = factors
        self.tick_s = tick_s
        self.charge_every_ms = round(charge_every_s * 1000)
        self.keep_days = keep_days
        self.certificate = certificate
        self.accounts: dict[Namespace, Account] = {}
        self.cards: dict[DeviceUuid, Card] = {}
        self.weighted: set[Namespace] = set()
        """Namespaces that had another share than 1, so that its end is told, too."""
        self.horizon_ms = 0
        self.has_counted = False

    @loops
    async def follow_configuration(self) -> None:
        """Keep the budgets as they are configured."""
        await self.configuration.follow()

    @loops
    async def keep_time(self) -> None:
        """Count, again and again."""
        await self.configuration.ready()
        while True:
            events = await self.count()
            if events:
                await self.bus.publish(events)
            await self.clock.sleep(self.tick_s)

    @loops
    async def keep_certificate(self) -> None:
        """Keep the certificate of the REST interface valid, if there is one."""
        while self.certificate is None:
            await self.clock.sleep(NEVER_S)
        await self.certificate.run(self.clock.sleep)

    async def count(self) -> list[BudgetChanged]:
        """Take in what happened, bring every account up to it, return what to say about it."""
        await self._restore_lost()
        now_ms = await self._take_in()
        await self._load(now_ms)
        again = await self.store.acquire_lock("tell", every_ms=TELL_AGAIN_MS)
        events: list[BudgetChanged] = []
        for namespace in sorted(self.accounts):
            event = await self._advance(namespace, now_ms, again=again)
            if event is not None:
                events.append(event)
        self.horizon_ms, self.has_counted = now_ms, True
        return events

    def balance_of(self, namespace: Namespace) -> Balance:
        """Return how a namespace stood when it was last counted.

        Raises ConflictError before the first count is complete.
        """
        if not self.has_counted:
            raise ConflictError("nothing was counted yet; ask again in some seconds")
        budget = self.configuration.budget_of(namespace)
        account = self.accounts.get(namespace)
        if account is None or not account.windows:
            empty = Account(namespace=namespace)
            first = advance(empty, budget, self.horizon_ms, charge_every_ms=self.charge_every_ms)
            account = applied(empty, first) if first else empty
        return balance(account, budget, self.horizon_ms)

    async def _restore_lost(self) -> None:
        """Open accounts that the store has lost as their last copies say."""
        copies = self.configuration.copies()
        if not copies:
            return
        known = await self.store.revisions()
        for namespace, copy in copies.items():
            if namespace in known:
                continue
            budget = self.configuration.budget_of(namespace)
            update = restored(
                Account(namespace=namespace), budget, window=copy.window, at_ms=copy.at_ms
            )
            if await self.store.save(update):
                logger.warning(
                    "the account of %s was lost; it goes on from its status of %d ms",
                    namespace,
                    copy.at_ms,
                )

    async def _take_in(self) -> int:
        """Take in the journal to its end; return the instant up to which all is known."""
        while True:
            journal = await self.store.unread_journal(TAKE_IN)
            if journal.lost or journal.known_generation != journal.generation:
                await self._begin_anew()
                continue
            if journal.entries:
                await self._take_moments(journal)
            elif journal.horizon_ms is not None:
                return journal.horizon_ms

    async def _take_moments(self, journal: Journal) -> None:
        again = [
            lease for each in journal.entries if each.kind == "restored" for lease in each.leases
        ]
        accounts, counted_ms = await self._counted(again) if again else ({}, {})
        await self._know_cards(lease for each in journal.entries for lease in each.leases)
        found = intake(journal.entries, self._weigh, counted_ms)
        await self._write_intake(journal, found, accounts)

    async def _begin_anew(self) -> None:
        """Compare with all live leases, because the journal began anew or was cut."""
        live = [lease async for page in self.ledger.load_all() for lease in page]
        journal = await self.store.unread_journal(ALL)
        if journal.lost:
            logger.error("the journal was cut before it was taken in: leases that ended are lost")
            self.telling.mistake("journal-cut", 1)
        told = [lease for each in journal.entries for lease in each.leases]
        await self._know_cards([*live, *told])
        accounts, counted_ms = await self._counted([*live, *told])
        found = intake(journal.entries, self._weigh, counted_ms)
        reconcile(found, live, accounts.values(), self._weigh, counted_ms, seen_ms=self.horizon_ms)
        await self._write_intake(journal, found, accounts)

    async def _counted(
        self, leases: Sequence[Lease]
    ) -> tuple[dict[Namespace, Account], dict[str, int]]:
        """Return all accounts, and up to when these leases are charged if they come again."""
        names = {*await self.store.revisions(), *(lease.namespace for lease in leases)}
        accounts = {each.namespace: each for each in await self.store.load(dict.fromkeys(names))}
        ids = {tenure_id(lease): lease.namespace for lease in leases}
        done = await self.store.charged_until(list(ids))
        counted_ms = {
            id_: max(accounts[name].state.restored_ms, done.get(id_, 0))
            for id_, name in ids.items()
        }
        return accounts, counted_ms

    async def _write_intake(
        self,
        journal: Journal,
        found: Mapping[Namespace, Intake],
        accounts: Mapping[Namespace, Account],
    ) -> None:
        taken = [
            AccountChange(
                namespace=name,
                held=tuple(each.held.values()),
                ended=each.ended,
                revision=accounts[name].revision if name in accounts else None,
            )
            for name, each in found.items()
            if each.held or each.ended
        ]
        await self.store.apply_journal(journal, taken)

    async def _know_cards(self, leases: Iterable[Lease]) -> None:
        wanted = {share.device for lease in leases for share in lease.shares}
        if wanted <= self.cards.keys():
            return
        snapshot = await self.ledger.snapshot()
        for node in snapshot.nodes:
            for device, _ in node.devices:
                self.cards[device.uuid] = Card(memory_mib=device.memory_mib, model=device.model)

    def _weigh(self, lease: Lease) -> Weighed:
        budget = self.configuration.budget_of(lease.namespace)
        return weigh(lease, self.cards, budget, self.factors)

    async def _load(self, now_ms: int) -> None:
        """Have every account as of its newest revision."""
        found = await self.store.revisions()
        names = {*found, *self.configuration.namespaces()}
        stale = {
            name: self._windows_since(name, now_ms)
            for name in names
            if name not in self.accounts or self.accounts[name].revision != found.get(name, 0)
        }
        self.accounts = {name: each for name, each in self.accounts.items() if name in names}
        for account in await self.store.load(stale):
            self.accounts[account.namespace] = account

    def _windows_since(self, namespace: Namespace, now_ms: int) -> int | None:
        policy = self.configuration.budget_of(namespace).policy
        if policy.type is not PolicyType.SLIDING:
            return None
        return now_ms - policy.length_ms - policy.bucket_ms

    async def _advance(
        self, namespace: Namespace, now_ms: int, *, again: bool
    ) -> BudgetChanged | None:
        budget, before = self.configuration.budget_of(namespace), self.accounts[namespace]
        account = before
        update = advance(account, budget, now_ms, charge_every_ms=self.charge_every_ms)
        if update is not None:
            self._report_late(account, now_ms)
            kept = kept_since_ms(budget.policy, now_ms, keep_days=self.keep_days)
            if not await self.store.save(update, kept_since_ms=kept):
                del self.accounts[namespace]
                return None
            account = self.accounts[namespace] = trimmed(applied(account, update), budget, now_ms)
        seen = balance(account, budget, now_ms)
        changed = differs(before.state, account.state)
        await self.telling.tell(budget, account, seen, changed=changed)
        if budget.share != 1:
            self.weighted.add(namespace)
        again = again and (budget.limit_units is not None or namespace in self.weighted)
        reweighted = budget.share != (before.budget.share if before.budget else 1)
        if changed or reweighted or again:
            return told(budget, account, seen, previous=before.state)
        return None

    def _report_late(self, account: Account, now_ms: int) -> None:
        behind = [now_ms - each.charged_ms for each in account.leases]
        backwards = sum(
            each.ended_ms is not None and each.ended_ms < each.charged_ms for each in account.leases
        )
        if backwards:
            self.telling.mistake("ended-before-charged", backwards)
        self.telling.late(max(0, max(behind, default=0) - self.charge_every_ms))

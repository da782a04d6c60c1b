"""The timekeeper: reads the journal of leases, charges namespaces, and publishes budgets.

Any number of replicas may run: every step is refused on another revision than it was decided on.
All times are of the ledger's clock, so no pause and no host's clock changes a total.
"""

import asyncio
import logging
from collections.abc import Sequence

from services.timekeeper.accounts.accrual import (
    advance,
    apply_update,
    grant_update,
    parse_gpu_minutes,
    restore_update,
    retained_since_ms,
    trim_windows,
)
from services.timekeeper.accounts.consequences import missing_units
from services.timekeeper.config.budget_sources import ConfiguredBudgets
from services.timekeeper.cost_recorder import CostRecorder
from services.timekeeper.journal_reader import JournalReader
from services.timekeeper.metrics import CHARGE_DELAY, VIOLATIONS, remove_balance, set_balance
from services.timekeeper.report.budget_reports import budget_changed, is_reportable_change
from services.timekeeper.report.status_publisher import StatusPublisher
from services.timekeeper.settings import TimekeeperSettings, parse_factors
from shared.credentials.certificate_rotation import ServingCertificate
from shared.ledger.budgets import Budgets
from shared.ledger.leases import RedisLeases
from shared.model.budgets.balance import balance
from shared.model.budgets.budget import (
    UNITS_PER_GPU_MINUTE,
    Account,
    Balance,
    Budget,
    PolicyType,
    amount,
)
from shared.model.clock import Clock
from shared.model.errors import ConflictError, RequestError
from shared.model.events.pod_events import BudgetChanged, ResyncRequested
from shared.model.events.request_reply import GrantReply, GrantRequest, UsageRequest
from shared.model.names import Namespace
from shared.runtime.service import answers, handles, loops, publishes

logger = logging.getLogger(__name__)

REPORT_EVERY_MS = 60_000
GRANT_ATTEMPTS = 20
LEARN_EVERY_S = 30.0
"""Interval of readings of how long pods have run."""


@publishes(UsageRequest)
class Timekeeper:
    """An account's copy is dropped when another replica has written it."""

    def __init__(
        self,
        *,
        store: Budgets,
        ledger: RedisLeases,
        configuration: ConfiguredBudgets,
        statuses: StatusPublisher,
        clock: Clock,
        settings: TimekeeperSettings,
        certificate: ServingCertificate | None = None,
        costs: CostRecorder | None = None,
    ) -> None:
        self.store = store
        self.ledger = ledger
        self.journal = JournalReader(
            store=store,
            ledger=ledger,
            configuration=configuration,
            factors=parse_factors(settings.model_factors),
        )
        self.configuration = configuration
        self.statuses = statuses
        self.clock = clock
        self.settings = settings
        self.charge_every_ms = round(settings.charge_every_s * 1000)
        self.certificate = certificate
        self.costs = costs
        self.accounts: dict[Namespace, Account] = {}
        self.with_share: set[Namespace] = set()
        """Namespaces whose share was not 1, so that its reset is published, too."""
        self.horizon_ms = 0
        self.has_counted = False
        self.must_report = True
        """Something that was published, or should have been, may be lost."""

    @loops
    async def watch_configuration(self) -> None:
        await self.configuration.watch()

    @loops
    async def watch_quotas(self) -> None:
        if self.statuses.quotas is None:
            await asyncio.Event().wait()
        else:
            await self.statuses.quotas.watch()

    @loops(every_s=lambda timekeeper: timekeeper.settings.tick_s)
    async def count_periodically(self) -> list[BudgetChanged]:
        await self.configuration.wait_until_synced()
        return await self.count()

    @loops(every_s=lambda timekeeper: timekeeper.settings.tick_s)
    async def record_costs(self) -> None:
        if self.costs is None or not self.has_counted:
            return
        if await self.store.acquire_lock("costs", every_ms=REPORT_EVERY_MS):
            await self.costs.record()

    @loops(every_s=lambda timekeeper: timekeeper.settings.tick_s)
    async def report_quotas(self) -> None:
        await self.statuses.publish_quotas(self.ledger.quotas, round(self.clock.now() * 1000))

    @loops(every_s=LEARN_EVERY_S)
    async def learn_run_times(self) -> None:
        await self.journal.learn_run_times()

    @loops
    async def maintain_certificate(self) -> None:
        if self.certificate is None:
            await asyncio.Event().wait()
        else:
            await self.certificate.run(self.clock.sleep)

    @handles
    async def report_again(self, events: Sequence[ResyncRequested]) -> None:
        self.must_report = True

    async def count(self) -> list[BudgetChanged]:
        """After a count that failed, return the state of every budget: a change may be saved."""
        self.configuration.prices.read()
        await self._discard_damaged()
        await self._restore_lost()
        now_ms = await self.journal.apply(self.horizon_ms)
        await self._load(now_ms)
        is_due = await self.store.acquire_lock("report", every_ms=REPORT_EVERY_MS)
        report, self.must_report = is_due or self.must_report, False
        events: list[BudgetChanged] = []
        try:
            for namespace in sorted(self.accounts):
                event = await self._advance(namespace, now_ms, report=report)
                if event is not None:
                    events.append(event)
        except BaseException:
            self.must_report = True
            raise
        self.horizon_ms = now_ms
        self.has_counted = True
        return events

    def balance_of(self, namespace: Namespace) -> Balance:
        """Raises ConflictError before the first count is complete."""
        if not self.has_counted:
            raise ConflictError("nothing was counted yet; try again in some seconds")
        budget = self.configuration.budget_of(namespace)
        account = self.accounts.get(namespace)
        if account is None or not account.windows:
            empty = Account(namespace=namespace)
            first = advance(empty, budget, self.horizon_ms, charge_every_ms=self.charge_every_ms)
            account = apply_update(empty, first) if first else empty
        return balance(account, budget, self.horizon_ms)

    async def _discard_damaged(self) -> None:
        """They are restored as lost ones."""
        if discarded := await self.store.discard_damaged():
            VIOLATIONS.labels("account-damaged").inc(len(discarded))
            logger.error("deleted from Redis, as it cannot be read: %s", ", ".join(discarded[:20]))

    async def add_grant(
        self, namespace: Namespace, units: int, *, actor: str, reason: str, key: str
    ) -> Balance:
        """Add units once for each key. Raises RequestError without a budget, or ConflictError."""
        if not reason.strip():
            raise RequestError("a grant needs a reason, which the ledger stores")
        if units == 0:
            raise RequestError("a grant of 0 GPU-minutes changes nothing")
        for _ in range(GRANT_ATTEMPTS):
            (account,) = await self.store.load({namespace: None})
            if not account.windows or account.windows[-1].limit_units is None:
                raise RequestError(
                    f"namespace {namespace} has no budget with a limit; create a GPUBudget for it "
                    "first (the timekeeper reads it within seconds)"
                )
            update = grant_update(account, units, actor=actor, reason=reason, key=key)
            saved = await self.store.save(update)
            (after,) = await self.store.load({namespace: None})
            if saved or after.revision == account.revision:
                self.accounts[namespace] = after
                return self.balance_of(namespace)
        raise ConflictError(f"the account of {namespace} changes too often; try again")

    def parse_grant(self, namespace: Namespace, amount: object) -> int:
        """Return the units of GPU-minutes, or of money for a budget in money."""
        in_money = self.configuration.budget_of(namespace).currency
        return parse_gpu_minutes(amount) * (60 if in_money else 1)

    @answers(concurrency=8)
    async def grant(self, request: GrantRequest) -> GrantReply:
        try:
            currency = self.configuration.budget_of(request.namespace).currency
            units = self.parse_grant(request.namespace, request.minutes)
            left = await self.add_grant(
                request.namespace,
                units,
                actor=request.actor,
                reason=request.reason,
                key=request.key,
            )
        except (ConflictError, RequestError) as error:
            return GrantReply(refusal=str(error))
        remaining = left.remaining_units
        missing = missing_units(left, self.configuration.budget_of(request.namespace))
        step = UNITS_PER_GPU_MINUTE * (60 if currency else 1) // 1000
        return GrantReply(
            granted=amount(units, currency),
            remaining="" if remaining is None else amount(remaining, currency),
            missing=amount(missing + step - 1, currency) if missing else "",
        )

    async def _restore_lost(self) -> None:
        copies = self.configuration.status_copies()
        if not copies:
            return
        revisions = await self.store.revisions()
        for namespace, copy in copies.items():
            if namespace in revisions:
                continue
            budget = self.configuration.budget_of(namespace)
            update = restore_update(
                Account(namespace=namespace), budget, window=copy.window, at_ms=copy.at_ms
            )
            if await self.store.save(update):
                logger.warning(
                    "the account of %s was lost; it was restored from its status of %d ms",
                    namespace,
                    copy.at_ms,
                )

    async def _load(self, now_ms: int) -> None:
        revisions = await self.store.revisions()
        names = {*revisions, *self.configuration.namespaces()}
        stale = {
            name: self._windows_since(name, now_ms)
            for name in names
            if name not in self.accounts or self.accounts[name].revision != revisions.get(name, 0)
        }
        for gone in self.accounts.keys() - names:
            del self.accounts[gone]
            remove_balance(gone)
        for account in await self.store.load(stale):
            self.accounts[account.namespace] = account

    def _windows_since(self, namespace: Namespace, now_ms: int) -> int | None:
        policy = self.configuration.budget_of(namespace).policy
        if policy.type is not PolicyType.SLIDING:
            return None
        return now_ms - policy.length_ms - policy.bucket_ms

    async def _advance(
        self, namespace: Namespace, now_ms: int, *, report: bool
    ) -> BudgetChanged | None:
        budget = self.configuration.budget_of(namespace)
        before = self.accounts[namespace]
        account = before
        update = advance(account, budget, now_ms, charge_every_ms=self.charge_every_ms)
        if update is not None:
            self._report_delay(account, now_ms)
            keep_days = self.settings.keep_days
            since_ms = retained_since_ms(budget.policy, now_ms, keep_days=keep_days)
            if not await self.store.save(update, kept_since_ms=since_ms):
                del self.accounts[namespace]
                return None
            account = self.accounts[namespace] = trim_windows(
                apply_update(account, update), budget, now_ms
            )
        current = balance(account, budget, now_ms)
        changed = is_reportable_change(before, account)
        set_balance(current)
        await self.statuses.publish(budget, account, current, changed=changed)
        if budget.share != 1:
            self.with_share.add(namespace)
        report = report and (
            budget.limit_units is not None or budget.unreadable or namespace in self.with_share
        )
        other_budget = budget != (before.budget or Budget(namespace=namespace))
        if changed or other_budget or report:
            return budget_changed(budget, account, current, previous=before.state)
        return None

    def _report_delay(self, account: Account, now_ms: int) -> None:
        delays = [now_ms - lease.charged_ms for lease in account.leases]
        ended_early = sum(
            lease.ended_ms is not None and lease.ended_ms < lease.charged_ms
            for lease in account.leases
        )
        if ended_early:
            VIOLATIONS.labels("ended-before-charged").inc(ended_early)
        CHARGE_DELAY.observe(max(0, max(delays, default=0) - self.charge_every_ms) / 1000)

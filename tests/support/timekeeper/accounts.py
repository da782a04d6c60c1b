"""Accounts, charged leases and a timekeeper with the test's time, on a real valkey-server."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, cast

from services.timekeeper.config.budget_sources import ConfiguredBudgets
from services.timekeeper.report.status_publisher import StatusPublisher
from services.timekeeper.service import Timekeeper
from services.timekeeper.settings import TimekeeperSettings
from shared.ledger.budgets import Budgets
from shared.ledger.leases import RedisLeases
from shared.ledger.rows.lease_rows import encode_lease
from shared.model.budgets.budget import (
    UNITS_PER_GPU_MINUTE,
    Account,
    AccountChange,
    AccountUpdate,
    Budget,
    BudgetPolicy,
    ChargedLease,
    ChargeEntry,
    Journal,
)
from shared.model.clock import Clock
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import Namespace, PodUid
from tests.support.clock import FakeClock
from tests.support.placer.ledger import ledger, share

MINUTE_MS = 60_000
T0 = 1_935_352_800_000
"""Midnight of 1 May 2031 in Berlin: far ahead, so that a stream's explicit ids are allowed."""
TEAM = Namespace("team-a")


def units(minutes: float) -> int:
    """GPU-minutes as units."""
    return int(Fraction(str(minutes)) * UNITS_PER_GPU_MINUTE)


def budget(limit: float | None = 10, namespace: str = TEAM, **fields: Any) -> Budget:
    """A budget of so many GPU-minutes; fields of its policy may be given beside the others."""
    policy = {name: fields.pop(name) for name in BudgetPolicy.__struct_fields__ if name in fields}
    return Budget(
        namespace=Namespace(namespace),
        limit_units=None if limit is None else units(limit),
        policy=BudgetPolicy(**policy),
        **fields,
    )


def charged_lease(
    since_ms: int = T0, *, weight: int = 500, id_: str = "p/1", **fields: Any
) -> ChargedLease:
    """Half a GPU since an instant, not charged yet."""
    defaults: dict[str, Any] = {"charged_ms": since_ms, "pod": PodUid(id_), "name": id_}
    return ChargedLease(id=id_, weight=weight, since_ms=since_ms, **(defaults | fields))


def account(*tenures: ChargedLease, **fields: Any) -> Account:
    """An account that is not written yet."""
    return Account(namespace=TEAM, leases=tenures, **fields)


def lease(pod: str, *, created_ms: int = T0, mib: int = 8_000, gpu: int = 0, **more: Any) -> Lease:
    """A bound lease of half of a T4 of node a."""
    defaults: dict[str, Any] = {
        "namespace": TEAM,
        "name": pod,
        "node": "a",
        "shares": (share("a", gpu, mib=mib),),
        "state": LeaseState.BOUND,
        "version": 2,
        "created_at": created_ms / 1000,
    }
    return Lease(pod=PodUid(pod), **(defaults | more))


class CrashedError(Exception):
    """The process ended here."""


@dataclass
class Timeline:
    """A store whose time is the test's, and which can crash before or after its next writes."""

    store: Budgets
    now_ms: int = T0
    crash_at: int | None = None
    """Writes until the crash; None: no crash."""
    crash_after: bool = False

    async def unread_journal(self, most: int = 200, *, reader: str = "journal") -> Journal:
        journal = await self.store.unread_journal(most, reader=reader)
        whole = journal.horizon_ms is not None
        return replace(journal, horizon_ms=self.now_ms if whole else None)

    async def apply_journal(self, journal: Journal, taken: Iterable[AccountChange]) -> bool:
        self._crash(after=False)
        done = await self.store.apply_journal(journal, taken)
        self._crash(after=True)
        return done

    async def save(self, update: AccountUpdate, *, kept_since_ms: int | None = None) -> bool:
        self._crash(after=False)
        done = await self.store.save(update, kept_since_ms=kept_since_ms)
        self._crash(after=True)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def _crash(self, *, after: bool) -> None:
        if self.crash_at is None or after is not self.crash_after:
            return
        if self.crash_at == 0:
            self.crash_at = None
            raise CrashedError
        self.crash_at -= 1


@dataclass
class FixedBudgets(ConfiguredBudgets):
    """Budgets as a test gives them."""

    given: dict[Namespace, Budget] = field(default_factory=dict)
    statuses: dict[Namespace, Any] = field(default_factory=dict)

    def budget_of(self, namespace: Namespace) -> Budget:
        return self.given.get(namespace, Budget(namespace=namespace))

    def namespaces(self) -> set[Namespace]:
        return set(self.given)

    def status_copies(self) -> Mapping[Namespace, Any]:
        return self.statuses


@dataclass
class AccountLedger:
    """A ledger of leases, the accounts, and the test's configuration."""

    url: str
    leases: RedisLeases
    store: Budgets
    config: FixedBudgets = field(default_factory=FixedBudgets)
    now_ms: int = T0

    @property
    def ledger_prefix(self) -> str:
        return self.leases._connection.prefix

    def timekeeper(
        self,
        *,
        charge_every_s: float = 900,
        keep_days: int = 36_500,  # entries are written today, whenever the test plays
        store: Budgets | None = None,
        configuration: ConfiguredBudgets | None = None,
        statuses: StatusPublisher | None = None,
        clock: Clock | None = None,
        **crash: Any,
    ) -> Timekeeper:
        """A new replica with empty caches, in the test's time unless `store` is given."""
        return Timekeeper(
            store=store or cast(Budgets, Timeline(self.store, self.now_ms, **crash)),
            ledger=self.leases,
            configuration=configuration or self.config,
            statuses=statuses or StatusPublisher(),
            clock=clock or FakeClock(),
            settings=TimekeeperSettings(charge_every_s=charge_every_s, keep_days=keep_days),
        )

    async def journal(self, kind: str, at_ms: int, *leases: Lease) -> None:
        """Write what the ledger's functions write, at an instant of the test's choice."""
        command: list[Any] = ["XADD", f"{self.ledger_prefix}tenures", f"{at_ms}-*", "kind", kind]
        for lease in leases:
            command += [lease.pod, encode_lease(lease)]
        await self.leases._connection._redis.execute_command(*command)

    async def count(self, at_ms: int, *, keeper: Timekeeper | None = None) -> list[Any]:
        """Let a replica (a new one, unless given) count at an instant."""
        self.now_ms = at_ms
        keeper = keeper or self.timekeeper()
        assert isinstance(keeper.store, Timeline)
        keeper.store.now_ms = at_ms
        return await keeper.count()

    async def account(self, namespace: Namespace = TEAM) -> Account:
        (stored,) = await self.store.load({namespace: None})
        return stored

    async def ledger(self, namespace: Namespace = TEAM) -> list[ChargeEntry]:
        charge_entries: list[ChargeEntry] = []
        while page := await self.store.entries(
            namespace, after=charge_entries[-1].id if charge_entries else ""
        ):
            charge_entries += page
        return charge_entries

    async def charges(self, namespace: Namespace = TEAM) -> list[ChargeEntry]:
        entries = await self.ledger(namespace)
        return [entry for entry in entries if entry.kind == "charge"]


@asynccontextmanager
async def account_ledger(url: str, *budgets: Budget) -> AsyncIterator[AccountLedger]:
    """Open a ledger with four T4 of 16,000 MiB, and budgets beside it."""
    async with ledger(url, {"a": 4}) as leases:
        config = FixedBudgets(given={budget.namespace: budget for budget in budgets})
        yield AccountLedger(url, leases, leases.part(Budgets), config)

"""Budgets of GPU time: limits, accounts, charges and states; pure.

Amounts are milli-GPU-milliseconds (`_units`): half a device held for a second is 500,000. Instants
are Unix milliseconds by the ledger's clock (`_ms`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.model.bounds import (
    MOST_ENTRIES,
    Amount,
    LongText,
    MessageText,
    ModelText,
    NameText,
    Percent,
    ShortText,
    Units,
)
from shared.model.leases.lease import Lease
from shared.model.names import Namespace, PodUid

UNITS_PER_GPU_MINUTE = 1000 * 60_000
HOUR_MS = 3_600_000


def minutes(units: int) -> str:
    """Return units as GPU-minutes with three decimals, rounded towards zero.

    >>> minutes(90_000_000)
    '1.500'
    """
    sign = "-" if units < 0 else ""
    thousandths = abs(units) * 1000 // UNITS_PER_GPU_MINUTE
    return f"{sign}{thousandths // 1000}.{thousandths % 1000:03d}"


def amount(units: int, currency: str) -> str:
    """Return units as GPU-minutes, or as the money that 60 of them stand for."""
    if not currency:
        return minutes(units)
    return f"{minutes(units // 60 if units > 0 else -(-units // 60))} {currency}"


class WeightMode(StrEnum):
    DOMINANT = "dominant"
    SUM = "sum"
    """The average of the two."""
    CORE = "core"
    MEMORY = "memory"


class PolicyType(StrEnum):
    FIXED = "fixed"
    """Calendar periods; usage starts at 0 in each."""
    SLIDING = "sliding"
    BUCKET = "bucket"
    """A token bucket, refilled at a constant rate up to the limit."""
    NONE = "none"


class Period(StrEnum):
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class BudgetState(StrEnum):
    OK = "ok"
    WARNING = "warning"
    EXHAUSTED = "exhausted"
    OVERDRAWN = "overdrawn"
    INVALID = "invalid"


class LeaseClass(StrEnum):
    GUARANTEED = "guaranteed"
    RECLAIMABLE = "reclaimable"
    EXPIRED = "expired"


class OnExhausted(StrEnum):
    DEMOTE = "demote"
    """Pods may be preempted for namespaces that have budget left; no other effect."""
    QUEUE = "queue"
    DENY = "deny"
    EVICT = "evict"


class AccountRecord(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    gc=False,
):
    pass


class BudgetPolicy(AccountRecord, frozen=True):
    type: PolicyType = PolicyType.FIXED
    period: Period = Period.MONTH
    time_zone: NameText = "UTC"
    rollover_percent: Amount = 0
    rollover_max_units: Units | None = None
    length_ms: Amount = 7 * 24 * HOUR_MS
    bucket_ms: Amount = HOUR_MS
    refill_units_per_hour: Units = 0


class Budget(AccountRecord, frozen=True):
    namespace: Namespace
    limit_units: Units | None = None
    """None if usage is counted without a limit."""
    currency: ShortText = ""
    """One unit of money is 60 GPU-minutes, times each model's price; empty without money."""
    policy: BudgetPolicy = BudgetPolicy()
    weight_mode: WeightMode = WeightMode.DOMINANT
    uncapped_core_percent: Percent | None = None
    """Of a share without a core limit, per device; None for as much as its memory."""
    warn_at: Annotated[tuple[Percent, ...], Meta(max_length=MOST_ENTRIES)] = (80, 95)
    debt_limit_units: Units | None = None
    """None if the state is never overdrawn."""
    on_exhausted: OnExhausted = OnExhausted.DEMOTE
    grace_minutes: Amount = 10
    evict_on_debt: bool = False
    debt_grace_minutes: Amount = 10
    hysteresis_units: Units | None = None
    share: Amount = 1
    problem: MessageText = ""
    """Why an earlier version of the configured budget counts."""
    unreadable: bool = False
    """There is no valid version: new pods wait until there is one, and running pods stay."""


class ChargedLease(AccountRecord, frozen=True):
    id: LongText
    pod: PodUid
    name: NameText
    weight: Amount
    """Milli-GPU, fixed when charging began."""
    since_ms: Amount
    charged_ms: Amount
    ended_ms: Amount | None = None
    model: ModelText = ""
    cores_milli: Amount = 0
    memory_mib: Amount = 0


class BudgetWindow(AccountRecord, frozen=True):
    id: LongText
    start_ms: Amount
    end_ms: Amount | None = None
    """None without an end, or while it is not known."""
    limit_units: Units | None = None
    used_units: Units = 0
    granted_units: Units = 0
    rolled_units: Units = 0
    level_scaled: int = 0
    """Bucket policy only: units left at `level_ms`, times HOUR_MS to avoid rounding."""
    level_ms: Amount = 0
    closed: bool = False

    @property
    def place(self) -> tuple[int, bool]:
        """The sort key; of two windows with the same start, the open one comes last."""
        return (self.start_ms, not self.closed)

    @property
    def allowed_units(self) -> int | None:
        if self.limit_units is None:
            return None
        return self.limit_units + self.granted_units + self.rolled_units


class ChargeEntry(AccountRecord, frozen=True):
    window: LongText
    kind: ShortText
    """charge, grant, rollover, adjust or close."""
    units: Units
    lease: LongText = ""
    pod: NameText = ""
    from_ms: Amount = 0
    to_ms: Amount = 0
    weight: Amount = 0
    lease_class: ShortText = ""
    model: ModelText = ""
    cores_milli: Amount = 0
    memory_mib: Amount = 0
    actor: MessageText = "timekeeper"
    reason: MessageText = ""
    id: ShortText = ""
    ts_ms: Amount = 0


class StoredBudgetState(AccountRecord, frozen=True):
    state: BudgetState = BudgetState.OK
    warned_percent: Amount = 0
    since_ms: Amount = 0
    window: LongText = ""
    shape: LongText = ""
    """The part of the policy that determines windows; the open window goes on while it is equal."""
    restored_ms: Amount = 0
    """When the account was restored from a copy, or 0."""
    exhausted_ms: Amount = 0
    """When the last remaining units were used; 0 while there are some."""


FIRST_STATE = StoredBudgetState()


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    namespace: Namespace
    revision: int = 0
    leases: tuple[ChargedLease, ...] = ()
    windows: tuple[BudgetWindow, ...] = ()
    """By start; the last one is open. Earlier ones are kept for sliding policies."""
    state: StoredBudgetState = FIRST_STATE
    budget: Budget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    now_ms: int
    accounts: tuple[Account, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountUpdate:
    """The store refuses any other revision."""

    namespace: Namespace
    revision: int
    windows: tuple[BudgetWindow, ...] = ()
    charged: Mapping[str, int] = field(default_factory=dict)
    ended: Mapping[str, int] = field(default_factory=dict)
    """When, by lease that is fully charged."""
    entries: tuple[ChargeEntry, ...] = ()
    state: StoredBudgetState | None = None
    budget: Budget | None = None
    """None to leave it."""
    grant_key: str = ""
    """The same key is granted once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    namespace: Namespace
    at_ms: int
    window: BudgetWindow
    state: BudgetState
    warned_percent: int
    used_units: int
    window_used_units: int
    """In the open window only; a sliding policy counts earlier windows, too."""
    allowed_units: int | None
    remaining_units: int | None
    current_rate_milli_gpu: int
    leases: int
    exhausted_at_ms: int | None = None
    problem: str = ""
    currency: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    at_ms: int
    kind: str
    """`held`, `restored` or `ended`."""
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """Changes that the accounts have not applied yet."""

    generation: str
    known_generation: str
    cursor: str
    lost: bool
    """Entries after the cursor were trimmed before they were applied."""
    entries: tuple[JournalEntry, ...]
    last: str
    horizon_ms: int | None
    """All changes before this time are included; None while there are more entries to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountChange:
    namespace: Namespace
    held: tuple[ChargedLease, ...] = ()
    ended: Mapping[str, int] = field(default_factory=dict)
    revision: int | None = None
    """Nothing is written to an account of any other."""

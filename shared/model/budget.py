"""Budgets: what a namespace may use up of GPU time, what it has used, and what follows from that.

Amounts are integers of milli-GPU-milliseconds (`_units`): half a device held for a second is
500,000. Instants are milliseconds since 1970 by the ledger's own clock (`_ms`). Nothing is rounded
before a report is written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shared.model.lease import Lease
from shared.model.names import Namespace, PodUid

UNITS_PER_GPU_MINUTE = 1000 * 60_000
HOUR_MS = 3_600_000


class WeightMode(StrEnum):
    """How the parts of a device's cores and memory become one weight."""

    DOMINANT = "dominant"
    """The larger of the two: what the share denies to others."""
    SUM = "sum"
    """Half of each."""
    CORE = "core"
    MEMORY = "memory"


class PolicyType(StrEnum):
    """Over which period a budget counts."""

    FIXED = "fixed"
    """A calendar period; used starts at 0 in each."""
    SLIDING = "sliding"
    """The last `length_ms`, in buckets of `bucket_ms`."""
    BUCKET = "bucket"
    """An account that is refilled steadily up to the limit."""
    NONE = "none"
    """All time; only grants add to it."""


class Period(StrEnum):
    """Calendar periods of a fixed policy."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class BudgetState(StrEnum):
    """How a namespace stands."""

    OK = "ok"
    WARNING = "warning"
    EXHAUSTED = "exhausted"
    OVERDRAWN = "overdrawn"


class LeaseClass(StrEnum):
    """What may happen to a namespace's leases when others need their devices."""

    GUARANTEED = "guaranteed"
    RECLAIMABLE = "reclaimable"
    EXPIRED = "expired"


class OnExhausted(StrEnum):
    """What an exhausted budget means for pods."""

    DEMOTE = "demote"
    """Leases may be reclaimed for namespaces that have budget left; nothing else happens."""
    QUEUE = "queue"
    """New pods wait."""
    DENY = "deny"
    """New pods are refused."""
    EVICT = "evict"
    """Running leases end after the grace time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPolicy:
    """Over which period a budget counts, and how it is filled again."""

    type: PolicyType = PolicyType.FIXED
    period: Period = Period.MONTH
    time_zone: str = "UTC"
    rollover_percent: int = 0
    rollover_max_units: int | None = None
    length_ms: int = 7 * 24 * HOUR_MS
    bucket_ms: int = HOUR_MS
    refill_units_per_hour: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one namespace may use up."""

    namespace: Namespace
    limit_units: int | None = None
    """None: use is counted and never exhausted."""
    policy: BudgetPolicy = BudgetPolicy()
    weight_mode: WeightMode = WeightMode.DOMINANT
    uncapped_core_percent: int | None = None
    """What a share without a core limit counts as, per device; None: as much as its memory."""
    warn_at: tuple[int, ...] = (80, 95)
    debt_limit_units: int | None = None
    """None: never overdrawn."""
    on_exhausted: OnExhausted = OnExhausted.DEMOTE
    grace_minutes: int = 10
    """Between exhaustion and eviction, where that is what follows."""
    evict_on_debt: bool = False
    debt_grace_minutes: int = 10
    hysteresis_units: int | None = None
    share: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChargedLease:
    """One lease's hold, as it is charged."""

    id: str
    pod: PodUid
    name: str
    weight: int
    """Milli-GPU, fixed when the tenure began."""
    since_ms: int
    charged_ms: int
    """Charged up to here."""
    ended_ms: int | None = None
    model: str = ""
    cores_milli: int = 0
    """Thousandths of devices' cores held."""
    memory_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetWindow:
    """One period of one namespace; once closed it is never written again."""

    id: str
    start_ms: int
    end_ms: int | None = None
    """None: it has no end, or not yet."""
    limit_units: int | None = None
    used_units: int = 0
    granted_units: int = 0
    rolled_units: int = 0
    level_scaled: int = 0
    """Bucket policy only: what was left at `level_ms`, times HOUR_MS, without any rounding."""
    level_ms: int = 0
    closed: bool = False

    @property
    def place(self) -> tuple[int, bool]:
        """Orders windows; of two that begin at one instant, the one that is open comes last."""
        return (self.start_ms, not self.closed)

    @property
    def allowed_units(self) -> int | None:
        """Everything that may be used in the window; None: any amount."""
        if self.limit_units is None:
            return None
        return self.limit_units + self.granted_units + self.rolled_units


@dataclass(frozen=True, slots=True, kw_only=True)
class ChargeEntry:
    """One line of a namespace's ledger of charges; the store adds its id and its instant."""

    window: str
    kind: str
    """charge, grant, rollover, adjust or close."""
    units: int
    lease: str = ""
    pod: str = ""
    from_ms: int = 0
    to_ms: int = 0
    weight: int = 0
    lease_class: str = ""
    model: str = ""
    cores_milli: int = 0
    memory_mib: int = 0
    actor: str = "timekeeper"
    reason: str = ""
    id: str = ""
    ts_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBudgetState:
    """A state as last decided."""

    state: BudgetState = BudgetState.OK
    warned_percent: int = 0
    """The highest threshold that was reached."""
    since_ms: int = 0
    window: str = ""
    shape: str = ""
    """What of the policy decides windows; the open one goes on while this stays."""
    restored_ms: int = 0
    """All time before it was in the copy that the account was restored from; 0: never restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """All that is stored of one namespace, as of revision `revision`."""

    namespace: Namespace
    revision: int = 0
    leases: tuple[ChargedLease, ...] = ()
    windows: tuple[BudgetWindow, ...] = ()
    """By start; the last one is open. Earlier ones only as far as a sliding policy needs them."""
    state: StoredBudgetState = StoredBudgetState()
    budget: Budget | None = None
    """As it was configured at the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountUpdate:
    """One atomic step of an account, decided on its revision; the store refuses any other."""

    namespace: Namespace
    revision: int
    windows: tuple[BudgetWindow, ...] = ()
    """As they are now, by start."""
    charged: Mapping[str, int] = field(default_factory=dict)
    """Tenure and the instant it is now charged up to."""
    ended: Mapping[str, int] = field(default_factory=dict)
    """Tenures that are over and wholly charged, and until when."""
    entries: tuple[ChargeEntry, ...] = ()
    state: StoredBudgetState | None = None
    """None: as it was."""
    budget: Budget | None = None
    """None: as it was."""
    grant_key: str = ""
    """The caller's name of a grant: the same one is not granted twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How a namespace stands at one instant, the time not charged yet included."""

    namespace: Namespace
    at_ms: int
    window: BudgetWindow
    state: BudgetState
    warned_percent: int
    used_units: int
    window_used_units: int
    """Of the open window alone; under a sliding policy more counts as used."""
    allowed_units: int | None
    remaining_units: int | None
    current_rate_milli_gpu: int
    leases: int
    exhausted_at_ms: int | None = None
    """When nothing will be left if nothing changes; None: not in sight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """What the journal says of some leases, all at one instant."""

    at_ms: int
    kind: str
    """held, restored or ended."""
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """What happened to leases and was not taken in yet, and where that leads."""

    generation: str
    known_generation: str
    """Of the ledger's life that was taken in before; empty: none was."""
    cursor: str
    lost: bool
    """Entries after the cursor were cut off before anybody took them in."""
    entries: tuple[JournalEntry, ...]
    last: str
    """The cursor after all of it."""
    horizon_ms: int | None
    """Everything that happened before is here; None: there is more to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountChange:
    """What the journal means for one account."""

    namespace: Namespace
    held: tuple[ChargedLease, ...] = ()
    """New tenures; those that are there already stay as they are."""
    ended: Mapping[str, int] = field(default_factory=dict)
    revision: int | None = None
    """Of the account, where that was looked at: another one and nothing is written."""

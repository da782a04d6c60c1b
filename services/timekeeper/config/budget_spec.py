"""Parses GPUBudget objects of a cluster and of a file; pure."""

import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from msgspec import Meta, Struct, field

from services.timekeeper.accounts.accrual import MOST_MINUTES, MOST_UNITS
from shared.kubernetes.kinds.custom_kinds import ObjectStatus, Rule, RuledStruct, convert_spec
from shared.model.bounds import Amount
from shared.model.budgets.budget import (
    HOUR_MS,
    UNITS_PER_GPU_MINUTE,
    Budget,
    BudgetPolicy,
    BudgetWindow,
    OnExhausted,
    Period,
    PolicyType,
    WeightMode,
)
from shared.model.errors import UNDECODABLE, RequestError
from shared.model.names import Namespace

KIND = "GPUBudget"
LAST_VALID = "the last valid version stays in force"
LONGEST_SHOWN = 80
ALL_OTHERS = Namespace("*")
"""In a file, the name of the budget of all other namespaces."""

ZONE = "^[A-Z][A-Za-z0-9_+-]*(/[A-Z][A-Za-z0-9_+-]*)*$"
"""On the API server's and on our host there are other names than in the IANA database."""
MONEY_UNITS = 60 * UNITS_PER_GPU_MINUTE
MOST_MONEY = MOST_UNITS // MONEY_UNITS

CURRENCY = "^[A-Z]{3}$"
MONEY = r"^[0-9]{1,12}([.][0-9]{1,2})?$"

_MINUTES = re.compile(r"\d{1,30}(\.\d{1,30})?(e[+-]?\d{1,3})?", re.IGNORECASE)


Minutes = Annotated[
    int | float | str,
    Meta(
        extra_json_schema={
            "type": "integer",
            "format": "int64",
            "minimum": 0,
            "maximum": MOST_MINUTES,
        }
    ),
]
"""A file may have fractions."""
GraceMinutes = Annotated[int, Meta(ge=0, le=525_600)]
Percent = Annotated[int, Meta(ge=0, le=100)]
Hours = Annotated[int, Meta(ge=1, le=20 * 8784)]
BucketMinutes = Annotated[int, Meta(ge=1, le=31 * 1440)]
"""Later instants have no date."""


def _choice(kind: type[StrEnum]) -> Meta:
    return Meta(extra_json_schema={"type": "string", "enum": list(kind)})


def _is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


class DebtAction(StrEnum):
    """The effect of a debt on pods that run."""

    NONE = "none"
    EVICT = "evict"


class RolloverSpec(RuledStruct, frozen=True, forbid_unknown_fields=True):
    """The unused part of a fixed window that is carried over."""

    rules = (
        Rule(
            "!has(self.maxGPUMinutes) || has(self.percent)",
            lambda rollover: rollover.max_minutes is None or rollover.percent is not None,
            "maxGPUMinutes requires percent",
        ),
    )

    percent: Percent | None = None
    max_minutes: Minutes | None = field(name="maxGPUMinutes", default=None)


class PolicySpec(RuledStruct, frozen=True, forbid_unknown_fields=True):
    """The period of the limit."""

    rules = (
        Rule(
            "(self.type == 'bucket') == has(self.refillGPUMinutesPerHour)",
            lambda policy: (policy.type is PolicyType.BUCKET) == (policy.refill is not None),
            "refillGPUMinutesPerHour and type bucket require each other",
        ),
        Rule(
            "self.type == 'fixed' || !has(self.rollover)",
            lambda policy: policy.type is PolicyType.FIXED or policy.rollover is None,
            "rollover requires type fixed",
        ),
        Rule(
            "self.lengthHours * 60 >= self.bucketMinutes && self.lengthHours * 60 <= "
            "self.bucketMinutes * 1000",
            lambda policy: 1 <= policy.length_hours * 60 / policy.bucket_minutes <= 1000,
            "lengthHours must be 1 to 1000 times bucketMinutes",
        ),
        Rule(
            f"self.matches('{ZONE}') && self != 'Local' && "
            "timestamp('2000-01-01T00:00:00Z').getFullYear(self) > 0",
            lambda zone: re.fullmatch(ZONE, zone) is not None and _is_zone(zone),
            "must be the IANA name of a time zone such as UTC, Europe/Berlin or Asia/Shanghai",
            field="time_zone",
        ),
    )

    type: Annotated[PolicyType, _choice(PolicyType)] = PolicyType.FIXED
    window: Annotated[Period, _choice(Period)] = Period.MONTH
    time_zone: Annotated[str, Meta(max_length=64)] = "UTC"
    rollover: RolloverSpec | None = None
    length_hours: Hours = 168
    bucket_minutes: BucketMinutes = 60
    refill: Annotated[Minutes, Meta(extra_json_schema={"minimum": 1})] | None = field(
        name="refillGPUMinutesPerHour", default=None
    )


class DebtSpec(RuledStruct, frozen=True, forbid_unknown_fields=True):
    """What follows from a debt."""

    action: Annotated[DebtAction, _choice(DebtAction)] | None = None
    grace_minutes: GraceMinutes | None = None


class MoneySpec(RuledStruct, frozen=True, forbid_unknown_fields=True):
    """An amount of money."""

    rules = (
        Rule(
            f"type(self) != string || self.matches('{MONEY}')",
            lambda amount: re.fullmatch(MONEY, str(amount)) is not None,
            f"must be money such as 1000 or 1000.50, at most {MOST_MONEY} and with at most two "
            "decimals",
            field="amount",
        ),
        Rule(
            f"self.matches('{CURRENCY}')",
            lambda currency: re.fullmatch(CURRENCY, currency) is not None,
            "must be three capital letters such as EUR",
            field="currency",
        ),
    )

    amount: Annotated[
        int | str,
        Meta(
            extra_json_schema={
                "x-kubernetes-int-or-string": True,
                "maxLength": 32,
                "minimum": 0,
                "maximum": MOST_MONEY,
            }
        ),
    ]
    currency: Annotated[str, Meta(max_length=16)]


class BudgetSpec(RuledStruct, frozen=True, forbid_unknown_fields=True):
    """The spec of a GPUBudget."""

    rules = (
        Rule(
            "has(self.limitGPUMinutes) || !(has(self.debtLimitGPUMinutes) || "
            "has(self.hysteresisGPUMinutes) || has(self.policy) && self.policy.type == 'bucket')",
            lambda spec: (
                spec.limit_minutes is not None
                or spec.debt_limit_minutes is spec.hysteresis_minutes is spec.policy.refill
            ),
            "debtLimitGPUMinutes, hysteresisGPUMinutes and a policy of type bucket require "
            "limitGPUMinutes",
        ),
        Rule(
            "!has(self.onDebt) || !has(self.onDebt.action) || self.onDebt.action == 'none' || "
            "has(self.debtLimitGPUMinutes)",
            lambda spec: spec.on_debt.action != "evict" or spec.debt_limit_minutes is not None,
            "onDebt with action evict requires debtLimitGPUMinutes",
        ),
        Rule(
            "!has(self.limitMoney) || !has(self.limitGPUMinutes) && !(has(self.policy) && "
            "has(self.policy.rollover) && has(self.policy.rollover.maxGPUMinutes))",
            lambda spec: (
                spec.limit_money is None
                or (
                    spec.limit_minutes is None
                    and (spec.policy.rollover or RolloverSpec()).max_minutes is None
                )
            ),
            "limitMoney excludes amounts of GPU-minutes",
        ),
    )

    limit_minutes: Minutes | None = field(name="limitGPUMinutes", default=None)
    limit_money: MoneySpec | None = None
    policy: PolicySpec = PolicySpec()
    weight_mode: Annotated[WeightMode, _choice(WeightMode)] = WeightMode.DOMINANT
    uncapped_core_percent: Percent | None = None
    warn_at: Annotated[tuple[Annotated[int, Meta(ge=1, le=100)], ...], Meta(max_length=10)] = (
        80,
        95,
    )
    debt_limit_minutes: Minutes | None = field(name="debtLimitGPUMinutes", default=None)
    hysteresis_minutes: Minutes | None = field(name="hysteresisGPUMinutes", default=None)
    on_exhausted: Annotated[OnExhausted, _choice(OnExhausted)] = OnExhausted.DEMOTE
    grace_minutes: GraceMinutes = 10
    on_debt: DebtSpec = DebtSpec()
    share: Annotated[int, Meta(ge=1, le=1_000_000)] = 1


Units = Annotated[str, Meta(max_length=32)]
"""JSON numbers would lose integers above 2^53."""


class WindowStatus(Struct, frozen=True):
    """The window that is open, in Unix milliseconds."""

    id: str
    start: int
    end: int | None = None


class BudgetStatus(ObjectStatus, frozen=True, kw_only=True):
    """The status of a GPUBudget; a lost account is restored from it."""

    state: str
    since: str
    window: WindowStatus
    used_units: Units
    window_used_units: Units
    granted_units: Units
    rollover_units: Units
    remaining_units: Units | None = None
    used_minutes: str = field(name="usedGPUMinutes")
    remaining_minutes: str | None = field(name="remainingGPUMinutes", default=None)
    current_rate: int = field(name="currentRateMilliGPU")
    leases: int
    projected_exhaustion: str | None = None
    checkpoint_at: int


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def _units(path: str, value: float | str | None) -> int | None:
    if value is None:
        return None
    units = Fraction(str(value)) * UNITS_PER_GPU_MINUTE if _MINUTES.fullmatch(str(value)) else None
    if units is None or units.denominator != 1:
        raise RequestError(f"{path} must be GPU-minutes from 0, not {_brief(value)}")
    if units > MOST_UNITS:
        raise RequestError(f"{path} must be at most {MOST_MINUTES}, not {_brief(value)}")
    return int(units)


def _units_of_money(path: str, amount: float | str) -> int:
    units = Fraction(str(amount)) * MONEY_UNITS
    if units > MOST_UNITS:
        raise RequestError(f"{path} must be at most {MOST_MONEY}, not {_brief(amount)}")
    return int(units)


def parse_spec(namespace: Namespace, spec: object) -> Budget:
    """Raises RequestError."""
    place = f"{KIND} {namespace}"
    read = convert_spec(spec, BudgetSpec, place)
    path = f"{place}: spec"
    debt = read.on_debt
    money = read.limit_money
    return Budget(
        namespace=namespace,
        limit_units=_units(f"{path}.limitGPUMinutes", read.limit_minutes)
        if money is None
        else _units_of_money(f"{path}.limitMoney.amount", money.amount),
        currency="" if money is None else money.currency,
        policy=_policy(f"{path}.policy", read.policy),
        weight_mode=read.weight_mode,
        uncapped_core_percent=read.uncapped_core_percent,
        warn_at=tuple(sorted(read.warn_at)),
        debt_limit_units=_units(f"{path}.debtLimitGPUMinutes", read.debt_limit_minutes),
        on_exhausted=read.on_exhausted,
        grace_minutes=read.grace_minutes,
        evict_on_debt=debt.action is DebtAction.EVICT,
        debt_grace_minutes=10 if debt.grace_minutes is None else debt.grace_minutes,
        hysteresis_units=_units(f"{path}.hysteresisGPUMinutes", read.hysteresis_minutes),
        share=read.share,
    )


def _policy(path: str, read: PolicySpec) -> BudgetPolicy:
    rollover = read.rollover or RolloverSpec()
    refill = _units(f"{path}.refillGPUMinutesPerHour", read.refill)
    if refill == 0:
        raise RequestError(f"{path}.refillGPUMinutesPerHour must be above 0")
    return BudgetPolicy(
        type=read.type,
        period=read.window,
        time_zone=read.time_zone,
        rollover_percent=rollover.percent or 0,
        rollover_max_units=_units(f"{path}.rollover.maxGPUMinutes", rollover.max_minutes),
        length_ms=read.length_hours * HOUR_MS,
        bucket_ms=read.bucket_minutes * 60_000,
        refill_units_per_hour=refill or 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusCopy:
    window: BudgetWindow
    at_ms: Amount


def parse_status(status: object, budget: Budget | None) -> StatusCopy | None:
    """Return None if the status is invalid, too."""
    try:
        read = msgspec.convert(status, BudgetStatus)
        amounts = (read.window_used_units, read.granted_units, read.rollover_units)
        used, granted, rolled = map(int, amounts)
        left = int(read.remaining_units or 0)
    except ValueError:
        return None
    if budget is None:
        return None
    bucket = budget.policy.type is PolicyType.BUCKET
    copy = StatusCopy(
        at_ms=read.checkpoint_at,
        window=BudgetWindow(
            id=read.window.id,
            start_ms=read.window.start,
            end_ms=read.window.end,
            limit_units=budget.limit_units,
            used_units=used,
            granted_units=granted,
            rolled_units=rolled,
            level_scaled=left * HOUR_MS if bucket else 0,
            level_ms=read.checkpoint_at if bucket else 0,
        ),
    )
    try:  # as the ledger reads it
        return msgspec.json.decode(msgspec.json.encode(copy), type=StatusCopy)
    except UNDECODABLE:
        return None

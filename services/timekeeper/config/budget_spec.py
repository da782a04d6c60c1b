"""Parses GPUBudget objects of a cluster and of a file; pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from msgspec import Meta, Struct, field

from shared.kubernetes.custom_kinds import convert_spec
from shared.model.budget import (
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
from shared.model.errors import RequestError
from shared.model.names import Namespace

KIND = "GPUBudget"
SPEC_IN_FORCE = "specInForce"
"""Field of the status with the last valid spec."""
LONGEST_SHOWN = 80
"""Characters of a value in a message."""
ALL_OTHERS = Namespace("*")
"""In a file, the name of the budget of all other namespaces."""

MAX_MINUTES = 2**63 - 1
"""The maximum of an integer field of an object."""

_MINUTES = re.compile(r"\d{1,30}(\.\d{1,30})?(e[+-]?\d{1,3})?", re.IGNORECASE)

_FACTOR = re.compile(r"\d{1,6}(\.\d{1,3})?")


Minutes = Annotated[
    int | float | str,
    Meta(extra_json_schema={"type": "integer", "format": "int64", "minimum": 0}),
]
"""GPU-minutes: a file may have fractions of them."""
GraceMinutes = Annotated[int, Meta(ge=0, le=525_600)]
"""At most a year."""
Percent = Annotated[int, Meta(ge=0, le=100)]
Hours = Annotated[int, Meta(ge=1, le=20 * 8784)]
BucketMinutes = Annotated[int, Meta(ge=1, le=31 * 1440)]
"""Limits of a sliding policy: later instants have no date."""


def _choice(kind: type[StrEnum]) -> Meta:
    return Meta(extra_json_schema={"type": "string", "enum": list(kind)})


class DebtAction(StrEnum):
    """The effect of a debt on pods that run."""

    NONE = "none"
    EVICT = "evict"


class RolloverSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The unused part of a fixed window that is carried over."""

    percent: Percent | None = None
    max_minutes: Minutes | None = field(name="maxGPUMinutes", default=None)


class PolicySpec(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The period of the limit."""

    type: Annotated[PolicyType, _choice(PolicyType)] = PolicyType.FIXED
    window: Annotated[Period, _choice(Period)] = Period.MONTH
    time_zone: Annotated[str, Meta(min_length=1, max_length=64)] = "UTC"
    rollover: RolloverSpec = RolloverSpec()
    length_hours: Hours = 168
    bucket_minutes: BucketMinutes = 60
    refill_minutes_per_hour: Annotated[Minutes, Meta(extra_json_schema={"minimum": 1})] | None = (
        field(name="refillGPUMinutesPerHour", default=None)
    )


class DebtSpec(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What follows from a debt."""

    action: Annotated[DebtAction, _choice(DebtAction)] | None = None
    grace_minutes: GraceMinutes | None = None


class BudgetSpec(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The spec of a GPUBudget."""

    limit_minutes: Minutes | None = field(name="limitGPUMinutes", default=None)
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


def _brief(value: object) -> str:
    """Return a value for a message, without its end if it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def _units(path: str, value: float | str | None) -> int | None:
    """Return GPU-minutes as exact units."""
    if value is None:
        return None
    units = Fraction(str(value)) * UNITS_PER_GPU_MINUTE if _MINUTES.fullmatch(str(value)) else None
    if units is None or units.denominator != 1:
        raise RequestError(f"{path} must be GPU-minutes from 0, not {_brief(value)}")
    if units > MAX_MINUTES * UNITS_PER_GPU_MINUTE:
        raise RequestError(f"{path} must be at most {MAX_MINUTES}, not {_brief(value)}")
    return int(units)


def parse_spec(namespace: Namespace, spec: object) -> Budget:
    """Parse a GPUBudget's spec. Raises RequestError with the field and its valid values."""
    place = f"{KIND} {namespace}"
    read = convert_spec(spec, BudgetSpec, place)
    path = f"{place}: spec"
    limit = _units(f"{path}.limitGPUMinutes", read.limit_minutes)
    policy = _policy(f"{path}.policy", read.policy)
    if limit is None and policy.type is PolicyType.BUCKET:
        raise RequestError(f"{path}.limitGPUMinutes is required: it is the size of the bucket")
    debt = read.on_debt
    return Budget(
        namespace=namespace,
        limit_units=limit,
        policy=policy,
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
    length, bucket = read.length_hours * 60, read.bucket_minutes
    if length < bucket or length > 1000 * bucket:
        raise RequestError(f"{path}.lengthHours must be 1 to 1000 times bucketMinutes")
    refill = _units(f"{path}.refillGPUMinutesPerHour", read.refill_minutes_per_hour) or 0
    if (read.type is PolicyType.BUCKET) != (refill > 0):
        raise RequestError(f"{path}.refillGPUMinutesPerHour above 0 and type bucket go together")
    if not _is_zone(read.time_zone):
        raise RequestError(
            f"{path}.timeZone must be the IANA name of a time zone such as UTC, Europe/Berlin or "
            f"Asia/Shanghai, not {read.time_zone!r}"
        )
    most = _units(f"{path}.rollover.maxGPUMinutes", read.rollover.max_minutes)
    return BudgetPolicy(
        type=read.type,
        period=read.window,
        time_zone=read.time_zone,
        rollover_percent=read.rollover.percent or 0,
        rollover_max_units=most,
        length_ms=length * 60_000,
        bucket_ms=bucket * 60_000,
        refill_units_per_hour=refill,
    )


def _is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


def parse_factors(listed: tuple[str, ...]) -> dict[str, Fraction]:
    """Parse `MODEL=FACTOR,...` with at most three decimals. Raises RequestError otherwise."""
    factors: dict[str, Fraction] = {}
    for text in listed:
        model, _, number = text.partition("=")
        if not model.strip() or not _FACTOR.fullmatch(number):
            raise RequestError(
                f"--model-factors {text!r} is not MODEL=FACTOR such as A100=2.5, with a factor "
                "below 1,000,000 and at most three decimals"
            )
        factors[model.strip()] = Fraction(number)
    return factors


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusCopy:
    """An account as its budget's status shows it; a lost account is restored from it."""

    window: BudgetWindow
    """The window that was open, with its usage and level."""
    at_ms: int


def parse_status(status: object, budget: Budget | None) -> StatusCopy | None:
    """Parse a status; None if there is none, or if it is invalid."""
    if not isinstance(status, Mapping) or budget is None or "checkpointAt" not in status:
        return None
    try:
        window, at_ms = status["window"], int(status["checkpointAt"])
        end, left = window.get("end"), status.get("remainingUnits")
        bucket = budget.policy.type is PolicyType.BUCKET
        return StatusCopy(
            at_ms=at_ms,
            window=BudgetWindow(
                id=str(window["id"]),
                start_ms=int(window["start"]),
                end_ms=None if end is None else int(end),
                limit_units=budget.limit_units,
                used_units=int(status["windowUsedUnits"]),
                granted_units=int(status["grantedUnits"]),
                rolled_units=int(status["rolloverUnits"]),
                level_scaled=int(left or 0) * HOUR_MS if bucket else 0,
                level_ms=at_ms if bucket else 0,
            ),
        )
    except (ArithmeticError, KeyError, TypeError, ValueError, AttributeError):
        return None

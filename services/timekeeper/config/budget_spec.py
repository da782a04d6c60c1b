"""Parses GPUBudget objects of a cluster and of a file; pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

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

GROUP = "leasehold.dev"
API_VERSION = f"{GROUP}/v1alpha1"
KIND = "GPUBudget"
SPEC_IN_FORCE = "specInForce"
"""Field of the status with the last valid spec."""
MOST_THRESHOLDS = 10
LONGEST_ZONE = 64
LONGEST_SHOWN = 80
"""Characters of a value in a message."""
ALL_OTHERS = Namespace("*")
"""In a file, the name of the budget of all other namespaces."""

MAX_MINUTES = 2**63 - 1
"""The maximum of an integer field of an object."""
MAX_SHARE = 1_000_000
MAX_GRACE_MINUTES = 525_600
"""A year."""
LONGEST_HOURS, LONGEST_BUCKET_MINUTES = 20 * 8784, 31 * 1440
"""Limits of a sliding policy: later instants have no date."""

_MINUTES = re.compile(r"\d{1,30}(\.\d{1,30})?(e[+-]?\d{1,3})?", re.IGNORECASE)

_FACTOR = re.compile(r"\d{1,6}(\.\d{1,3})?")

E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class SpecFields:
    """A mapping of the object, with its path for error messages."""

    values: Mapping[str, Any]
    path: str

    def path_of(self, name: str) -> str:
        """Return the path of a field."""
        return f"{self.path}.{name}"

    def allow_only(self, *names: str) -> None:
        """Raise RequestError for any other field."""
        for name in self.values:
            if name not in names:
                raise RequestError(
                    f"{self.path}.{_brief(name, quoted=False)} is unknown; "
                    f"known fields are {', '.join(names)}"
                )

    def mapping(self, name: str) -> "SpecFields":
        """Return the mapping in a field; empty without the field."""
        value = self.values.get(name) or {}
        if not isinstance(value, Mapping):
            raise RequestError(f"{self.path_of(name)} must be a mapping, not {_brief(value)}")
        return SpecFields(value, self.path_of(name))

    def integer(self, name: str, least: int, most: int | None = None) -> int | None:
        """Return an integer, or None without the field."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise RequestError(
                f"{self.path_of(name)} must be an integer from {least}, not {_brief(value)}"
            )
        if most is not None and value > most:
            raise RequestError(f"{self.path_of(name)} must be at most {most}, not {value}")
        return value

    def gpu_minutes(self, name: str) -> int | None:
        """Return GPU-minutes as exact units, or None without the field."""
        value = self.values.get(name)
        if value is None:
            return None
        is_number = _MINUTES.fullmatch(str(value)) and not isinstance(value, bool)
        units = Fraction(str(value)) * UNITS_PER_GPU_MINUTE if is_number else None
        if units is None or units.denominator != 1:
            raise RequestError(
                f"{self.path_of(name)} must be GPU-minutes from 0, not {_brief(value)}"
            )
        if units > MAX_MINUTES * UNITS_PER_GPU_MINUTE:
            raise RequestError(
                f"{self.path_of(name)} must be at most {MAX_MINUTES}, not {_brief(value)}"
            )
        return int(units)

    def choice(self, name: str, kind: type[E], default: E) -> E:
        """Return a value of an enumeration."""
        value = self.values.get(name, default)
        try:
            return kind(value)
        except ValueError as error:
            known = ", ".join(kind)
            raise RequestError(
                f"{self.path_of(name)} must be one of {known}, not {_brief(value)}"
            ) from error


def _brief(value: object, *, quoted: bool = True) -> str:
    """Return a value for a message, without its end if it is long."""
    text = repr(value) if quoted else str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def parse_budget(item: object) -> Budget:
    """Parse an object. Raises RequestError with the field, its value and the valid values."""
    if not isinstance(item, Mapping) or item.get("kind") != KIND:
        raise RequestError(f"an object must be a {KIND} of {API_VERSION}, not {str(item)[:80]!r}")
    if item.get("apiVersion") != API_VERSION:
        raise RequestError(f"apiVersion must be {API_VERSION}, not {item.get('apiVersion')!r}")
    metadata = item.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"metadata.name of a {KIND} must be a namespace's name")
    return parse_spec(Namespace(name), SpecFields(item, f"{KIND} {name}").mapping("spec"))


def parse_spec(namespace: Namespace, spec: SpecFields) -> Budget:
    """Parse the spec of a namespace's GPUBudget."""
    spec.allow_only(
        *("limitGPUMinutes", "policy", "weightMode", "uncappedCorePercent", "warnAt"),
        *("debtLimitGPUMinutes", "onExhausted", "graceMinutes", "onDebt", "share"),
        "hysteresisGPUMinutes",
    )
    debt = spec.mapping("onDebt")
    debt.allow_only("action", "graceMinutes")
    policy = _policy(spec.mapping("policy"))
    limit = spec.gpu_minutes("limitGPUMinutes")
    if limit is None and policy.type is PolicyType.BUCKET:
        raise RequestError(
            f"{spec.path_of('limitGPUMinutes')} is required: it is the size of the bucket"
        )
    return Budget(
        namespace=namespace,
        limit_units=limit,
        policy=policy,
        weight_mode=spec.choice("weightMode", WeightMode, WeightMode.DOMINANT),
        uncapped_core_percent=spec.integer("uncappedCorePercent", 0, 100),
        warn_at=_thresholds(spec),
        debt_limit_units=spec.gpu_minutes("debtLimitGPUMinutes"),
        on_exhausted=spec.choice("onExhausted", OnExhausted, OnExhausted.DEMOTE),
        grace_minutes=_or(spec.integer("graceMinutes", 0, MAX_GRACE_MINUTES), 10),
        evict_on_debt=_evicts(debt),
        debt_grace_minutes=_or(debt.integer("graceMinutes", 0, MAX_GRACE_MINUTES), 10),
        hysteresis_units=spec.gpu_minutes("hysteresisGPUMinutes"),
        share=_or(spec.integer("share", 1, MAX_SHARE), 1),
    )


def _policy(policy: SpecFields) -> BudgetPolicy:
    policy.allow_only(
        *("type", "window", "timeZone", "rollover", "lengthHours", "bucketMinutes"),
        "refillGPUMinutesPerHour",
    )
    rollover = policy.mapping("rollover")
    rollover.allow_only("percent", "maxGPUMinutes")
    usual = BudgetPolicy()
    kind = policy.choice("type", PolicyType, PolicyType.FIXED)
    length = (
        _or(policy.integer("lengthHours", 1, LONGEST_HOURS), usual.length_ms // 3_600_000)
        * 3_600_000
    )
    bucket = (
        _or(policy.integer("bucketMinutes", 1, LONGEST_BUCKET_MINUTES), usual.bucket_ms // 60_000)
        * 60_000
    )
    if length < bucket or length > 1000 * bucket:
        raise RequestError(f"{policy.path_of('lengthHours')} must be 1 to 1000 times bucketMinutes")
    refill = policy.gpu_minutes("refillGPUMinutesPerHour") or 0
    if (kind is PolicyType.BUCKET) != (refill > 0):
        raise RequestError(
            f"{policy.path_of('refillGPUMinutesPerHour')} above 0 and type bucket go together"
        )
    return BudgetPolicy(
        type=kind,
        period=policy.choice("window", Period, Period.MONTH),
        time_zone=_zone(policy),
        rollover_percent=_or(rollover.integer("percent", 0, 100), 0),
        rollover_max_units=rollover.gpu_minutes("maxGPUMinutes"),
        length_ms=length,
        bucket_ms=bucket,
        refill_units_per_hour=refill,
    )


def _zone(policy: SpecFields) -> str:
    name = policy.values.get("timeZone", "UTC")
    text = _brief(name)
    if isinstance(name, str) and len(name) <= LONGEST_ZONE and _is_zone(name):
        return name
    raise RequestError(
        f"{policy.path_of('timeZone')} must be the IANA name of a time zone such as UTC, "
        f"Europe/Berlin or Asia/Shanghai, not {text}"
    )


def _is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


def _thresholds(spec: SpecFields) -> tuple[int, ...]:
    listed = spec.values.get("warnAt", (80, 95))
    is_valid = isinstance(listed, list | tuple) and all(
        isinstance(each, int) and not isinstance(each, bool) and 1 <= each <= 100 for each in listed
    )
    if not is_valid or len(listed) > MOST_THRESHOLDS:
        raise RequestError(
            f"{spec.path_of('warnAt')} must list up to {MOST_THRESHOLDS} percents from 1 to 100, "
            f"not {_brief(listed)}"
        )
    return tuple(sorted(listed))


def _evicts(debt: SpecFields) -> bool:
    action = debt.values.get("action", "none")
    if action not in {"evict", "none"}:
        raise RequestError(f"{debt.path_of('action')} must be evict or none, not {_brief(action)}")
    return bool(action == "evict")


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


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

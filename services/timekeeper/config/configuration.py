"""Reads a GPUBudget object: the same fields in a cluster and in a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from shared.model.budget import (
    UNITS_PER_GPU_MINUTE,
    Budget,
    BudgetPolicy,
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
EVERYBODY = Namespace("*")
"""In a file, the name of the budget of every namespace that has none of its own."""

MOST_MINUTES = 2**63 - 1
"""What the field of an object can hold."""
LONGEST_HOURS, LONGEST_BUCKET_MINUTES = 20 * 8784, 31 * 1440
"""Of a sliding policy: instants beyond could not be written as dates."""

E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping of the object, with its place for what is said about errors."""

    values: Mapping[str, Any]
    place: str

    def at(self, name: str) -> str:
        """Return the place of a field."""
        return f"{self.place}.{name}"

    def only(self, *names: str) -> None:
        """Raise RequestError for a field that is none of these."""
        for name in self.values:
            if name not in names:
                raise RequestError(f"{self.at(name)} is no field; known are {', '.join(names)}")

    def inner(self, name: str) -> "Fields":
        """Return the mapping in a field; empty if there is none."""
        value = self.values.get(name) or {}
        if not isinstance(value, Mapping):
            raise RequestError(f"{self.at(name)} must be a mapping, not {value!r}")
        return Fields(value, self.at(name))

    def whole(self, name: str, least: int, most: int | None = None) -> int | None:
        """Return a whole number, or None if there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise RequestError(
                f"{self.at(name)} must be a whole number from {least}, not {value!r}"
            )
        if most is not None and value > most:
            raise RequestError(f"{self.at(name)} may be {most} at most, not {value}")
        return value

    def units(self, name: str) -> int | None:
        """Return GPU-minutes as units, exactly, or None if there are none."""
        value = self.values.get(name)
        if value is None:
            return None
        try:
            units = Fraction(str(value)) * UNITS_PER_GPU_MINUTE
        except (ValueError, ZeroDivisionError) as error:
            raise RequestError(f"{self.at(name)} must be GPU-minutes, not {value!r}") from error
        if isinstance(value, bool) or units < 0 or units.denominator != 1:
            raise RequestError(f"{self.at(name)} must be GPU-minutes from 0, not {value!r}")
        if units > MOST_MINUTES * UNITS_PER_GPU_MINUTE:
            raise RequestError(f"{self.at(name)} may be {MOST_MINUTES} at most, not {value!r}")
        return int(units)

    def choice(self, name: str, kind: type[E], default: E) -> E:
        """Return one of a few words."""
        value = self.values.get(name, default)
        try:
            return kind(value)
        except ValueError as error:
            known = ", ".join(kind)
            raise RequestError(f"{self.at(name)} must be one of {known}, not {value!r}") from error


def read_budget(item: Any) -> Budget:
    """Read an object. Raises RequestError that names the field, what is there and what may be."""
    if not isinstance(item, Mapping) or item.get("kind") != KIND:
        raise RequestError(f"a {KIND} of {API_VERSION} is wanted, not {str(item)[:80]!r}")
    if item.get("apiVersion") != API_VERSION:
        raise RequestError(f"apiVersion must be {API_VERSION}, not {item.get('apiVersion')!r}")
    metadata = item.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"metadata.name of a {KIND} must be a namespace's name")
    return read_spec(Namespace(name), Fields(item, f"{KIND} {name}").inner("spec"))


def read_spec(namespace: Namespace, spec: Fields) -> Budget:
    """Read what a GPUBudget says of its namespace."""
    spec.only(
        *("limitGPUMinutes", "policy", "weightMode", "uncappedCorePercent", "warnAt"),
        *("debtLimitGPUMinutes", "onExhausted", "graceMinutes", "onDebt", "share"),
        "hysteresisGPUMinutes",
    )
    debt = spec.inner("onDebt")
    debt.only("action", "graceMinutes")
    policy = _policy(spec.inner("policy"))
    limit = spec.units("limitGPUMinutes")
    if limit is None and policy.type is PolicyType.BUCKET:
        raise RequestError(f"{spec.at('limitGPUMinutes')} is needed: it is what the bucket holds")
    return Budget(
        namespace=namespace,
        limit_units=limit,
        policy=policy,
        weight_mode=spec.choice("weightMode", WeightMode, WeightMode.DOMINANT),
        uncapped_core_percent=spec.whole("uncappedCorePercent", 0, 100),
        warn_at=_thresholds(spec),
        debt_limit_units=spec.units("debtLimitGPUMinutes"),
        on_exhausted=spec.choice("onExhausted", OnExhausted, OnExhausted.DEMOTE),
        grace_minutes=_or(spec.whole("graceMinutes", 0), 10),
        evict_on_debt=_evicts(debt),
        debt_grace_minutes=_or(debt.whole("graceMinutes", 0), 10),
        hysteresis_units=spec.units("hysteresisGPUMinutes"),
        share=_or(spec.whole("share", 1), 1),
    )


def _policy(said: Fields) -> BudgetPolicy:
    said.only(
        *("type", "window", "timeZone", "rollover", "lengthHours", "bucketMinutes"),
        "refillGPUMinutesPerHour",
    )
    rollover = said.inner("rollover")
    rollover.only("percent", "maxGPUMinutes")
    usual = BudgetPolicy()
    kind = said.choice("type", PolicyType, PolicyType.FIXED)
    length = (
        _or(said.whole("lengthHours", 1, LONGEST_HOURS), usual.length_ms // 3_600_000) * 3_600_000
    )
    bucket = (
        _or(said.whole("bucketMinutes", 1, LONGEST_BUCKET_MINUTES), usual.bucket_ms // 60_000)
        * 60_000
    )
    if length < bucket or length > 1000 * bucket:
        raise RequestError(f"{said.at('lengthHours')} must be 1 to 1000 times bucketMinutes")
    refill = said.units("refillGPUMinutesPerHour") or 0
    if (kind is PolicyType.BUCKET) != (refill > 0):
        raise RequestError(
            f"{said.at('refillGPUMinutesPerHour')} above 0 and type bucket need each other"
        )
    return BudgetPolicy(
        type=kind,
        period=said.choice("window", Period, Period.MONTH),
        time_zone=_zone(said),
        rollover_percent=_or(rollover.whole("percent", 0, 100), 0),
        rollover_max_units=rollover.units("maxGPUMinutes"),
        length_ms=length,
        bucket_ms=bucket,
        refill_units_per_hour=refill,
    )


def _zone(said: Fields) -> str:
    name = said.values.get("timeZone", "UTC")
    try:
        return ZoneInfo(name).key
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError) as error:
        raise RequestError(
            f"{said.at('timeZone')} must be an IANA time zone such as Europe/Berlin, not {name!r}"
        ) from error


def _thresholds(spec: Fields) -> tuple[int, ...]:
    listed = spec.values.get("warnAt", (80, 95))
    good = isinstance(listed, list | tuple) and all(
        isinstance(each, int) and not isinstance(each, bool) and 1 <= each <= 100 for each in listed
    )
    if not good:
        raise RequestError(f"{spec.at('warnAt')} must list percents from 1 to 100, not {listed!r}")
    return tuple(sorted(listed))


def _evicts(debt: Fields) -> bool:
    action = debt.values.get("action", "none")
    if action not in {"evict", "none"}:
        raise RequestError(f"{debt.at('action')} must be evict or none, not {action!r}")
    return bool(action == "evict")


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def read_factors(listed: tuple[str, ...]) -> dict[str, Fraction]:
    """Read `MODEL=FACTOR,...`, three decimals at most. Raises RequestError for anything else."""
    factors: dict[str, Fraction] = {}
    for text in listed:
        model, equals, number = text.partition("=")
        try:
            factor = Fraction(number)
        except (ValueError, ZeroDivisionError) as error:
            raise RequestError(f"{text!r} is no MODEL=FACTOR such as A100=2.5") from error
        if not model or not equals or factor < 0 or 1000 % factor.denominator:
            raise RequestError(f"{text!r} is no MODEL=FACTOR with three decimals at most")
        factors[model.strip()] = factor
    return factors

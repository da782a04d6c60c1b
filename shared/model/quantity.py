"""Kubernetes quantities ("500m", "2Gi", "1e3") as integers, and times as its texts; pure.

Fractions round up, as the scheduler's do.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from fractions import Fraction
from typing import TypeVar

from shared.model.bounds import MOST, MOST_RUN_S
from shared.model.errors import RequestError

Amount = TypeVar("Amount", int, Fraction)
Key = TypeVar("Key")

MINUTE_S = 60.0
HOUR_S = 60 * MINUTE_S
DAY_S = 24 * HOUR_S

_SUFFIXES: Mapping[str, Fraction] = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    **{
        suffix: Fraction(10**power) for suffix, power in zip("kMGTPE", range(3, 19, 3), strict=True)
    },
    **{f"{s}i": Fraction(1024**power) for power, s in enumerate("KMGTPE", start=1)},
}
HUGE_PAGES = "hugepages-"
_BYTES = frozenset({"memory", "ephemeral-storage"})
LONGEST = 64
CACHE_SIZE = 4096
_NUMBER = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,3})|([numkMGTPE]|[KMGTPE]i|))", re.ASCII
)


def parse_quantity(text: str | float) -> Fraction:
    """Raises RequestError."""
    trimmed = str(text).strip()
    if len(trimmed) > LONGEST:
        raise RequestError(
            f"{trimmed[:20]!r}... has {len(trimmed)} characters, more than {LONGEST}"
        )
    match = _NUMBER.fullmatch(trimmed)
    if match is None:
        raise RequestError(f"{text!r} is not a Kubernetes quantity such as 2, 500m or 4Gi")
    number, exponent, suffix = match.groups()
    if exponent is not None:
        return Fraction(number) * Fraction(10) ** int(exponent)
    if suffix not in _SUFFIXES:
        raise RequestError(f"{text!r} ends in {suffix!r}, which is not a quantity suffix")
    return Fraction(number) * _SUFFIXES[suffix]


_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)


def timestamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_duration_s(text: str) -> int:
    """Parse whole seconds, from 1 to `MOST_RUN_S`. Raises RequestError for any other text.

    >>> parse_duration_s("2h30m")
    9000
    """
    match = _DURATION.fullmatch(text) if len(text) <= LONGEST else None
    parts = [int(part or 0) for part in match.groups()] if match else [0]
    seconds = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not 1 <= seconds <= MOST_RUN_S:
        raise RequestError(
            f"{text[:LONGEST]!r} is not a duration of 1s or more such as 90m, 2h30m or 48h"
        )
    return seconds


def duration_text(seconds: int) -> str:
    """Format whole seconds as `parse_duration_s` reads them.

    >>> duration_text(90)
    '1m30s'
    """
    minutes, rest = divmod(seconds, 60)
    parts = ((minutes // 60, "h"), (minutes % 60, "m"), (rest, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


def parse_decimal(text: str) -> int | None:
    is_decimal = text.isascii() and text.isdecimal() and len(text) <= LONGEST
    return int(text) if is_decimal else None


@functools.lru_cache(CACHE_SIZE)
def parse_count(text: str | float) -> int:
    """Parse a quantity as an integer, rounded up.

    >>> parse_count("1500m")
    2
    """
    if isinstance(text, int):
        return text
    if isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) <= LONGEST:
        return int(text)
    return math.ceil(parse_quantity(text))


@functools.lru_cache(CACHE_SIZE)
def parse_cpu_m(text: str | float) -> int:
    return math.ceil(parse_quantity(text) * 1000)


def parse_resources(resources: Mapping[str, str | int | float]) -> dict[str, int]:
    """Parse into integers: `cpu` in thousandths of a core, others in units.

    Raises RequestError for an invalid quantity, or one above `MOST`.
    """
    read = {name: _amount(name, text) for name, text in resources.items()}
    for name, amount in read.items():
        check_amount(name, amount)
    return read


def parse_available(resources: Mapping[str, str | int | float]) -> dict[str, int]:
    """Parse the resources of a node, with amounts cut off at `MOST`."""
    return {name: min(_amount(name, text), MOST) for name, text in resources.items()}


def check_amount(name: str, amount: int) -> None:
    if abs(amount) > MOST:
        shown = amount if abs(amount) < 10**LONGEST else f"a number of {len(str(amount))} digits"
        raise RequestError(f"{name}: {shown} is more than any node has: correct the amount")


def _amount(name: str, text: str | float) -> int:
    try:
        return parse_cpu_m(text) if name == "cpu" else parse_count(text)
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from error


def amount_text(name: str, amount: int) -> str:
    """Format an amount of `parse_resources` for people: 1500m, 64, 251.4Gi."""
    if name == "cpu":
        return f"{amount}m" if amount % 1000 else str(amount // 1000)
    if name not in _BYTES and not name.startswith(HUGE_PAGES):
        return str(amount)
    for power, suffix in ((3, "Gi"), (2, "Mi"), (1, "Ki")):
        if amount >= 1024**power:
            return f"{amount / 1024**power:.1f}".removesuffix(".0") + suffix
    return str(amount)


def peak(amounts: Iterable[tuple[Amount, bool]], nothing: Amount) -> Amount:
    """Return the most that a pod uses at any time, given each container's amount in spec order.

    The boolean is true for an init container that ends before the next container starts:
    https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers
    """
    running = nothing
    most = running
    for amount, ends_first in amounts:
        if ends_first:
            most = max(most, running + amount)
        else:
            running += amount
    return max(most, running)


def peaks(amounts: Iterable[tuple[Key, int, bool]]) -> dict[Key, int]:
    by_key: dict[Key, list[tuple[int, bool]]] = {}
    for key, amount, ends_first in amounts:
        by_key.setdefault(key, []).append((amount, ends_first))
    return {key: peak(parts, 0) for key, parts in by_key.items()}

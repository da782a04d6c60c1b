"""Quantities: sums, and the text that Kubernetes writes, such as 1536Mi, 250m, 3; pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from shared.model.quantity import parse_quantity

_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_SMALL = ("m", "u", "n")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


@dataclass(frozen=True, slots=True)
class Quantity:
    """An exact amount, and whether it is written with binary suffixes."""

    value: Fraction = Fraction(0)
    binary: bool = False

    def __add__(self, other: "Quantity") -> "Quantity":
        """Add; the sum has the suffix form of the first summand that is not zero."""
        return Quantity(self.value + other.value, self.binary if self.value else other.binary)

    def __sub__(self, other: "Quantity") -> "Quantity":
        return Quantity(self.value - other.value, self.binary)

    def __str__(self) -> str:
        """Write it with the largest suffix that leaves a whole number."""
        if self.binary and abs(self.value) >= 1024 and self.value.denominator == 1:
            return _scaled(int(self.value), 1024, _BINARY)
        if self.value.denominator == 1:
            return _scaled(int(self.value), 1000, _DECIMAL)
        fits = [n for n in (1, 2, 3) if (self.value * 1000**n).denominator == 1]
        power = fits[0] if fits else 3
        return f"{math.ceil(self.value * 1000**power)}{_SMALL[power - 1]}"


def _scaled(amount: int, base: int, suffixes: Iterable[str]) -> str:
    for suffix in suffixes:
        if not amount or amount % base:
            return f"{amount}{suffix}"
        amount //= base
    return f"{amount * base}{suffix}"


@lru_cache(maxsize=4096)
def quantity(text: str | float) -> Quantity:
    """Parse a quantity; raises RequestError for malformed text."""
    return Quantity(parse_quantity(text), str(text).endswith("i"))


Amounts = dict[str, Quantity]


def parse_amounts(listed: Mapping[str, str]) -> Amounts:
    """Parse a resource list."""
    return {name: quantity(text) for name, text in listed.items()}


def add_amounts(left: Amounts, right: Amounts) -> Amounts:
    """Add two lists, name by name."""
    return {n: left.get(n, Quantity()) + right.get(n, Quantity()) for n in {**left, **right}}


def max_amounts(left: Amounts, right: Amounts) -> Amounts:
    """Return the larger amount of each name."""
    return {
        name: max(
            (a[name] for a in (left, right) if name in a), key=lambda quantity: quantity.value
        )
        for name in {**left, **right}
    }

"""What every GPU was used for, hour by hour; pure.

Amounts are integers of milli-GPU-milliseconds. Those of the five uses add up to the milliseconds of
all devices, times 1000: exactly, in every hour, and in every part of one, where they are fractions.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import msgspec

from shared.model.budget import HOUR_MS
from shared.model.names import Namespace

USES = ("used", "unmeasured", "idle", "stranded", "unleased")
"""Leased and used, leased and not measured, leased and idle; free, and too little for any share
that was leased within a week; free."""
USED, UNMEASURED, IDLE, STRANDED, UNLEASED = range(5)
FREE = Namespace("")
"""Has the amounts that no namespace has leased."""
WHOLE = 1000
UNITS_PER_GPU_HOUR = WHOLE * HOUR_MS
Amounts = list[int]
"""One for each use."""
Sums = dict[tuple[Namespace, str], list[Fraction]]
"""By namespace and model of the device, an amount for each use."""


class CostHour(msgspec.Struct, array_like=True, frozen=True):
    """What is recorded of one hour, or of the part of it that has passed."""

    from_ms: int
    to_ms: int
    recorded_ms: int
    """Less than between the two instants if the journal was lost in between."""
    device_ms: dict[str, int]
    """By model."""
    sums: dict[Namespace, dict[str, Amounts]]

    def plus(self, more: "CostHour") -> "CostHour":
        """Return both as one record."""
        found = CostHour(
            min(self.from_ms, more.from_ms),
            max(self.to_ms, more.to_ms),
            self.recorded_ms + more.recorded_ms,
            {},
            {},
        )
        for each in (self, more):
            for model, length_ms in each.device_ms.items():
                found.device_ms[model] = found.device_ms.get(model, 0) + length_ms
            for name, model, amounts in each.rows():
                for use, units in enumerate(amounts):
                    found.add(name, model, use, units)
        return found

    def add(self, namespace: Namespace, model: str, use: int, units: int) -> None:
        """Add to an amount, in place."""
        self.sums.setdefault(namespace, {}).setdefault(model, [0] * len(USES))[use] += units

    def rows(self) -> Iterator[tuple[Namespace, str, Amounts]]:
        """Yield namespaces, models and amounts."""
        for name, by_model in self.sums.items():
            for model, amounts in by_model.items():
                yield name, model, amounts

    def imbalances(self) -> Iterator[str]:
        """Yield what does not add up."""
        found = dict.fromkeys(self.device_ms, 0)
        for name, model, amounts in self.rows():
            found[model] = found.get(model, 0) + sum(amounts)
            if min(amounts) < 0:
                yield f"{model} of {name or 'no namespace'} has {min(amounts)}"
        for model, units in found.items():
            capacity = self.device_ms.get(model, 0) * WHOLE
            if units != capacity:
                yield f"{model} has {units} milli-GPU-milliseconds, its capacity is {capacity}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostMark:
    """Until when costs are recorded, and what was recorded with it."""

    at_ms: int = 0
    """0: nothing is recorded yet."""
    sizes: str = ""
    """Sizes of the shares of the last week, as JSON."""
    hours: Mapping[int, CostHour] = field(default_factory=dict)
    """By the instants at which they begin."""
    expired: Iterable[int] = ()
    """Beginnings of the hours to delete."""
    journal_cursor: str = "0-0"
    """The last entry of the journal that the accounts have taken over."""


def hours_of(from_ms: int, to_ms: int) -> range:
    """Return the instants at which the hours of an interval begin."""
    return range(from_ms - from_ms % HOUR_MS, to_ms, HOUR_MS)


def add_up(
    hours: Iterable[CostHour], from_ms: int, to_ms: int
) -> tuple[Sums, dict[str, Fraction], Fraction]:
    """Return the amounts, the capacity by model, and the recorded milliseconds of an interval.

    The amounts of an hour that the interval has only a part of count as spread evenly in it.
    """
    sums: Sums = {}
    capacity: dict[str, Fraction] = {}
    recorded = Fraction(0)
    for hour in hours:
        length = min(hour.to_ms, to_ms) - max(hour.from_ms, from_ms)
        if length <= 0:
            continue
        part = Fraction(length, hour.to_ms - hour.from_ms)
        recorded += part * hour.recorded_ms
        for model, device_ms in hour.device_ms.items():
            capacity[model] = capacity.get(model, Fraction(0)) + part * device_ms * WHOLE
        for name, model, amounts in hour.rows():
            known = sums.setdefault((name, model), [Fraction(0)] * len(USES))
            for use, units in enumerate(amounts):
                known[use] += part * units
    return sums, capacity, recorded


def split_free(sums: Sums) -> Sums:
    """Give what was free of each model to the namespaces that leased it, in proportion."""
    leased: dict[str, Fraction] = {}
    for (name, model), amounts in sums.items():
        if name != FREE:
            leased[model] = leased.get(model, Fraction(0)) + sum(amounts)
    found: Sums = {}
    for (name, model), amounts in sums.items():
        free = sums.get((FREE, model), [Fraction(0)] * len(USES))
        if name != FREE:
            part = sum(amounts) / leased[model]
            found[name, model] = [
                had + part * more for had, more in zip(amounts, free, strict=True)
            ]
        elif model not in leased:
            found[name, model] = amounts
    return found

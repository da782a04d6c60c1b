"""What every GPU was used for, hour by hour; pure.

Amounts are milli-GPU-milliseconds. The five uses add up to the milliseconds of all devices, times
1000.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import msgspec

from shared.model.budgets.budget import HOUR_MS
from shared.model.names import Namespace

USES = ("used", "unmeasured", "idle", "stranded", "unleased")
"""The first three are leased. Stranded is free, but too little for any share that was leased within
a week."""
USED, UNMEASURED, IDLE, STRANDED, UNLEASED = range(5)
FREE = Namespace("")
WHOLE = 1000
UNITS_PER_GPU_HOUR = WHOLE * HOUR_MS
MOST_MODELS = 64
"""Agents report models, and may change them."""
OTHER_MODELS = "other models"
Sums = dict[tuple[Namespace, str], list[Fraction | int]]
"""By namespace and model, an amount for each use."""


class CostHour(msgspec.Struct, array_like=True):
    from_ms: int
    to_ms: int
    recorded_ms: int
    device_ms: dict[str, int] = msgspec.field(default_factory=dict)
    sums: dict[Namespace, dict[str, list[int]]] = msgspec.field(default_factory=dict)

    def add_device(self, model: str, passed_ms: int) -> str:
        counted = counted_model(model, self.device_ms)
        self.device_ms[counted] = self.device_ms.get(counted, 0) + passed_ms
        return counted

    def add(self, namespace: Namespace, model: str, use: int, units: int) -> None:
        self.sums.setdefault(namespace, {}).setdefault(model, [0] * len(USES))[use] += units

    def rows(self) -> Iterator[tuple[Namespace, str, list[int]]]:
        for name, by_model in self.sums.items():
            for model, amounts in by_model.items():
                yield name, model, amounts

    def imbalances(self) -> Iterator[str]:
        used_ms = dict.fromkeys(self.device_ms, 0)
        for name, model, amounts in self.rows():
            used_ms[model] = used_ms.get(model, 0) + sum(amounts)
            if min(amounts) < 0:
                yield f"{model} of {name or 'no namespace'} has {min(amounts)}"
        for model, units in used_ms.items():
            capacity = self.device_ms.get(model, 0) * WHOLE
            if units != capacity:
                yield f"{model} has {units} milli-GPU-milliseconds, its capacity is {capacity}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostMark:
    at_ms: int = 0
    """Costs are recorded until then; 0 if none are."""
    sizes: str = ""
    hours: Mapping[int, CostHour] = field(default_factory=dict)
    expired: Iterable[int] = ()
    journal_cursor: str = "0-0"


def counted_model(model: str, counted: Collection[str]) -> str:
    """Return the model's name, or the name for others beyond `MOST_MODELS`."""
    return model if model in counted or len(counted) < MOST_MODELS else OTHER_MODELS


def hours_of(from_ms: int, to_ms: int) -> range:
    return range(from_ms - from_ms % HOUR_MS, to_ms, HOUR_MS)


def add_up(
    hours: Iterable[CostHour],
    from_ms: int,
    to_ms: int,
    *,
    shown: Callable[[Namespace], Namespace] = lambda name: name,
) -> tuple[Sums, dict[str, Fraction | int], Fraction | int]:
    """Return the amounts, the capacity by model, and the recorded milliseconds of an interval."""
    sums: Sums = {}
    capacity: dict[str, Fraction | int] = {}
    recorded: Fraction | int = 0
    for hour in hours:
        length = min(hour.to_ms, to_ms) - max(hour.from_ms, from_ms)
        if length <= 0:
            continue
        whole = hour.to_ms - hour.from_ms
        part = 1 if length == whole else Fraction(length, whole)  # fractions are slow
        recorded += part * hour.recorded_ms
        for model, device_ms in hour.device_ms.items():
            counted = counted_model(model, capacity)
            capacity[counted] = capacity.get(counted, 0) + part * device_ms * WHOLE
        for name, model, amounts in hour.rows():
            key = shown(name), counted_model(model, capacity)
            row = sums.setdefault(key, [0] * len(USES))
            for use, units in enumerate(amounts):
                row[use] += part * units
    return sums, capacity, recorded


class CostLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one namespace had of one model in one way."""

    start: float
    end: float
    namespace: Namespace
    """Empty for what no namespace has leased."""
    model: str
    use: str
    gpu_hours: str
    units: str
    """Milli-GPU-milliseconds; exact if the period begins and ends with an hour."""
    price: str | None
    """Of a GPU for an hour."""
    cost: str | None


class CostView(msgspec.Struct, frozen=True, kw_only=True):
    """What all GPUs were used for, and what that cost."""

    start: float
    end: float
    """Later times are not recorded yet."""
    recorded_s: float
    currency: str
    """Empty without prices."""
    problem: str
    """Why the latest prices are not in force."""
    capacity_units: dict[str, str]
    lines: tuple[CostLine, ...]

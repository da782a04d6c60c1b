"""How much of a GPU a lease counts as, in milli-GPU, exactly.

Per device the parts of its cores and of its memory that the lease books become one weight; the
sum over devices, times each model's factor, is rounded up once.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from shared.model.budget import Budget, WeightMode
from shared.model.lease import Lease, Share
from shared.model.names import DeviceUuid
from shared.model.request import SharingPolicy

WHOLE = Fraction(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What weighing needs to know of a device."""

    memory_mib: int
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """What a lease counts as."""

    milli_gpu: int
    model: str
    """Of the devices; several are joined with `+`."""
    cores_milli: int
    memory_mib: int


def weigh(
    lease: Lease,
    cards: Mapping[DeviceUuid, Card],
    budget: Budget,
    factors: Mapping[str, Fraction],
) -> Weighed:
    """Weigh a lease.

    `factors` multiply devices whose model contains the name, whatever the letter case; the
    longest such name counts. Containers run side by side and init containers one by one before
    them, so a device counts with the larger of their sum and the largest of these. A device that
    is not known (any more) counts as if the share had all of its memory, unless its terms say.
    """
    devices: dict[DeviceUuid, list[Share]] = {}
    for share in lease.shares:
        devices.setdefault(share.device, []).append(share)
    total = cores_total = Fraction(0)
    models: list[str] = []
    for uuid, shares in devices.items():
        card = cards.get(uuid)
        cores, memory = _parts(shares, card, budget)
        model = card.model if card else ""
        if model not in models:
            models.append(model)
        cores_total += cores
        total += _weight(cores, memory, budget.weight_mode) * _factor(model, factors)
    return Weighed(
        milli_gpu=math.ceil(1000 * total),
        model="+".join(models),
        cores_milli=math.ceil(1000 * cores_total),
        memory_mib=sum(_memory_mib(shares) for shares in devices.values()),
    )


def _parts(shares: list[Share], card: Card | None, budget: Budget) -> tuple[Fraction, Fraction]:
    if any(share.whole or share.sharing is SharingPolicy.EXCLUSIVE for share in shares):
        return WHOLE, WHOLE
    memory = _most(shares, lambda share: _memory(share, card))
    cores = _most(shares, lambda share: _cores(share, card, budget))
    return min(cores, WHOLE), min(memory, WHOLE)


def _memory(share: Share, card: Card | None) -> Fraction:
    size = (
        share.requested_units.device_mib
        if share.requested_units
        else card.memory_mib
        if card
        else 0
    )
    return Fraction(share.memory_mib, size) if size > 0 else WHOLE


def _cores(share: Share, card: Card | None, budget: Budget) -> Fraction:
    if share.cores_percent > 0:
        return Fraction(share.cores_percent, 100)
    if budget.uncapped_core_percent is not None:
        return Fraction(budget.uncapped_core_percent, 100)
    return _memory(share, card)


def _weight(cores: Fraction, memory: Fraction, mode: WeightMode) -> Fraction:
    by_mode = {
        WeightMode.DOMINANT: max(cores, memory),
        WeightMode.SUM: (cores + memory) / 2,
        WeightMode.CORE: cores,
        WeightMode.MEMORY: memory,
    }
    return by_mode[mode]


def _factor(model: str, factors: Mapping[str, Fraction]) -> Fraction:
    named = [name for name in factors if name.lower() in model.lower()]
    return factors[max(named, key=len)] if named else WHOLE


def _most(shares: Iterable[Share], part: Callable[[Share], Fraction]) -> Fraction:
    shares = tuple(shares)
    beside = sum((part(share) for share in shares if not share.init), Fraction(0))
    return max([beside, *(part(share) for share in shares if share.init)])


def _memory_mib(shares: Iterable[Share]) -> int:
    return int(_most(shares, lambda share: Fraction(share.memory_mib)))

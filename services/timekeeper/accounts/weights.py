"""The weight of a lease, in milli-GPU, exactly; pure.

The shares of a device's cores and memory become one weight per device. The sum over devices, times
each model's factor, is rounded up once. A lease records all that its weight depends on, so it has
the same weight whenever it is charged, also once its devices are gone.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from shared.model.budget import Budget, WeightMode
from shared.model.lease import Lease, Share
from shared.model.names import DeviceUuid
from shared.model.quantity import peak
from shared.model.request import SharingPolicy

WHOLE = Fraction(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseWeight:
    """The weight of a lease."""

    milli_gpu: int
    model: str
    """The devices' model; several are joined with `+`."""
    cores_milli: int
    memory_mib: int


def weigh(lease: Lease, budget: Budget, factors: Mapping[str, Fraction]) -> LeaseWeight:
    """Weigh a lease.

    A factor applies to devices whose model contains its name, in any letter case; the longest such
    name counts. Of each device, the most that the pod's containers use at one time counts.
    """
    devices: dict[DeviceUuid, list[Share]] = {}
    for share in lease.shares:
        devices.setdefault(share.device, []).append(share)
    total = cores_total = Fraction(0)
    models: list[str] = []
    for shares in devices.values():
        cores, memory = _parts(shares, budget)
        model = shares[0].device_model
        if model not in models:
            models.append(model)
        cores_total += cores
        total += _weight(cores, memory, budget.weight_mode) * _factor(model, factors)
    return LeaseWeight(
        milli_gpu=math.ceil(1000 * total),
        model="+".join(models),
        cores_milli=math.ceil(1000 * cores_total),
        memory_mib=sum(_memory_mib(shares) for shares in devices.values()),
    )


def _parts(shares: list[Share], budget: Budget) -> tuple[Fraction, Fraction]:
    if any(share.whole or share.sharing is SharingPolicy.EXCLUSIVE for share in shares):
        return WHOLE, WHOLE
    memory = _most(shares, _memory)
    cores = _most(shares, lambda share: _cores(share, budget))
    return min(cores, WHOLE), min(memory, WHOLE)


def _memory(share: Share) -> Fraction:
    """Return the part of the device's memory; all of it if the lease was restored without that."""
    return Fraction(share.memory_mib, share.device_mib) if share.device_mib > 0 else WHOLE


def _cores(share: Share, budget: Budget) -> Fraction:
    if share.cores_percent > 0:
        return Fraction(share.cores_percent, 100)
    if budget.uncapped_core_percent is not None:
        return Fraction(budget.uncapped_core_percent, 100)
    return _memory(share)


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
    return peak(((part(share), share.init) for share in shares), Fraction(0))


def _memory_mib(shares: Iterable[Share]) -> int:
    return int(_most(shares, lambda share: Fraction(share.memory_mib)))

"""The weight of a lease: how much of its GPUs it has; pure."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Protocol

from shared.model.budgets.budget import Budget, WeightMode
from shared.model.devices.device import longest_name_in
from shared.model.leases.lease import Lease, Share
from shared.model.names import DeviceUuid, Namespace
from shared.model.quantity import peak
from shared.model.requests.request import SharingPolicy

WHOLE = Fraction(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseWeight:
    milli_gpu: int
    model: str
    """Several are joined with `+`."""
    cores_milli: int
    memory_mib: int


def weigh(lease: Lease, budget: Budget, factors: Mapping[str, Fraction | Decimal]) -> LeaseWeight:
    """Weigh a lease by what it records: also once its devices are gone.

    The sum of the weights per device, each times its model's factor, is rounded up once.
    """
    devices = shares_by_device(lease)
    total = Fraction(0)
    cores_total = total
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


def shares_by_device(lease: Lease) -> dict[DeviceUuid, list[Share]]:
    devices: dict[DeviceUuid, list[Share]] = {}
    for share in lease.shares:
        devices.setdefault(share.device, []).append(share)
    return devices


def milli_gpu(shares: list[Share]) -> int:
    """Return the larger part of a device's cores or memory that a lease has, rounded up."""
    return math.ceil(1000 * max(_parts(shares, Budget(namespace=Namespace("")))))


class HeldPart(Protocol):
    @property
    def memory_mib(self) -> int: ...
    @property
    def device_mib(self) -> int: ...
    @property
    def cores_percent(self) -> int: ...
    @property
    def whole(self) -> bool: ...
    @property
    def init(self) -> bool: ...


def milli_gpu_of(shares: Iterable[HeldPart]) -> int:
    parts = tuple(shares)
    memory = peak(
        [(Fraction(part.memory_mib, max(part.device_mib, 1)), part.init) for part in parts],
        Fraction(0),
    )
    cores = peak([(Fraction(part.cores_percent, 100), part.init) for part in parts], Fraction(0))
    whole = any(part.whole for part in parts)
    return math.ceil(1000 * (WHOLE if whole else min(max(memory, cores), WHOLE)))


def gpus_of_share(lease: Lease, share: Share) -> float:
    """The parts add up to the pod's weight. Init containers have none beside others."""
    together = [other for other in lease.shares if other.device == share.device]
    running = [other for other in together if not other.init] or together
    if share not in running:
        return 0.0
    alone = sum(milli_gpu([other]) for other in running)
    part = milli_gpu([share]) / alone if alone else 1 / len(running)
    return part * milli_gpu(together) / 1000


def _parts(shares: list[Share], budget: Budget) -> tuple[Fraction, Fraction]:
    if any(share.whole or share.sharing is SharingPolicy.EXCLUSIVE for share in shares):
        return WHOLE, WHOLE
    memory = _most(shares, _memory)
    cores = _most(shares, lambda share: _cores(share, budget))
    return min(cores, WHOLE), min(memory, WHOLE)


def _memory(share: Share) -> Fraction:
    """Return all of it if the lease was restored without the device's memory."""
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


def _factor(model: str, factors: Mapping[str, Fraction | Decimal]) -> Fraction:
    return Fraction(factors.get(longest_name_in(model, factors) or "*", WHOLE))


def _most(shares: Iterable[Share], part: Callable[[Share], Fraction]) -> Fraction:
    return peak(((part(share), share.init) for share in shares), Fraction(0))


def _memory_mib(shares: Iterable[Share]) -> int:
    return int(_most(shares, lambda share: Fraction(share.memory_mib)))

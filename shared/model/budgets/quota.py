"""Quotas: the most that the live leases of a namespace may hold at one time; pure.

Per device, a lease counts with thousandths of its cores and of the device (the larger of its parts
of cores and memory), with its MiB, and with the device as a card: two leases on one card hold one.
The ledger counts the same way (`functions/common/quota.lua`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from shared.model.bounds import (
    MOST_ENTRIES,
    Amount,
    KeyText,
    LongText,
    RunTime,
    ShortText,
)
from shared.model.names import DeviceUuid, Namespace

ALL_NAMESPACES = Namespace("*")
"""Of namespaces without a quota of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    cores_milli: Amount | None = None
    milli_gpu: Amount | None = None
    memory_mib: Amount | None = None
    cards: Amount | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    namespace: Namespace
    limits: QuotaLimits = QuotaLimits()
    models: Annotated[tuple[tuple[LongText, QuotaLimits], ...], Meta(max_length=MOST_ENTRIES)] = ()
    only_models: bool = False
    model_label: KeyText = ""
    """The node label with the model's name; empty if the device's own name contains it, in any
    letter case."""
    pools: Annotated[tuple[LongText, ...], Meta(max_length=MOST_ENTRIES)] = ()
    """Only nodes whose `pool_label` has one of these values, unless it is empty."""
    pool_label: KeyText = ""
    default_run_s: RunTime | None = None
    """Of a pod that sets none; None for `max_run_s`."""
    max_run_s: RunTime | None = None
    """The longest that a pod may set; None for any, and none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaExcess:
    measure: ShortText
    """cores, milliGPU, memoryMiB or cards; `pool`, `model`: the node or device is not allowed;
    `runTime`, in seconds."""
    model: LongText = ""
    """Empty for all devices together."""
    limit: Amount = 0
    used: Amount = 0
    requested: Amount = 0
    by_gang: Amount = 0
    """The part of `used` that is for other pods of the gang."""
    label: KeyText = ""
    """Empty if devices' own names are compared."""
    values: tuple[LongText, ...] = ()
    """Of `pool` and `model`, what is allowed. Of all `cards`, the devices that are held."""

    @property
    def names_places(self) -> bool:
        return bool(self.model) or self.measure in {"pool", "model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUsage:
    cores_milli: int = 0
    milli_gpu: int = 0
    memory_mib: int = 0
    devices: Mapping[DeviceUuid, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaTotals:
    quotas: Mapping[Namespace, Quota] = field(default_factory=dict)
    used: Mapping[Namespace, Mapping[str, QuotaUsage]] = field(default_factory=dict)
    """By model; the total under the empty name."""
    charges: Mapping[str, tuple[Namespace, Mapping[str, QuotaUsage]]] = field(default_factory=dict)

    def quota_of(self, namespace: Namespace) -> Quota | None:
        return self.quotas.get(namespace) or self.quotas.get(ALL_NAMESPACES)


def total_of(charges: Iterable[QuotaUsage]) -> QuotaUsage:
    cores = 0
    milli = 0
    memory = 0
    devices: dict[DeviceUuid, int] = {}
    for charge in charges:
        cores += charge.cores_milli
        milli += charge.milli_gpu
        memory += charge.memory_mib
        for uuid, count in charge.devices.items():
            devices[uuid] = devices.get(uuid, 0) + count
    return QuotaUsage(cores_milli=cores, milli_gpu=milli, memory_mib=memory, devices=devices)

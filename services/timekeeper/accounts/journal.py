"""Changes of the accounts that follow from the journal of leases; pure.

A charged lease is one lease at one size: from when it was bound or resized until it was resized or
ended. Its id consists of the pod and the time of its reservation, which neither a rebuild nor the
pod's next lease changes; and of the time of its resize, if it was resized.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction

from msgspec import structs

from shared.model.budgets.budget import Account, Budget, ChargedLease, JournalEntry, WeightMode
from shared.model.devices.device import longest_name_in
from shared.model.leases.lease import Lease, LeaseState, Share
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
    """Weigh a lease, exactly, by what it records: also once its devices are gone.

    The shares of a device's cores and memory become one weight per device; their sum, each times
    its model's factor, is rounded up once. A factor applies to devices whose model contains its
    name, in any letter case; the longest such name counts. Of each device, the most that the pod's
    containers use at one time counts.
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


def _factor(model: str, factors: Mapping[str, Fraction | Decimal]) -> Fraction:
    return Fraction(factors.get(longest_name_in(model, factors) or "*", WHOLE))


def _most(shares: Iterable[Share], part: Callable[[Share], Fraction]) -> Fraction:
    return peak(((part(share), share.init) for share in shares), Fraction(0))


def _memory_mib(shares: Iterable[Share]) -> int:
    return int(_most(shares, lambda share: Fraction(share.memory_mib)))


CHARGED_STATES = frozenset({LeaseState.BOUND, LeaseState.ACTIVE})

Weigh = Callable[[Lease], LeaseWeight]


@dataclass(slots=True)
class JournalChanges:
    charged: dict[str, ChargedLease] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)


def charged_lease_id(lease: Lease) -> str:
    size = f"/{resized_ms(lease)}" if lease.resized_at else ""
    return f"{lease.pod}/{created_ms(lease)}{size}"


def lease_family(charged_lease: str) -> str:
    """Return the part of the id that all sizes of one lease share."""
    return "/".join(charged_lease.split("/")[:2])


def resized_ms(lease: Lease) -> int:
    """Return when the lease was last resized, or 0 if it was not."""
    return round(lease.resized_at * 1000)


def created_ms(lease: Lease) -> int:
    return round(lease.created_at * 1000)


def journal_changes(
    entries: Iterable[JournalEntry], weigh: Weigh, counted_ms: Mapping[str, int]
) -> dict[Namespace, JournalChanges]:
    """Read the journal. `counted_ms`: until when restored leases are charged already."""
    changes: dict[Namespace, JournalChanges] = {}
    for entry in entries:
        for lease in entry.leases:
            change = changes.setdefault(lease.namespace, JournalChanges())
            if entry.kind == "ended":
                change.ended[charged_lease_id(lease)] = entry.at_ms
                continue
            since = entry.at_ms
            if entry.kind == "restored":
                since = _restored_since(lease, counted_ms)
            change.ended.pop(charged_lease_id(lease), None)
            change.charged.setdefault(
                charged_lease_id(lease), _charged_lease(lease, weigh(lease), since)
            )
    return changes


def _restored_since(lease: Lease, counted_ms: Mapping[str, int]) -> int:
    return max(created_ms(lease), resized_ms(lease), counted_ms.get(charged_lease_id(lease), 0))


def _charged_lease(lease: Lease, weighed: LeaseWeight, since_ms: int) -> ChargedLease:
    return ChargedLease(
        id=charged_lease_id(lease),
        pod=lease.pod,
        name=lease.name,
        weight=weighed.milli_gpu,
        since_ms=since_ms,
        charged_ms=since_ms,
        model=weighed.model,
        cores_milli=weighed.cores_milli,
        memory_mib=weighed.memory_mib,
    )


def reconcile(
    changes: dict[Namespace, JournalChanges],
    live: Iterable[Lease],
    accounts: Iterable[Account],
    weigh: Weigh,
    counted_ms: Mapping[str, int],
    *,
    known_ms: int,
) -> None:
    """Complete the changes of a journal that was lost or trimmed, by comparing live leases.

    Live leases without an account entry are charged from when they were reserved or resized. A
    charged lease that is no longer live ended at `known_ms`, when it was last known to be live, or
    at the end of its last charge if that is later. If the lease was resized, the charged lease of
    the old size ended at the resize. No charged lease begins before an earlier one of the same
    lease has ended.
    """
    charged = {charged_lease_id(lease): lease for lease in live if lease.state in CHARGED_STATES}
    accounts = tuple(accounts)
    family_ends = _end_missing(changes, charged, accounts, known_ms)
    charged_ids = {lease.id for account in accounts for lease in account.leases}
    for id_, lease in charged.items():
        change = changes.setdefault(lease.namespace, JournalChanges())
        since = max(_restored_since(lease, counted_ms), family_ends.get(lease_family(id_), 0))
        if id_ in change.charged:
            change.charged[id_] = _started_at_least(change.charged[id_], since)
        elif id_ not in charged_ids and id_ not in change.ended:
            change.charged[id_] = _charged_lease(lease, weigh(lease), since)


def _end_missing(
    changes: dict[Namespace, JournalChanges],
    charged: Mapping[str, Lease],
    accounts: Iterable[Account],
    known_ms: int,
) -> dict[str, int]:
    """End the accounts' leases that are no longer live; return the last end by family."""
    resized = {lease_family(id_): resized_ms(lease) for id_, lease in charged.items()}
    family_ends: dict[str, int] = {}
    for account in accounts:
        change = changes.setdefault(account.namespace, JournalChanges())
        for lease in account.leases:
            if lease.id in charged:
                continue
            family = lease_family(lease.id)
            if lease.ended_ms is None:
                until = resized.get(family) or known_ms
                change.ended.setdefault(lease.id, max(until, lease.charged_ms))
            ended_ms = change.ended.get(lease.id, lease.ended_ms or 0)
            family_ends[family] = max(ended_ms, family_ends.get(family, 0))
    return family_ends


def _started_at_least(lease: ChargedLease, since_ms: int) -> ChargedLease:
    since = max(lease.since_ms, since_ms)
    return structs.replace(lease, since_ms=since, charged_ms=max(lease.charged_ms, since))

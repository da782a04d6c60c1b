"""Changes of the accounts that follow from the journal of leases; pure.

A charged lease is one lease at one size. Its id has the pod and the time of its reservation, which
neither a rebuild nor the pod's next lease changes, and the time of its resize, if any.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import structs

from shared.model.budgets.budget import Account, ChargedLease, JournalEntry
from shared.model.budgets.weights import LeaseWeight
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import Namespace

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
    return "/".join(charged_lease.split("/")[:2])


def resized_ms(lease: Lease) -> int:
    return round(lease.resized_at * 1000)


def created_ms(lease: Lease) -> int:
    return round(lease.created_at * 1000)


def journal_changes(
    entries: Iterable[JournalEntry], weigh: Weigh, counted_ms: Mapping[str, int]
) -> dict[Namespace, JournalChanges]:
    """`counted_ms` has until when restored leases are charged already."""
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
    charged lease that is no longer live ended at the resize, at `known_ms`, when it was last known
    to be live, or at the end of its last charge if that is later. No charged lease begins before an
    earlier one of the same lease has ended.
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
    """Return the last end by family."""
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

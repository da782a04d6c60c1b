"""What the journal of tenures means for the accounts; pure.

A tenure is one lease, at one size, from the moment it was bound or resized until it was resized or
ended. Its id is the pod and the moment its reservation was made, which nothing changes: not a
rebuild, and not the pod's next lease; and once it was resized, the moment of that.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from services.timekeeper.accounts.weights import Weighed
from shared.model.budget import Account, ChargedLease, JournalEntry
from shared.model.lease import Lease, LeaseState
from shared.model.names import Namespace

HELD_STATES = frozenset({LeaseState.BOUND, LeaseState.ACTIVE})

Weigh = Callable[[Lease], Weighed]


@dataclass(slots=True)
class Intake:
    """What is to be written of one namespace."""

    held: dict[str, ChargedLease] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)


def tenure_id(lease: Lease) -> str:
    """Name the tenure of a lease."""
    size = f"/{resized_ms(lease)}" if lease.resized_at else ""
    return f"{lease.pod}/{created_ms(lease)}{size}"


def family_of(tenure: str) -> str:
    """Return what the tenures of one lease have in common, whatever its sizes."""
    return "/".join(tenure.split("/")[:2])


def resized_ms(lease: Lease) -> int:
    """Return when the lease got its size, if it was resized."""
    return round(lease.resized_at * 1000)


def created_ms(lease: Lease) -> int:
    """Return when the lease was reserved."""
    return round(lease.created_at * 1000)


def intake(
    happened: Iterable[JournalEntry], weigh: Weigh, counted_ms: Mapping[str, int]
) -> dict[Namespace, Intake]:
    """Read the journal. `counted_ms`: up to when tenures that come again are charged already."""
    found: dict[Namespace, Intake] = {}
    for moment in happened:
        for lease in moment.leases:
            taken = found.setdefault(lease.namespace, Intake())
            if moment.kind == "ended":
                taken.ended[tenure_id(lease)] = moment.at_ms
                continue
            since = moment.at_ms
            if moment.kind == "restored":
                since = _restored_since(lease, counted_ms)
            taken.ended.pop(tenure_id(lease), None)
            taken.held.setdefault(tenure_id(lease), _tenure(lease, weigh(lease), since))
    return found


def _restored_since(lease: Lease, counted_ms: Mapping[str, int]) -> int:
    return max(created_ms(lease), resized_ms(lease), counted_ms.get(tenure_id(lease), 0))


def _tenure(lease: Lease, weighed: Weighed, since_ms: int) -> ChargedLease:
    return ChargedLease(
        id=tenure_id(lease),
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
    found: dict[Namespace, Intake],
    live: Iterable[Lease],
    accounts: Iterable[Account],
    weigh: Weigh,
    counted_ms: Mapping[str, int],
    *,
    seen_ms: int,
) -> None:
    """Add to an intake what a journal that began anew, or was cut, does not say.

    Leases that nobody has told of are held since they were reserved or resized. Tenures whose lease
    is gone ended when this was last known to be otherwise: at `seen_ms`, or where they are charged
    up to; those of a lease that has another size by now, when it got that. None of one lease begins
    before another of it has ended.
    """
    holding = {tenure_id(lease): lease for lease in live if lease.state in HELD_STATES}
    sized = {family_of(id_): resized_ms(lease) for id_, lease in holding.items()}
    known: set[str] = set()
    over: dict[str, int] = {}
    for account in accounts:
        taken = found.setdefault(account.namespace, Intake())
        for tenure in account.leases:
            known.add(tenure.id)
            if tenure.id in holding:
                continue
            if tenure.ended_ms is None:
                until = sized.get(family_of(tenure.id)) or seen_ms
                taken.ended.setdefault(tenure.id, max(until, tenure.charged_ms))
            ended_ms = taken.ended.get(tenure.id, tenure.ended_ms or 0)
            family = family_of(tenure.id)
            over[family] = max(ended_ms, over.get(family, 0))
    for id_, lease in holding.items():
        taken = found.setdefault(lease.namespace, Intake())
        since = max(_restored_since(lease, counted_ms), over.get(family_of(id_), 0))
        if id_ in taken.held:
            taken.held[id_] = _begun(taken.held[id_], since)
        elif id_ not in known and id_ not in taken.ended:
            taken.held[id_] = _tenure(lease, weigh(lease), since)


def _begun(tenure: ChargedLease, since_ms: int) -> ChargedLease:
    """Return a tenure that begins at an instant at the earliest."""
    since = max(tenure.since_ms, since_ms)
    return replace(tenure, since_ms=since, charged_ms=max(tenure.charged_ms, since))

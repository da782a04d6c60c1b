"""What the journal of tenures means for the accounts; pure.

A tenure is one lease from the moment it was bound until it ended. Its id is the pod and the moment
its reservation was made, which nothing changes: not a rebuild, and not the pod's next lease.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from services.timekeeper.weights import Weighed
from shared.model.budget import Account, Moment, Tenure
from shared.model.lease import Lease, LeaseState
from shared.model.names import Namespace

HELD_STATES = frozenset({LeaseState.BOUND, LeaseState.ACTIVE})

Weigh = Callable[[Lease], Weighed]


@dataclass(slots=True)
class Intake:
    """What is to be written of one namespace."""

    held: dict[str, Tenure] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)


def tenure_id(lease: Lease) -> str:
    """Name the tenure of a lease."""
    return f"{lease.pod}/{created_ms(lease)}"


def created_ms(lease: Lease) -> int:
    """Return when the lease was reserved."""
    return round(lease.created_at * 1000)


def intake(
    happened: Iterable[Moment], weigh: Weigh, counted_ms: Mapping[str, int]
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
    return max(created_ms(lease), counted_ms.get(tenure_id(lease), 0))


def _tenure(lease: Lease, weighed: Weighed, since_ms: int) -> Tenure:
    return Tenure(
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

    Leases that nobody has told of are held since they were reserved. Tenures whose lease is gone
    ended when this was last known to be otherwise: at `seen_ms`, or where they are charged up to.
    """
    holding = {tenure_id(lease): lease for lease in live if lease.state in HELD_STATES}
    known: set[str] = set()
    for account in accounts:
        taken = found.setdefault(account.namespace, Intake())
        for tenure in account.tenures:
            known.add(tenure.id)
            if tenure.ended_ms is None and tenure.id not in holding:
                taken.ended.setdefault(tenure.id, max(seen_ms, tenure.charged_ms))
    for id_, lease in holding.items():
        taken = found.setdefault(lease.namespace, Intake())
        if id_ not in known and id_ not in taken.ended:
            since = _restored_since(lease, counted_ms)
            taken.held.setdefault(id_, _tenure(lease, weigh(lease), since))

"""Where the ledger and a complete listing of bound pods differ; pure.

Kubernetes wins: a lease whose pod is gone ends. The reverse creates nothing: a pod that carries a
lease which the ledger does not have is reported.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.model.events.pod_events import BoundPod
from shared.model.lease import Lease, LeaseState
from shared.model.names import PodUid

GRACE_S = 5.0
"""A lease that is younger than this at the time of the listing may be missing from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMismatch:
    """What differs between the ledger and the cluster."""

    orphans: tuple[Lease, ...] = ()
    """Leases whose pods are missing."""
    unleased: tuple[BoundPod, ...] = ()
    """Pods that carry a lease which the ledger does not have."""
    moved: tuple[tuple[Lease, BoundPod], ...] = ()
    """Leases for another node than their pod's."""


def compare(
    leases: Iterable[Lease], pods: Sequence[BoundPod], *, listed_at: float
) -> LedgerMismatch:
    """Compare leases with the pods of a complete listing made at `listed_at` (Unix seconds)."""
    listed: Mapping[PodUid, BoundPod] = {pod.pod: pod for pod in pods}
    orphans: list[Lease] = []
    moved: list[tuple[Lease, BoundPod]] = []
    leased: set[PodUid] = set()
    for lease in leases:
        leased.add(lease.pod)
        pod = listed.get(lease.pod)
        if pod is not None and pod.node != lease.node and lease.state is not LeaseState.RESERVED:
            moved.append((lease, pod))
        if pod is None and _should_be_listed(lease, listed_at):
            orphans.append(lease)
    return LedgerMismatch(
        orphans=tuple(orphans),
        unleased=tuple(pod for pod in pods if pod.lease and pod.pod not in leased),
        moved=tuple(moved),
    )


def _should_be_listed(lease: Lease, listed_at: float) -> bool:
    committed = lease.state in {LeaseState.BOUND, LeaseState.ACTIVE}
    return committed and lease.created_at < listed_at - GRACE_S

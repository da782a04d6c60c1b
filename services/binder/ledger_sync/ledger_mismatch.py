"""Differences between the ledger and a complete listing of bound pods and claims; pure.

Kubernetes wins: a lease whose pod is gone ends. The reverse creates nothing: a pod with a lease in
its annotation that is not in the ledger is reported.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.model.events.pod_events import BoundPod
from shared.model.lease import Lease, LeaseState
from shared.model.names import PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMismatch:
    """The differences between the ledger and the cluster."""

    orphans: tuple[Lease, ...] = ()
    """Leases whose pods are missing."""
    unleased: tuple[BoundPod, ...] = ()
    """Pods with a lease in their annotation that is not in the ledger."""
    moved: tuple[tuple[Lease, BoundPod], ...] = ()
    """Leases for another node than their pod's."""


def compare(leases: Iterable[Lease], pods: Sequence[BoundPod]) -> LedgerMismatch:
    """Compare leases with the pods of a complete listing.

    A lease that was committed after the listing began counts as an orphan, too: its pod is read.
    """
    listed: Mapping[PodUid, BoundPod] = {pod.pod: pod for pod in pods}
    orphans: list[Lease] = []
    moved: list[tuple[Lease, BoundPod]] = []
    leased: set[PodUid] = set()
    for lease in leases:
        leased.add(lease.pod)
        pod = listed.get(lease.pod)
        if pod is not None and pod.node != lease.node and lease.state is not LeaseState.RESERVED:
            moved.append((lease, pod))
        if not _holds(pod, lease) and lease.state is not LeaseState.RESERVED:
            orphans.append(lease)
    return LedgerMismatch(
        orphans=tuple(orphans),
        unleased=tuple(pod for pod in pods if pod.lease and pod.pod not in leased),
        moved=tuple(moved),
    )


def _holds(holder: BoundPod | None, lease: Lease) -> bool:
    """Return whether the holder of a lease is there, a claim with the same allocation."""
    if holder is None:
        return False
    return lease.claim is None or lease.claim.generation == holder.generation

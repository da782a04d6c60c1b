"""Differences between the ledger and a complete listing of bound pods and claims; pure.

Kubernetes wins: a lease whose pod is gone ends. The reverse creates nothing: a pod with a lease in
its annotation that is not in the ledger is reported.
"""

from collections.abc import Iterable

from shared.model.events.pod_events import BoundPod
from shared.model.lease import Lease, LeaseState
from shared.model.names import PodUid


class LedgerMismatch:
    """The differences between the ledger, which is added page by page, and the cluster.

    A lease that was made after the listing began counts as an orphan, too: its pod is read. So does
    a reservation if its pod is neither on a node nor `unbound`: a rollback brought it back.
    """

    def __init__(self, pods: Iterable[BoundPod], unbound: Iterable[PodUid] = ()) -> None:
        self.orphans: list[Lease] = []
        """Leases whose pods are missing."""
        self.moved: list[tuple[Lease, BoundPod]] = []
        """Leases for another node than their pod's."""
        self._listed = {pod.pod: pod for pod in pods}
        self._unbound = frozenset(unbound)
        self._leased: set[PodUid] = set()

    def add(self, leases: Iterable[Lease]) -> None:
        """Compare some of the ledger's leases."""
        for lease in leases:
            self._leased.add(lease.pod)
            if lease.state is LeaseState.RESERVED and lease.pod in self._unbound:
                continue
            pod = self._listed.get(lease.pod)
            if pod is not None and pod.node != lease.node:
                self.moved.append((lease, pod))
            if not _holds(pod, lease):
                self.orphans.append(lease)

    def unleased(self) -> list[BoundPod]:
        """Return pods with a lease in their annotation that none of the added leases is."""
        return [pod for pod in self._listed.values() if pod.lease and pod.pod not in self._leased]


def _holds(holder: BoundPod | None, lease: Lease) -> bool:
    """Return whether the holder of a lease is there, a claim with the same allocation."""
    if holder is None:
        return False
    return lease.claim is None or lease.claim.generation == holder.generation

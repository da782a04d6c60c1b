"""Leases to restore in an empty ledger, from agents' reports and pods' annotations; pure.

An agent's activation shows what the kubelet received, so it has precedence. A bound pod's
annotation is a copy that may have been edited, so it counts only if no agent reports, and only if
it names this pod and its node. An activation of a pod that is not listed comes last: the pod may
still run, or another pod may have its devices. The ledger refuses what does not fit.
"""

from collections.abc import Iterable, Iterator, Mapping

from msgspec import structs

from shared.model.errors import RequestError
from shared.model.events.node_events import Allocation
from shared.model.events.pod_events import BoundPod
from shared.model.lease import Lease, LeaseState
from shared.model.lease_copy import load_lease
from shared.model.names import NodeName, PodUid

NODES_PER_PAGE = 64


class Recovery:
    """Evidence of leases: one complete listing, then agents' reports, some nodes at a time.

    Leases are returned to be restored in the order of the methods.
    """

    def __init__(self, pods: Iterable[BoundPod]) -> None:
        self.silent: set[NodeName] = set()
        """Nodes that have a pod with a lease, and have not reported."""
        self.problems: list[str] = []
        """Evidence that was rejected."""
        self.unlisted: dict[PodUid, Lease] = {}
        """Activated leases whose pods are not listed: they end once the containers have
        terminated."""
        self.lagging: list[Lease] = []
        """Activated leases of another size than in their pods' annotations: a resize was in
        progress."""
        self._nodes: dict[PodUid, NodeName] = {}
        self._unreported: dict[PodUid, BoundPod] = {}
        """Pods with a lease that no agent has reported."""
        for pod in pods:
            self._nodes[pod.pod] = pod.node
            if pod.lease:
                self._unreported[pod.pod] = pod
                self.silent.add(pod.node)

    def add_reports(self, allocations: Mapping[NodeName, Iterable[Allocation]]) -> list[Lease]:
        """Return the leases that these nodes' agents have activated for listed pods."""
        self.silent.difference_update(allocations)
        active: dict[PodUid, Lease] = {}
        for node, of_node in allocations.items():
            for allocation in of_node:
                problem = self._problem(node, allocation)
                if problem:
                    self.problems.append(problem)
                else:
                    _keep_newest(active, allocation.lease)
        listed = [lease for lease in active.values() if lease.pod in self._nodes]
        self.lagging += [lease for lease in listed if self._lags(lease)]
        for lease in active.values():
            if lease.pod not in self._nodes:
                _keep_newest(self.unlisted, lease)
        return listed

    def _lags(self, lease: Lease) -> bool:
        """Take an activated lease's pod off those unreported; return whether its copy differs."""
        pod = self._unreported.pop(lease.pod, None)
        copy = _lease_of_pod(pod) if pod is not None else None
        return isinstance(copy, Lease) and copy.shares != lease.shares

    def annotated(self) -> Iterator[list[Lease]]:
        """Yield the leases in annotations of all other pods, each node's oldest first."""
        by_node: dict[NodeName, list[BoundPod]] = {}
        for pod in self._unreported.values():
            by_node.setdefault(pod.node, []).append(pod)
        of_nodes = list(by_node.values())
        for first in range(0, len(of_nodes), NODES_PER_PAGE):
            page = of_nodes[first : first + NODES_PER_PAGE]
            found = [_lease_of_pod(pod) for pods in page for pod in pods]
            self.problems += [each for each in found if isinstance(each, str)]
            leases = [each for each in found if isinstance(each, Lease)]
            yield sorted(leases, key=lambda lease: lease.created_at)

    def _problem(self, node: NodeName, allocation: Allocation) -> str | None:
        """Return why the activation is no evidence, or None."""
        lease = allocation.lease
        if lease.pod != allocation.pod or lease.node != node:
            return (
                f"node {node} reports for pod {allocation.pod} a lease of pod {lease.pod} "
                f"on node {lease.node}"
            )
        if self._nodes.get(lease.pod, node) != node:
            return (
                f"node {node} honours a lease of pod {lease.pod}, which is on "
                f"{self._nodes[lease.pod]}"
            )
        return None


def _keep_newest(active: dict[PodUid, Lease], lease: Lease) -> None:
    """Add an activated lease, unless a newer one of the same pod is there."""
    known = active.get(lease.pod)
    if known is None or known.version < lease.version:
        active[lease.pod] = structs.replace(lease, state=LeaseState.ACTIVE, expires_at=0.0)


def _lease_of_pod(pod: BoundPod) -> Lease | str:
    """Return the lease in the pod's annotation, or why it is invalid."""
    subject = f"pod {pod.namespace}/{pod.name} ({pod.pod}) on node {pod.node}"
    try:
        lease = load_lease(pod.lease, namespace=pod.namespace, name=pod.name)
    except RequestError as error:
        return f"{subject}: {error}"
    generation = lease.claim.generation if lease.claim else ""
    if (lease.pod, lease.node, generation) != (pod.pod, pod.node, pod.generation):
        return f"{subject} carries a lease of pod {lease.pod} on node {lease.node}"
    return lease

"""Leases to restore in an empty ledger, from agents' reports and pods' annotations; pure.

An agent's activation shows what the kubelet received, so it has precedence. A bound pod's
annotation is a copy that may have been edited, so it counts only if no agent reports, and only if
it names this pod and its node. An activation of a pod that is not listed comes last: the pod may
still run, or another pod may have its devices. The ledger refuses what does not fit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec import structs

from shared.model.errors import RequestError
from shared.model.events.node_events import Allocation
from shared.model.events.pod_events import BoundPod
from shared.model.lease import Lease, LeaseState
from shared.model.lease_copy import load_lease
from shared.model.names import NodeName, PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence that was collected since the rebuild began."""

    pods: tuple[BoundPod, ...]
    """Pods and claims of one complete listing."""
    allocations: Mapping[NodeName, tuple[Allocation, ...]]
    """Of every node that has reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Leases to restore, those with the best evidence first, and evidence that was rejected."""

    leases: tuple[Lease, ...]
    problems: tuple[str, ...] = ()
    unlisted: tuple[Lease, ...] = ()
    """Those of them whose pods are not listed: they end once the containers have terminated."""
    lagging: tuple[Lease, ...] = ()
    """Those of them whose pods' annotations have another size: a resize was in progress."""


def silent_nodes(pods: Iterable[BoundPod], reported: Iterable[NodeName]) -> frozenset[NodeName]:
    """Return the nodes that have a pod with a lease and have not reported."""
    return frozenset({pod.node for pod in pods if pod.lease}.difference(reported))


def recover(evidence: Evidence) -> Recovery:
    """Return the leases to restore."""
    nodes = {pod.pod: pod.node for pod in evidence.pods}
    active, problems = _leases_of_agents(evidence.allocations, nodes)
    annotated: list[Lease] = []
    lagging: list[Lease] = []
    for pod in evidence.pods:
        if not pod.lease:
            continue
        match _lease_of_pod(pod), active.get(pod.pod):
            case Lease() as lease, None:
                annotated.append(lease)
            case str() as problem, None:
                problems.append(problem)
            case Lease() as copy, Lease() as lease if copy.shares != lease.shares:
                lagging.append(lease)
    annotated.sort(key=lambda lease: lease.created_at)
    listed = [lease for lease in active.values() if lease.pod in nodes]
    unlisted = [lease for lease in active.values() if lease.pod not in nodes]
    return Recovery(
        leases=(*listed, *annotated, *unlisted),
        problems=tuple(problems),
        unlisted=tuple(unlisted),
        lagging=tuple(lagging),
    )


def _leases_of_agents(
    allocations: Mapping[NodeName, Iterable[Allocation]], nodes: Mapping[PodUid, NodeName]
) -> tuple[dict[PodUid, Lease], list[str]]:
    """Return the newest lease that an agent activated for each pod, and the inconsistencies."""
    active: dict[PodUid, Lease] = {}
    problems: list[str] = []
    for node, of_node in allocations.items():
        for allocation in of_node:
            lease = allocation.lease
            if lease.pod != allocation.pod or lease.node != node:
                problems.append(
                    f"node {node} reports for pod {allocation.pod} a lease of pod {lease.pod} "
                    f"on node {lease.node}"
                )
            elif nodes.get(lease.pod, node) != node:
                problems.append(
                    f"node {node} honours a lease of pod {lease.pod}, which is on "
                    f"{nodes[lease.pod]}"
                )
            elif lease.pod not in active or active[lease.pod].version < lease.version:
                active[lease.pod] = structs.replace(lease, state=LeaseState.ACTIVE, expires_at=0.0)
    return active, problems


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

"""What an emptied ledger must hold again, from what agents and pods say.

An agent's activation is what the kubelet was told, so it comes first; a bound pod's annotation is a
copy that anybody could have edited, so it counts only where no agent speaks, and only if it names
this very pod and its node. What an agent says of a pod that is not listed comes last: the pod may
still run, or it is over and its place is another's by now. The ledger itself refuses what would not
fit.
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
    """What was collected since the rebuild began."""

    pods: tuple[BoundPod, ...]
    """Of one complete listing."""
    allocations: Mapping[NodeName, tuple[Allocation, ...]]
    """Of every node that has reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Leases to restore, in the order of their claim, and what could not be believed."""

    leases: tuple[Lease, ...]
    problems: tuple[str, ...] = ()
    lagging: tuple[Lease, ...] = ()
    """Those of them whose pods carry copies of another size: a resize was under way."""


def silent_nodes(evidence: Evidence) -> frozenset[NodeName]:
    """Return the nodes that hold a pod with a lease and have not reported."""
    holding = {pod.node for pod in evidence.pods if pod.lease}
    return frozenset(holding.difference(evidence.allocations))


def recover(evidence: Evidence) -> Recovery:
    """Decide which leases the ledger gets back."""
    nodes = {pod.pod: pod.node for pod in evidence.pods}
    active, problems = _told_by_agents(evidence.allocations, nodes)
    bound: list[Lease] = []
    for pod in evidence.pods:
        if not pod.lease or pod.pod in active:
            continue
        match _told_by_pod(pod):
            case Lease() as lease:
                bound.append(lease)
            case problem:
                problems.append(problem)
    bound.sort(key=lambda lease: lease.created_at)
    listed = [lease for lease in active.values() if lease.pod in nodes]
    unlisted = [lease for lease in active.values() if lease.pod not in nodes]
    return Recovery(
        leases=(*listed, *bound, *unlisted),
        problems=tuple(problems),
        lagging=tuple(
            active[pod.pod]
            for pod in evidence.pods
            if pod.lease and pod.pod in active and _lags(_told_by_pod(pod), active[pod.pod])
        ),
    )


def _lags(told: Lease | str, lease: Lease) -> bool:
    return isinstance(told, Lease) and told.shares != lease.shares


def _told_by_agents(
    allocations: Mapping[NodeName, Iterable[Allocation]], nodes: Mapping[PodUid, NodeName]
) -> tuple[dict[PodUid, Lease], list[str]]:
    """Return the newest lease that an agent honoured for each pod, as an active one."""
    active: dict[PodUid, Lease] = {}
    problems: list[str] = []
    for node, told in allocations.items():
        for activation in told:
            lease = activation.lease
            if lease.pod != activation.pod or lease.node != node:
                problems.append(
                    f"node {node} reports for pod {activation.pod} a lease of pod {lease.pod} "
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


def _told_by_pod(pod: BoundPod) -> Lease | str:
    """Return the lease that the pod carries, or what is wrong with it."""
    who = f"pod {pod.namespace}/{pod.name} ({pod.pod}) on node {pod.node}"
    try:
        lease = load_lease(pod.lease, namespace=pod.namespace, name=pod.name)
    except RequestError as error:
        return f"{who}: {error}"
    if (lease.pod, lease.node) != (pod.pod, pod.node):
        return f"{who} carries a lease of pod {lease.pod} on node {lease.node}"
    return lease

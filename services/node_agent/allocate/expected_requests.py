"""The requests that the kubelet may make for pods with leases; pure."""

from collections.abc import Iterable, Set

from services.node_agent.allocate.allocation import HONOURED_STATES, NodeSnapshot
from services.node_agent.kubelet.pods import KubeletContainer, KubeletPod, PodResources
from shared.dialects import DIALECTS
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import PodUid

RequestSignature = tuple[str, int]


def is_expected(lease: Lease, allocated: Set[tuple[PodUid, str]]) -> bool:
    """For a ResourceClaim the kubelet never calls the device plugin."""
    if lease.state not in HONOURED_STATES or lease.claim is not None:
        return False
    done = [(lease.pod, name) in allocated for name in lease.containers]
    return not all(done) and (lease.state is LeaseState.BOUND or any(done))


def limits_of(lease: Lease, container: str, node: NodeSnapshot) -> dict[str, int]:
    dialect = DIALECTS.get(lease.dialect)
    if dialect is None:  # Allocate reports it
        return {}
    shares = lease.shares_of(container)
    counts = {
        resource: sum(dialect.id_count(share, resource) for share in shares)
        for resource in sorted(node.served.keys() & dialect.served)
    }
    return {resource: count for resource, count in counts.items() if count > 0}


def resources_of(lease: Lease, node: NodeSnapshot) -> frozenset[str]:
    dialect = DIALECTS.get(lease.dialect)
    if dialect is None:  # Allocate reports it
        return frozenset()
    return (dialect.served | dialect.resources) & node.served.keys()


def signatures_of(lease: Lease, node: NodeSnapshot) -> frozenset[RequestSignature]:
    return frozenset(
        signature for name in lease.containers for signature in limits_of(lease, name, node).items()
    )


def implied_pods(
    leases: Iterable[Lease], node: NodeSnapshot, allocated: Set[tuple[PodUid, str]]
) -> tuple[KubeletPod, ...]:
    return tuple(
        KubeletPod(
            uid=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            phase="Pending" if is_expected(lease, allocated) else "Running",
            containers=tuple(
                KubeletContainer(
                    name=name,
                    limits=limits_of(lease, name, node),
                    init=any(share.init for share in lease.shares_of(name)),
                )
                for name in lease.containers
            ),
        )
        for lease in leases
        if lease.state in HONOURED_STATES and lease.claim is None
    )


def unlisted_pods(
    pods: Iterable[KubeletPod], implied: Iterable[KubeletPod], pod_resources: PodResources
) -> tuple[KubeletPod, ...]:
    """Return implied pods that an old or empty list lacks, and PodResources list as active."""
    listed = {pod.uid for pod in pods}
    return tuple(
        pod
        for pod in implied
        if pod.uid not in listed and (pod.namespace, pod.name) in pod_resources.pods
    )

"""Audit checks of leases against pods, agents, gangs and annotations; pure."""

from collections import Counter
from collections.abc import Iterable, Iterator

from services.cli.audit.snapshot import (
    EXPIRE_S,
    EXPLAIN_S,
    OUTLIVE_S,
    Snapshot,
    pod_name,
)
from shared.dialects import DIALECTS
from shared.ledger.total_checks import BIND_S, Difference
from shared.model.errors import RequestError
from shared.model.events.node_events import Allocation
from shared.model.leases.lease import Lease, LeaseState, Share
from shared.model.leases.lease_copy import ANNOTATION, load_lease


def one_lease(snapshot: Snapshot) -> Iterator[Difference]:
    """S2: a pod holds one live lease."""
    for pod, count in Counter(lease.pod for lease in snapshot.leases).items():
        if count > 1:
            nodes = sorted(lease.node for lease in snapshot.leases if lease.pod == pod)
            text = f"it holds {count} live leases, on {', '.join(nodes)}"
            yield Difference("S2", f"pod {pod}", text)


def bound_is_leased(snapshot: Snapshot) -> Iterator[Difference]:
    """S3: every pod that Leasehold bound holds a lease on its node."""
    leases = {lease.pod: lease for lease in snapshot.leases}
    for pod in snapshot.pods:
        if not (pod.node and pod.is_active and ANNOTATION in pod.annotations):
            continue
        lease = leases.get(pod.pod)
        if lease is not None and lease.node == pod.node:
            continue
        holds = "holds no lease" if lease is None else f"holds a lease on {lease.node}"
        text = f"it is bound to {pod.node} and {holds}"
        yield Difference("S3", pod_name(pod), text, BIND_S)


def agents(snapshot: Snapshot) -> Iterator[Difference]:
    """S5, S7: devices handed to the kubelet match a live lease, and each active lease has some."""
    leases = {(lease.pod, lease.node): lease for lease in snapshot.leases}
    for node, allocations in snapshot.allocations.items():
        for allocation in allocations:
            yield from _allocation_mismatches(allocation, leases.get((allocation.pod, node)))
        allocated_pods = {allocation.pod for allocation in allocations}
        for lease in snapshot.leases:
            if (
                lease.node == node
                and lease.state is LeaseState.ACTIVE
                and lease.pod not in allocated_pods
            ):
                text = "its lease is active, and the node's agent handed no device to the kubelet"
                yield Difference("S5", pod_name(lease), text, OUTLIVE_S)


def outlived(snapshot: Snapshot) -> Iterator[Difference]:
    """P2: no lease outlives its pod, and no reservation its expiry."""
    pods = {pod.pod: pod for pod in snapshot.pods}
    for lease in snapshot.leases:
        pod = pods.get(lease.pod)
        if lease.claim is None and (pod is None or not pod.is_active):
            end = "is gone" if pod is None else f"has {pod.phase.lower()}"
            text = f"the pod {end} and its lease is {lease.state}, version {lease.version}"
            yield Difference("P2", pod_name(lease), text, OUTLIVE_S)
        if lease.state is LeaseState.RESERVED and lease.expires_at < snapshot.read_at:
            text = "its reservation has expired and is still held"
            yield Difference("P2", pod_name(lease), text, EXPIRE_S)


def annotation_views(snapshot: Snapshot) -> Iterator[Difference]:
    """O2: a pod's annotations agree with its lease."""
    pods = {pod.pod: pod for pod in snapshot.pods}
    for lease in snapshot.leases:
        pod = pods.get(lease.pod)
        dialect = DIALECTS.get(lease.dialect)
        if pod is not None and pod.node and pod.is_active and dialect is not None:
            text = dialect.annotation_difference(lease, pod.annotations)
            if text:
                yield Difference("O2", pod_name(lease), text, BIND_S)


def lease_copies(snapshot: Snapshot) -> Iterator[Difference]:
    """S7: the copy of its lease in a pod's annotation has the lease's amounts."""
    pods = {pod.pod: pod for pod in snapshot.pods if pod.node and pod.is_active}
    for lease in snapshot.leases:
        pod = pods.get(lease.pod)
        if pod is None or ANNOTATION not in pod.annotations:
            continue
        try:
            copy = load_lease(pod.annotations[ANNOTATION], namespace=pod.namespace, name=pod.name)
        except RequestError as error:
            yield Difference("S7", pod_name(pod), str(error))
            continue
        if _amounts(copy.shares) != _amounts(lease.shares):
            text = (
                f"its annotation has {_amounts(copy.shares)} (device, MiB, %), its lease has "
                f"{_amounts(lease.shares)}"
            )
            yield Difference("S7", pod_name(pod), text, BIND_S)


CHECKS = (one_lease, bound_is_leased, agents, outlived, lease_copies, annotation_views)


def unexplained(snapshot: Snapshot, schedulers: frozenset[str]) -> Iterator[Difference]:
    """P1: every pod of Leasehold's schedulers is bound, or has a reason why not."""
    known_pods = {lease.pod for lease in snapshot.leases} | {w.queued.pod for w in snapshot.waiting}
    for pod in snapshot.pods:
        ours = pod.scheduler in schedulers and pod.is_active and not pod.node and not pod.gates
        if ours and pod.pod not in known_pods and not pod.unschedulable_message:
            text = "it waits with neither a lease nor an explanation"
            yield Difference("P1", pod_name(pod), text, EXPLAIN_S)


def _allocation_mismatches(allocation: Allocation, lease: Lease | None) -> Iterator[Difference]:
    subject = f"pod {allocation.namespace}/{allocation.name}"
    if lease is None:
        text = f"container {allocation.container} has devices from the kubelet, and no live lease"
        yield Difference("S5", subject, text, OUTLIVE_S)
        return
    allocated = allocation.lease.shares_of(allocation.container)
    leased = lease.shares_of(allocation.container)
    if _amounts(allocated) != _amounts(leased):
        text = (
            f"container {allocation.container} was given {_amounts(allocated)} (device, MiB, %), "
            f"its lease has {_amounts(leased)}"
        )
        yield Difference("S7", subject, text, BIND_S)


def _amounts(shares: Iterable[Share]) -> list[tuple[str, int, int]]:
    return [(share.device, share.memory_mib, share.cores_percent) for share in shares]

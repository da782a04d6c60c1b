"""Leases to restore in an empty ledger, from agents' reports and pods' annotations; pure.

An agent's report shows that the kubelet has devices, so it has precedence, as far as the copy in
the pod's annotation agrees.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from msgspec import structs

from shared.model.errors import LeaseholdError, RequestError
from shared.model.events.node_events import Allocation
from shared.model.events.pod_events import BoundPod
from shared.model.leases.lease import Lease, LeaseState, Share
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.pods.carried_leases import carried_lease, copy_in
from shared.pods.pod_snapshot import PodSnapshot, generation_of

NODES_PER_PAGE = 64
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Evidence:
    lease: Lease
    is_hearsay: bool
    """Only the agent knows the lease: its holder has no copy."""


def evidence_of(reported: Lease, copy: str) -> Evidence | str:
    """Return the lease of a pod on its agent's node; or why it is none.

    An agent may be stolen: it says that a pod uses devices, and the copy, which only binders write,
    says which and how much. After a resize the agent may have less, and never more. Slots are the
    agent's alone. Without a valid copy its report counts.
    """
    written = copy_for(reported, copy)
    if written is None:
        return Evidence(_active(reported), is_hearsay=True)
    if places_of(written) != places_of(reported):
        return (
            f"pod {reported.pod} uses other devices than those of its lease, in the copy that pod "
            f"{reported.namespace}/{reported.name} carries"
        )
    own = {_place(share): share for share in reported.shares}
    shares = tuple(_least(share, own[_place(share)]) for share in written.shares)
    newest = max(reported, written, key=lambda lease: lease.version)
    version = newest.version
    if sizes_of(shares) != sizes_of(newest.shares):
        version += 1  # who knows that one follows newer leases only
    merged = structs.replace(
        written,
        shares=shares,
        version=version,
        activated_at=reported.activated_at,
        resized_at=max(written.resized_at, reported.resized_at),
    )
    return Evidence(_active(merged), is_hearsay=False)


def _active(lease: Lease) -> Lease:
    return structs.replace(lease, state=LeaseState.ACTIVE, expires_at=0.0)


def evidence_now(
    reported: Lease, holder: PodSnapshot | LeaseholdError | None
) -> Evidence | LeaseholdError | str:
    """Return the lease, an error, or why the agent cannot have it.

    The text is empty if the holder does not run.
    """
    if isinstance(holder, LeaseholdError):
        return holder
    if holder is None or holder.pod != reported.pod or holder.terminal or holder.node is None:
        return ""
    if holder.node != reported.node:
        return f"pod {reported.pod} is on node {holder.node}"
    return evidence_of(reported, holder.lease)


def copy_for(lease: Lease, text: str) -> Lease | None:
    """Return the copy of this holder's lease on this node, or None."""
    return copy_in(
        BoundPod(
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            node=lease.node,
            lease=text,
            generation=generation_of(lease),
        )
    )


def slots_of(lease: Lease) -> frozenset[tuple[DeviceUuid, int | None]]:
    return frozenset((share.device, share.slot) for share in lease.shares)


def is_resized(lease: Lease, later: Lease) -> bool:
    is_later = later.version > lease.version or later.resized_at > lease.resized_at
    return is_later and later.shares != lease.shares


def places_of(lease: Lease) -> frozenset[tuple[str, DeviceUuid, int | None]]:
    """Return what of a lease an agent cannot choose."""
    return frozenset(map(_place, lease.shares))


def sizes_of(shares: Iterable[Share]) -> set[tuple[object, ...]]:
    return {(*_place(share), share.memory_mib, share.cores_percent) for share in shares}


def _place(share: Share) -> tuple[str, DeviceUuid, int | None]:
    """The slot decides which MIG instance it is."""
    return share.container, share.device, share.slot if share.mig else None


def _least(written: Share, reported: Share) -> Share:
    """Return the share with its agent's slot, and the smaller size of both."""
    if written.slot != reported.slot:
        written = structs.replace(written, slot=reported.slot, fence=reported.fence)
    memory_mib = min(written.memory_mib, reported.memory_mib)
    cores_percent = min(written.cores_percent, reported.cores_percent)
    if (memory_mib, cores_percent) == (written.memory_mib, written.cores_percent):
        return written
    requested = written.requested_size or reported.requested_size
    return structs.replace(
        written, memory_mib=memory_mib, cores_percent=cores_percent, requested_size=requested
    )


class Recovery:
    """Evidence of leases: one complete listing, then agents' reports, some nodes at a time.

    Leases are restored in the order of the methods.
    """

    def __init__(self, pods: Iterable[BoundPod]) -> None:
        self.silent: set[NodeName] = set()
        """Nodes with leases that have not reported."""
        self.problems: list[str] = []
        self.unlisted: dict[tuple[PodUid, NodeName], Lease] = {}
        """Their pods may have been bound since the listing."""
        self.lagging: list[Lease] = []
        """Their pods' copies or agents have another size: a resize was in progress."""
        self._listed: dict[PodUid, BoundPod] = {}
        self._unreported: dict[PodUid, BoundPod] = {}
        for pod in pods:
            self._listed[pod.pod] = pod
            if pod.lease:
                self._unreported[pod.pod] = pod
                self.silent.add(pod.node)

    def add_reports(self, allocations: Mapping[NodeName, Iterable[Allocation]]) -> list[Evidence]:
        self.silent.difference_update(allocations)
        active: dict[PodUid, Lease] = {}
        for node, of_node in allocations.items():
            for allocation in of_node:
                problem = self._problem(node, allocation)
                if problem:
                    self.problems.append(problem)
                elif allocation.pod in self._listed:
                    _keep_newest(active, allocation.pod, allocation.lease)
                else:
                    _keep_newest(self.unlisted, (allocation.pod, node), allocation.lease)
        leases = active.values()
        return [evidence for lease in leases for evidence in self._listed_evidence(lease)]

    def _listed_evidence(self, lease: Lease) -> Iterator[Evidence]:
        copy = self._listed[lease.pod].lease
        evidence = evidence_of(lease, copy)
        if isinstance(evidence, str):  # the copy counts
            self.problems.append(evidence)
            return
        self._unreported.pop(lease.pod, None)
        if not evidence.is_hearsay:
            written = _lease_of_pod(self._listed[lease.pod])
            differs = isinstance(written, Lease) and written.shares != lease.shares
            if differs or evidence.lease.waiting_size is not None:
                self.lagging.append(evidence.lease)
        yield evidence

    def annotated(self) -> Iterator[list[Lease]]:
        """Yield the copies of all other pods, each node's oldest first."""
        by_node: dict[NodeName, list[BoundPod]] = {}
        for pod in self._unreported.values():
            by_node.setdefault(pod.node, []).append(pod)
        of_nodes = list(by_node.values())
        for first in range(0, len(of_nodes), NODES_PER_PAGE):
            page = of_nodes[first : first + NODES_PER_PAGE]
            of_pods = [_lease_of_pod(pod) for pods in page for pod in pods]
            self.problems += [problem for problem in of_pods if isinstance(problem, str)]
            leases = [lease for lease in of_pods if isinstance(lease, Lease)]
            self.lagging += [lease for lease in leases if lease.waiting_size is not None]
            yield sorted(leases, key=lambda lease: lease.created_at)

    def _problem(self, node: NodeName, allocation: Allocation) -> str | None:
        lease = allocation.lease
        if lease.pod != allocation.pod or lease.node != node:
            return (
                f"node {node} reports for pod {allocation.pod} a lease of pod {lease.pod} "
                f"on node {lease.node}"
            )
        listed = self._listed.get(lease.pod)
        if listed is not None and listed.node != node:
            return f"node {node} honours a lease of pod {lease.pod}, which is on {listed.node}"
        return None


def _keep_newest(active: dict[K, Lease], key: K, lease: Lease) -> None:
    kept = active.get(key)
    if kept is None or kept.version < lease.version:
        active[key] = lease


def _lease_of_pod(pod: BoundPod) -> Lease | str:
    try:
        return carried_lease(pod)
    except RequestError as error:
        return f"pod {pod.namespace}/{pod.name} ({pod.pod}) on node {pod.node}: {error}"

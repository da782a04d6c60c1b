"""What the binder needs of the ledger; `shared.ledger.leases.RedisLeases` is it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import BoundPod, PodsListed
from shared.model.lease import Lease, StaleLeaseError
from shared.model.ledger import NoCapacity, NodeTotals, OfferedPods, WaitingPod
from shared.model.names import NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.quota import Quota


class WaitingPodStore(Protocol):
    """The pods that fit nowhere yet."""

    async def load(self, pods: Sequence[PodUid] | None = None) -> list[WaitingPod]:
        """Return the pods that wait: all, or those among `pods`."""
        ...

    async def choose_offers(self, *, now: float) -> OfferedPods:
        """Return waiting pods that capacity freed since their verdict may help."""
        ...

    async def remove(self, pods: Sequence[PodUid]) -> None:
        """Let pods wait no longer."""
        ...


class NodeTotalsReader(Protocol):
    """Nodes with their leases and what these add up to."""

    def pages(self) -> AsyncIterator[list[NodeTotals]]:
        """Yield all nodes, page by page."""
        ...

    async def of_nodes(self, names: Sequence[NodeName]) -> list[NodeTotals]:
        """Return some nodes; unknown ones are left out."""
        ...


class LeaseResizeStore(Protocol):
    """Leases that change their size while their pods run."""

    async def lock(self, pod: PodUid, *, ttl_s: float) -> str | None:
        """Return the only token that can shrink the lease for `ttl_s`; None: it is locked."""
        ...

    async def unlock(self, pod: PodUid, token: str) -> None:
        """Release a lock before its time."""
        ...

    async def apply(self, lease: Lease, *, token: str = "") -> Lease | NoCapacity | StaleLeaseError:
        """Give a lease the shares it has here. Raises ConflictError if the lock has expired."""
        ...

    async def unsynced(self, *, older_than_s: float) -> list[PodUid]:
        """Return the pods of leases resized so long ago whose node or annotations may lag."""
        ...

    async def set_synced(self, pod: PodUid, version: int) -> bool:
        """Note that node and annotations follow the lease as of a version."""
        ...

    async def set_unsynced(self, leases: Sequence[Lease]) -> None:
        """Note that the nodes or annotations of these leases may lag."""
        ...


class QuotaStore(Protocol):
    """The quotas that the ledger enforces."""

    async def save(self, quotas: Sequence[Quota], *, read_at: float) -> bool:
        """Replace all quotas, unless newer ones are stored; return whether anything changed."""
        ...


class Ledger(Protocol):
    """Leases and inventory; every method takes a batch and may be called twice."""

    @property
    def waiting_pods(self) -> WaitingPodStore:
        """The pods that fit nowhere yet."""
        ...

    @property
    def quotas(self) -> QuotaStore:
        """The quotas that the ledger enforces."""
        ...

    async def generation(self) -> str | None:
        """Return the name of the ledger's present life; None while it is to be rebuilt."""
        ...

    async def bind(self, leases: Sequence[Lease]) -> list[Lease | StaleLeaseError]:
        """Commit reservations; a lease that expired or moved on is answered with the error."""
        ...

    async def activate(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        """Record that the kubelet was told of these pods; None for one without a bound lease."""
        ...

    async def release(
        self, pods: Sequence[PodUid], *, reason: str, version: int | None = None
    ) -> list[Lease]:
        """End leases and return those that ended now."""
        ...

    async def expire(self, now: float) -> list[Lease]:
        """End the reservations whose time is over, and return them."""
        ...

    async def load(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        """Return these pods' live leases."""
        ...

    async def load_node(self, node: NodeName) -> list[Lease]:
        """Return the live leases of a node."""
        ...

    def load_all(self) -> AsyncIterator[list[Lease]]:
        """Yield all live leases, page by page."""
        ...

    async def save_devices(self, report: DeviceReported) -> bool:
        """Take in what a node's agent reports; tell whether anything changed."""
        ...

    async def save_node(self, facts: NodeFacts, *, seen_at: float = 0.0) -> bool:
        """Take in a node's facts, unless newer ones are there; tell whether anything changed."""
        ...

    async def set_cordoned(self, reasons: Mapping[NodeName, str]) -> frozenset[NodeName]:
        """Cordon nodes, or (empty) uncordon them; return all nodes that are cordoned."""
        ...

    async def reported_by_agent(self, node: NodeName) -> bool:
        """Return whether our agent sent the node's latest device report."""
        ...

    async def remove_node(self, name: NodeName) -> bool:
        """Take a node out; its leases end with their pods."""
        ...

    async def capacity(self) -> int:
        """Return the number that rises whenever something is freed or added."""
        ...


class Staging(Protocol):
    """What several binders collect together: pieces of listings, and agents' reports."""

    async def save_chunk(self, piece: PodsListed) -> tuple[BoundPod, ...] | None:
        """Keep one piece; return the whole listing once all its pieces are there."""
        ...

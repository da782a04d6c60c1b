"""What the binder needs of the ledger in Redis: leases, inventory, waiting pods, preemptions.

`shared.ledger` implements it. One port per subject; a room takes the narrowest that serves it.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from shared.model.events.node_events import Allocation, DeviceReported
from shared.model.events.pod_events import BoundPod, BudgetChanged, PodGated, PodsListed
from shared.model.lease import Lease, StaleLeaseError
from shared.model.ledger import (
    NoCapacity,
    NodeTotals,
    OfferedPods,
    Reservation,
    ReservationOutcome,
    WaitingPod,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.preemption import (
    EvictionRecord,
    Preemption,
    PreemptionState,
    StoredPreemption,
)
from shared.model.quota import Quota

PAST_S = 24 * 3600.0
"""How far back the journal of evictions is read."""


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


class LedgerState(Protocol):
    """Whether the ledger can be used."""

    async def generation(self) -> str | None:
        """Return the generation of the ledger; None while it must be rebuilt."""
        ...


class LiveLeases(LedgerState, Protocol):
    """The live leases of pods."""

    async def load(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        """Return these pods' live leases."""
        ...


class LeaseLedger(LiveLeases, Protocol):
    """Leases and inventory; every method takes a batch and may be called twice."""

    @property
    def waiting_pods(self) -> WaitingPodStore:
        """The pods that fit nowhere yet."""
        ...

    @property
    def quotas(self) -> QuotaStore:
        """The quotas that the ledger enforces."""
        ...

    async def bind(self, leases: Sequence[Lease]) -> list[Lease | StaleLeaseError]:
        """Commit reservations; the error stands for a lease that expired or moved on."""
        ...

    async def activate(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        """Record that the kubelet has these pods' devices; None: the pod has no bound lease."""
        ...

    async def release(
        self, pods: Sequence[PodUid], *, reason: str, version: int | None = None
    ) -> list[Lease]:
        """End leases and return those that ended now."""
        ...

    async def expire(self, now: float) -> list[Lease]:
        """End the reservations that have expired, and return them."""
        ...

    async def load_node(self, node: NodeName) -> list[Lease]:
        """Return the live leases of a node."""
        ...

    def load_all(self) -> AsyncIterator[list[Lease]]:
        """Yield all live leases, page by page."""
        ...

    async def save_devices(self, report: DeviceReported) -> bool:
        """Save what a node agent reports; return whether anything changed."""
        ...

    async def save_node(self, facts: NodeFacts, *, seen_at: float = 0.0) -> bool:
        """Save a node's facts, unless newer ones are stored; return whether anything changed."""
        ...

    async def remove_node(self, name: NodeName) -> bool:
        """Remove a node; its leases end with their pods."""
        ...

    async def capacity(self) -> int:
        """Return a number that rises whenever capacity is freed or added."""
        ...


class ReportedNodes(Protocol):
    """What the ledger knows of nodes."""

    async def reported_by_agent(self, node: NodeName) -> bool:
        """Return whether our agent sent the node's latest device report."""
        ...


class CordonLedger(LedgerState, Protocol):
    """The ledger's list of cordoned nodes."""

    async def set_cordoned(self, reasons: Mapping[NodeName, str]) -> frozenset[NodeName]:
        """Cordon nodes, or (empty) uncordon them; return all nodes that are cordoned."""
        ...


class ResizeLedger(LiveLeases, Protocol):
    """What a resize needs of the ledger."""

    @property
    def totals(self) -> NodeTotalsReader:
        """Nodes with their leases."""
        ...

    @property
    def resizes(self) -> LeaseResizeStore:
        """Leases that change their size."""
        ...


class PreemptionLedger(LiveLeases, Protocol):
    """What preemption needs of the ledger."""

    @property
    def waiting_pods(self) -> WaitingPodStore:
        """The pods that fit nowhere yet."""
        ...

    @property
    def totals(self) -> NodeTotalsReader:
        """Nodes with their leases."""
        ...

    async def reserve(
        self, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve; a pod's own claim does not stand in its way."""
        ...


class RebuildLedger(LedgerState, Protocol):
    """What a rebuild needs of the ledger."""

    @property
    def resizes(self) -> LeaseResizeStore:
        """Leases that change their size."""
        ...

    async def begin_rebuild(self, *, now: float, lock_s: float = ...) -> str | None:
        """Lock the rebuild; None: nothing to do, or another replica has the lock."""
        ...

    async def restore(
        self, leases: Sequence[Lease], *, now: float, token: str = ..., lock_s: float = ...
    ) -> list[tuple[Lease, str]]:
        """Save leases again, in this order; return those that do not fit, with the reasons.

        Raises ConflictError if another replica took the rebuild over.
        """
        ...

    async def finish_rebuild(self, token: str) -> bool:
        """Open the ledger; False if another replica took the rebuild over."""
        ...


class BinderLedger(LeaseLedger, ReportedNodes, CordonLedger, ResizeLedger, RebuildLedger, Protocol):
    """Everything the binder does with the ledger, preemption aside."""


class ListingStaging(Protocol):
    """Listings of pods, which arrive in chunks at any binder."""

    async def save_chunk(self, piece: PodsListed) -> tuple[BoundPod, ...] | None:
        """Save one chunk; return the whole listing once all its chunks are there."""
        ...


class RebuildStaging(Protocol):
    """What several binders collect together for a rebuild."""

    async def save_reports(self, reports: Sequence[DeviceReported]) -> None:
        """Save what these nodes' agents have activated."""
        ...

    async def reports(self) -> dict[NodeName, tuple[Allocation, ...]]:
        """Return what was saved, by node."""
        ...

    async def complete_listing(self, *, since: float) -> tuple[BoundPod, ...] | None:
        """Return the newest complete listing begun at or after `since`, if there is one."""
        ...

    async def extend_rebuild(self, token: str, *, now: float, lock_s: float) -> bool:
        """Extend the lock of the rebuild by `lock_s` seconds; False if another replica has it."""
        ...

    async def clear(self) -> None:
        """Remove reports and listings."""
        ...


class BinderStaging(ListingStaging, RebuildStaging, Protocol):
    """Everything that binders collect together."""


class GatedPodStore(Protocol):
    """Pods at their budget's scheduling gate, shared by all binders."""

    async def save(self, pods: Sequence[PodGated]) -> None:
        """Save pods."""
        ...

    async def remove(self, namespace: Namespace, pods: Sequence[PodUid]) -> None:
        """Remove pods of a namespace."""
        ...

    async def namespaces(self) -> Mapping[Namespace, BudgetChanged | None]:
        """Return the namespaces with gated pods, each with the state of its budget if known."""
        ...

    async def load(self, namespace: Namespace) -> Sequence[PodGated]:
        """Return the gated pods of a namespace, in no order."""
        ...


class PreemptionOpener(Protocol):
    """Begins preemptions."""

    async def open(self, preemption: Preemption) -> bool:
        """Begin a preemption and claim its devices; False if it, its pod or a device is taken."""
        ...


class PreemptionStore(PreemptionOpener, Protocol):
    """Preemptions, shared by all binders."""

    async def acquire_leadership(self, name: str, *, ttl_s: float) -> bool:
        """Return whether `name` leads now, and no other for `ttl_s` seconds."""
        ...

    async def save(
        self,
        read: StoredPreemption,
        preemption: Preemption,
        records: Sequence[EvictionRecord] = (),
    ) -> StoredPreemption | None:
        """Save the next step with its journal records; None if another binder did."""
        ...

    async def close(self, read: StoredPreemption) -> bool:
        """End a preemption and its claim; False if another binder moved it on."""
        ...

    async def state(self, *, now: float, past_s: float = PAST_S) -> PreemptionState:
        """Return open preemptions, evictions of the last `past_s` seconds, and budgets."""
        ...

    async def save_budget(self, budget: BudgetChanged) -> None:
        """Save the state of a namespace's budget, unless a newer one is stored."""
        ...

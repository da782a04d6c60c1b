"""Ports to the ledger in Redis: leases, inventory, waiting pods, preemptions.

`shared.ledger` implements it. One port per subject; each user declares the narrowest one that
suffices.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Protocol

from shared.model.events.node_events import Allocation, DeviceReported
from shared.model.events.pod_events import ListedPods, PodsListed
from shared.model.lease import Lease, StaleLeaseError
from shared.model.ledger import (
    CheckedRecords,
    LedgerStatus,
    NoCapacity,
    NodeTotals,
    OfferedPods,
    Reservation,
    ReservationOutcome,
    StagedListing,
    WaitingPod,
    WaitResult,
)
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.node import NodeFacts, NodeRevision
from shared.model.quota import Quota

PAST_S = 24 * 3600.0
"""Age up to which the journal of evictions is read."""


class WaitingPodStore(Protocol):
    """Pods that cannot be placed yet."""

    async def load(self, pods: Sequence[PodUid] | None = None) -> list[WaitingPod]:
        """Return the pods that wait: all, or those among `pods`."""
        ...

    async def uids(self) -> list[PodUid]:
        """Return the uids of all pods that wait."""
        ...

    async def choose_offers(self, *, now: float) -> OfferedPods:
        """Return waiting pods that capacity freed since their verdict may help."""
        ...

    async def enqueue(self, verdicts: Sequence[WaitingPod]) -> WaitResult:
        """Store waiting pods; return those with a stale verdict, and leases that pods have."""
        ...

    async def remove(self, pods: Sequence[PodUid]) -> None:
        """Remove waiting pods that are gone."""
        ...

    async def remove_bound(self, pods: Sequence[PodUid]) -> None:
        """Remove waiting pods that are bound."""
        ...

    async def list_gone(self, pods: Sequence[PodUid]) -> set[PodUid]:
        """Return those of the pods that are remembered as gone."""
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
        """Lock the lease for `ttl_s` seconds; return the token to shrink it; None: it is locked."""
        ...

    async def unlock(self, pod: PodUid, token: str) -> None:
        """Release a lock before its time."""
        ...

    async def apply(self, lease: Lease, *, token: str = "") -> Lease | NoCapacity | StaleLeaseError:
        """Write the new shares of a lease. Raises ConflictError if the lock has expired."""
        ...

    async def unsynced(self, *, older_than_s: float) -> list[PodUid]:
        """Return the pods of leases whose node or annotations may lag after a resize."""
        ...

    async def set_synced(self, pod: PodUid, version: int) -> bool:
        """Record that node and annotations match the lease at a version."""
        ...

    async def set_unsynced(self, leases: Sequence[Lease]) -> None:
        """Record that the nodes or annotations of these leases may lag."""
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

    async def status(self, *, now: float, max_age_s: float = ...) -> LedgerStatus | None:
        """Return what may have to be done, as read less than `max_age_s` ago; None as above."""
        ...


class LiveLeases(LedgerState, Protocol):
    """The live leases of pods."""

    async def load(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        """Return these pods' live leases."""
        ...


class SchedulerLedger(LiveLeases, Protocol):
    """The ledger, as pods are bound whose node kube-scheduler chooses."""

    async def reserve(
        self, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve for each pod its candidate, if that still fits."""
        ...


class LeaseLedger(LiveLeases, Protocol):
    """Leases and inventory; every method takes a batch and may be called twice."""

    @property
    def waiting_pods(self) -> WaitingPodStore:
        """Pods that cannot be placed yet."""
        ...

    @property
    def quotas(self) -> QuotaStore:
        """The quotas that the ledger enforces."""
        ...

    async def bind(self, leases: Sequence[Lease]) -> list[Lease | StaleLeaseError]:
        """Commit reservations; the error stands for a lease that expired or moved on."""
        ...

    async def activate(self, pods: Sequence[tuple[PodUid, NodeName]]) -> list[Lease | None]:
        """Record that kubelets have the devices of these pods on their nodes.

        None: the pod has no bound lease there.
        """
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

    async def list_vanished(self) -> list[PodUid]:
        """Return pods that are gone, but whose containers may still run."""
        ...

    async def load_vanished(self) -> list[Lease]:
        """Return the leases of pods that are gone, but whose containers may still run."""
        ...

    async def load_gang(self, gang: str) -> list[Lease]:
        """Return the live leases that count for a gang."""
        ...

    def load_all(self) -> AsyncIterator[list[Lease]]:
        """Yield all live leases, page by page."""
        ...

    async def save_devices(
        self, reports: Sequence[DeviceReported]
    ) -> Mapping[DeviceUuid, tuple[NodeName, NodeName]] | None:
        """Save what node agents report; return devices that two nodes report.

        None: nothing changed.
        """
        ...

    async def save_nodes(
        self, nodes: Sequence[NodeFacts], revisions: Sequence[NodeRevision] = ...
    ) -> bool:
        """Save nodes' facts, unless newer ones are known; return whether anything changed."""
        ...

    async def remove_node(self, name: NodeName, *, revision: NodeRevision = ...) -> bool:
        """Remove a node, unless newer facts are known; its leases end with their pods."""
        ...

    async def node_names(self) -> frozenset[NodeName]:
        """Return the names of all nodes."""
        ...

    async def reported_by_agent(self, node: NodeName) -> bool:
        """Return whether our agent sent the node's latest device report."""
        ...


class CordonLedger(LedgerState, Protocol):
    """The ledger's list of cordoned nodes."""

    async def set_cordoned(self, reasons: Mapping[NodeName, str]) -> Mapping[NodeName, str]:
        """Cordon nodes, or (empty) uncordon them; return all that are cordoned, with why."""
        ...


class ResizeLedger(LiveLeases, Protocol):
    """The ledger, as a resize uses it."""

    @property
    def totals(self) -> NodeTotalsReader:
        """Nodes with their leases."""
        ...

    @property
    def resizes(self) -> LeaseResizeStore:
        """Leases that change their size."""
        ...


class LeaseRestorer(Protocol):
    """Writes leases that the ledger has lost."""

    async def restore(
        self,
        leases: Sequence[Lease],
        *,
        now: float,
        token: str = ...,
        lock_s: float = ...,
        hearsay: Collection[PodUid] = ...,
    ) -> list[tuple[Lease, str]]:
        """Save leases again, in this order; return those that do not fit, with the reasons.

        Those of the pods in `hearsay`, which only agents know, take no device of another node.
        Raises ConflictError if another replica took the rebuild over.
        """
        ...


class LostLeaseLedger(LeaseLedger, LeaseRestorer, Protocol):
    """The ledger, as leases are restored beside those that it has."""


class ClaimLeaseStore(Protocol):
    """Leases of claims, in what differs from those of pods."""

    async def mark_deallocated(self, leases: Sequence[Lease]) -> list[bool]:
        """Mark leases to end once their claims are not prepared; False: it has changed since."""
        ...

    async def set_consumers(self, lease: Lease, consumers: Sequence[PodUid]) -> Lease | None:
        """Replace the consumers of a claim's lease; None: it has changed since it was read."""
        ...


class ClaimLedger(LostLeaseLedger, Protocol):
    """The ledger, as claims use it."""

    @property
    def totals(self) -> NodeTotalsReader:
        """Nodes with their leases."""
        ...

    @property
    def claims(self) -> ClaimLeaseStore:
        """Leases of claims."""
        ...

    async def reserve(
        self, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        """Reserve what fits, until `now + ttl_s`."""
        ...


class RebuildLedger(LedgerState, LeaseRestorer, Protocol):
    """The ledger, as a rebuild uses it."""

    @property
    def resizes(self) -> LeaseResizeStore:
        """Leases that change their size."""
        ...

    async def begin_rebuild(self, *, now: float, lock_s: float = ...) -> str | None:
        """Lock the rebuild; None: nothing to do, or another replica has the lock."""
        ...

    async def finish_rebuild(self, token: str) -> bool:
        """Open the ledger; False if another replica took the rebuild over."""
        ...


class RecordChecker(Protocol):
    """Checks the ledger's own records."""

    async def step(self) -> CheckedRecords:
        """Check the next pages; nothing while the ledger is being rebuilt."""
        ...


class WatchedLedger(LiveLeases, Protocol):
    """The ledger, as its records are watched."""

    @property
    def checks(self) -> RecordChecker:
        """Checks of its records."""
        ...


class BinderLedger(
    ClaimLedger, SchedulerLedger, CordonLedger, ResizeLedger, RebuildLedger, WatchedLedger, Protocol
):
    """Everything the binder does with the ledger, preemption aside."""


class ListingStaging(Protocol):
    """Listings of pods, which arrive in chunks at any binder."""

    async def save_chunk(self, piece: PodsListed) -> StagedListing | None:
        """Save one chunk; return the listing once all its chunks are there."""
        ...

    def read_listing(self, listing: StagedListing) -> AsyncIterator[ListedPods]:
        """Yield the chunks of a listing. Raises UnavailableError if it has been deleted."""
        ...


class RebuildStaging(ListingStaging, Protocol):
    """Evidence that several binders collect for a rebuild."""

    async def complete_listing(self, request_id: str) -> StagedListing | None:
        """Return a complete listing that began after a request with this ID, if there is one."""
        ...

    async def save_reports(self, reports: Sequence[DeviceReported]) -> None:
        """Save what these nodes' agents have activated."""
        ...

    async def reports_from(
        self, position: int
    ) -> tuple[int, Mapping[NodeName, tuple[Allocation, ...]]]:
        """Return a page of what was saved at `position` (from 0) or later, and the next one."""
        ...

    async def extend_rebuild(self, token: str, *, now: float, lock_s: float) -> bool:
        """Extend the lock of the rebuild by `lock_s` seconds; False if another replica has it."""
        ...

    async def clear(self) -> None:
        """Remove reports and listings."""
        ...

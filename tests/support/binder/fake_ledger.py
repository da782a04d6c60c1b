"""The ledger as the binder uses it: leases in a dictionary."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from shared.model.events.node_events import Allocation, DeviceReported
from shared.model.events.pod_events import (
    ListedPods,
    PodQueued,
    PodsListed,
)
from shared.model.lease import Lease, LeaseState, StaleLeaseError
from shared.model.ledger import (
    AlreadyLeased,
    CheckedRecords,
    LedgerStatus,
    NoCapacity,
    OfferedPods,
    Reservation,
    ReservationOutcome,
    Reserved,
    StagedListing,
    WaitingPod,
    WaitResult,
)
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.node import NodeFacts, NodeRevision
from shared.model.quota import Quota
from tests.support.binder.claims import NoReservations
from tests.support.binder.resizing import FakeResizes


class FakeQuotas:
    def __init__(self) -> None:
        self.saved: tuple[Quota, ...] = ()

    async def save(self, quotas: Sequence[Quota], *, read_at: float) -> bool:
        self.saved = tuple(quotas)
        return True


class FakeWaitingPods:
    """Pods that wait; each is offered once."""

    def __init__(self, ledger: "FakeLedger") -> None:
        self.ledger = ledger
        self.queued: list[PodQueued] = []
        self.scans = 0
        self.verdicts: list[WaitingPod] = []
        self.stale: set[PodUid] = set()

    async def enqueue(self, verdicts: Sequence[WaitingPod]) -> WaitResult:
        self.verdicts += verdicts
        return WaitResult(stale=tuple(self.stale.intersection(v.queued.pod for v in verdicts)))

    async def load(self, pods: Sequence[PodUid] | None = None) -> list[WaitingPod]:
        return []

    async def uids(self) -> list[PodUid]:
        return []

    async def choose_offers(self, *, now: float) -> OfferedPods:
        self.scans += 1
        offered = tuple(replace(pod, requeue_number=self.ledger.number) for pod in self.queued)
        self.queued = []
        return OfferedPods(pods=offered, complete=not offered)

    async def remove(self, pods: Sequence[PodUid]) -> None:
        self.queued = [pod for pod in self.queued if pod.pod not in pods]
        self.ledger.vanished.update(pods)

    async def remove_bound(self, pods: Sequence[PodUid]) -> None:
        self.queued = [pod for pod in self.queued if pod.pod not in pods]

    async def list_gone(self, pods: Sequence[PodUid]) -> set[PodUid]:
        return self.ledger.vanished.intersection(pods)


class NothingWrong:
    async def step(self) -> CheckedRecords:
        return CheckedRecords()


class FakeLedger(NoReservations, FakeResizes):
    """Leases in a dictionary, with the ledger's rules for moving on."""

    def __init__(self, *leases: Lease) -> None:
        super().__init__(*leases)
        self.released: list[tuple[PodUid, str]] = []
        self.expiring: list[Lease] = []
        self.waiting_pods = FakeWaitingPods(self)
        self.number = 0
        self.vanished: set[PodUid] = set()
        self.loaded: list[PodUid] = []
        self.is_ready = True
        self.rebuilding = False
        self.restored: list[Lease] = []
        self.misfits: set[PodUid] = set()
        self.pieces: dict[str, dict[int, PodsListed]] = {}
        self.reports: list[tuple[NodeName, tuple[Allocation, ...]]] = []
        self.nodes: dict[NodeName, NodeFacts] = {}
        self.devices: dict[NodeName, DeviceReported] = {}
        self.quotas = FakeQuotas()
        self.checks = NothingWrong()
        self.cordoned: dict[NodeName, str] = {}
        self.refused: dict[PodUid, NoCapacity] = {}

    async def generation(self) -> str | None:
        return "epoch" if self.is_ready else None

    async def status(self, *, now: float, max_age_s: float = 0.0) -> LedgerStatus | None:
        if not self.is_ready:
            return None
        return LedgerStatus(
            generation="epoch",
            capacity=self.number,
            vanished=len(self.vanished),
            expires_at=1.0 if self.expiring else 0.0,
            waiting=len(self.waiting_pods.queued),
            unsynced=len(await self.resizes.unsynced(older_than_s=0.0)),
            preemptions=0,
            budgets=0,
        )

    async def reserve(
        self, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        return [self._reserve(each, now + ttl_s) for each in wanted]

    def _reserve(self, wanted: Reservation, expires_at: float) -> ReservationOutcome:
        if wanted.pod in self.leases:
            return AlreadyLeased(lease=self.leases[wanted.pod])
        if wanted.pod in self.refused:
            return self.refused[wanted.pod]
        lease = Lease(
            pod=wanted.pod,
            namespace=wanted.namespace,
            name=wanted.name,
            node=wanted.candidates[0].node,
            shares=wanted.candidates[0].shares,
            expires_at=expires_at,
            version=1,
        )
        self.leases[wanted.pod] = lease
        return Reserved(lease=lease)

    async def bind(self, leases: Sequence[Lease]) -> list[Lease | StaleLeaseError]:
        answers: list[Lease | StaleLeaseError] = []
        for given in leases:
            stored = self.leases.get(given.pod)
            if stored is None:
                answers.append(StaleLeaseError(given.pod, read=given.version, stored=None))
                continue
            if stored.state is LeaseState.RESERVED:
                stored = structs.replace(
                    stored, state=LeaseState.BOUND, version=stored.version + 1, expires_at=0.0
                )
                self.leases[given.pod] = stored
            answers.append(stored)
        return answers

    async def activate(self, pods: Sequence[tuple[PodUid, NodeName]]) -> list[Lease | None]:
        active: list[Lease | None] = []
        for pod, node in pods:
            lease = self.leases.get(pod)
            if lease is not None and lease.node == node:
                self.leases[pod] = lease = structs.replace(lease, state=LeaseState.ACTIVE)
                active.append(lease)
            else:
                active.append(None)
        return active

    async def release(
        self, pods: Sequence[PodUid], *, reason: str, version: int | None = None
    ) -> list[Lease]:
        ended = []
        for pod in pods:
            stored = self.leases.get(pod)
            if stored is not None and version in {None, stored.version}:
                ended.append(structs.replace(self.leases.pop(pod), state=LeaseState.RELEASED))
                self.released.append((pod, reason))
                self.number += 1
        return ended

    async def expire(self, now: float) -> list[Lease]:
        ended, self.expiring = self.expiring, []
        self.number += len(ended)
        return ended

    async def load(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        self.loaded += pods
        return [self.leases.get(pod) for pod in pods]

    async def load_node(self, node: NodeName) -> list[Lease]:
        return [each for each in self.leases.values() if each.node == node]

    async def list_vanished(self) -> list[PodUid]:
        return list(self.vanished)

    async def load_vanished(self) -> list[Lease]:
        return [
            each
            for each in self.leases.values()
            if each.pod in self.vanished and each.state is not LeaseState.RESERVED
        ]

    async def load_gang(self, gang: str) -> list[Lease]:
        return [each for each in self.leases.values() if each.gang == gang]

    async def load_all(self) -> AsyncIterator[list[Lease]]:
        yield list(self.leases.values())

    async def save_devices(
        self, reports: Sequence[DeviceReported]
    ) -> Mapping[DeviceUuid, tuple[NodeName, NodeName]]:
        self.devices |= {report.node: report for report in reports}
        return {}

    async def save_nodes(
        self, nodes: Sequence[NodeFacts], revisions: Sequence[NodeRevision] = ()
    ) -> bool:
        self.nodes |= {facts.name: facts for facts in nodes}
        return True

    async def remove_node(self, name: NodeName, *, revision: NodeRevision | None = None) -> bool:
        return self.nodes.pop(name, None) is not None

    async def node_names(self) -> frozenset[NodeName]:
        return frozenset(self.nodes)

    async def reported_by_agent(self, node: NodeName) -> bool:
        return node in self.devices and not self.devices[node].other_plugin

    async def set_cordoned(self, reasons: Mapping[NodeName, str]) -> Mapping[NodeName, str]:
        self.cordoned = {node: why for node, why in {**self.cordoned, **reasons}.items() if why}
        return dict(self.cordoned)

    async def begin_rebuild(self, *, now: float, lock_s: float = 60.0) -> str | None:
        if self.is_ready or self.rebuilding:
            return None
        self.rebuilding = True
        return "token"

    async def restore(
        self,
        leases: Sequence[Lease],
        *,
        now: float,
        token: str = "",
        lock_s: float = 60.0,
        hearsay: Collection[PodUid] = (),
    ) -> list[tuple[Lease, str]]:
        self.restored += leases
        return [(each, "memory") for each in leases if each.pod in self.misfits]

    async def finish_rebuild(self, token: str) -> bool:
        self.is_ready = True
        return True

    async def extend_rebuild(self, token: str, *, now: float, lock_s: float) -> bool:
        return True

    async def save_chunk(self, piece: PodsListed) -> StagedListing | None:
        pieces = self.pieces.setdefault(piece.listing_id, {})
        pieces[piece.chunk] = piece
        return (
            StagedListing(piece.listing_id, piece.chunks) if len(pieces) == piece.chunks else None
        )

    async def complete_listing(self, request_id: str) -> StagedListing | None:
        for listing_id, pieces in self.pieces.items():
            first = next(iter(pieces.values()))
            if request_id in first.request_ids and len(pieces) == first.chunks:
                return StagedListing(listing_id, first.chunks)
        return None

    async def read_listing(self, listing: StagedListing) -> AsyncIterator[ListedPods]:
        for piece in list(self.pieces[listing.listing_id].values()):
            yield piece.pods

    async def save_reports(self, reports: Sequence[DeviceReported]) -> None:
        self.reports += [(report.node, report.allocations) for report in reports]

    async def reports_from(
        self, position: int
    ) -> tuple[int, Mapping[NodeName, tuple[Allocation, ...]]]:
        return len(self.reports), dict(self.reports[position:])

    async def clear(self) -> None:
        self.pieces.clear()
        self.reports.clear()

"""Ends leases and waits of pods whose deletion was missed; reports ledger mismatches."""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass

from services.binder.ledger_sync.agent_reports import release_as_read
from services.binder.ledger_sync.evidence import CollectedEvidence
from services.binder.ledger_sync.lease_holders import (
    HolderGone,
    LeaseHolders,
    gone_event,
    holders_in,
    pod_gone,
)
from services.binder.metrics import count_anomaly
from services.binder.report.explanations import summarize
from shared.ledger.leases import RedisLeases
from shared.ledger.waiting_pods import GatedPods
from shared.model.clock import Clock
from shared.model.devices.node import NodeRevision
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.events.pod_events import (
    BoundPod,
    LeaseChanged,
    ListedPods,
    NodesListed,
    PlacementChosen,
    PodGated,
    PodQueued,
    PodsListed,
    PodTerminated,
    ResyncRequested,
)
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import NodeName, PodUid
from shared.pods.pod_snapshot import PodSnapshot, generation_of
from shared.runtime.service import Publish, handles

logger = logging.getLogger(__name__)
BINDING_S = 5.0
"""The Binding of a lease that is younger than this may still be in progress."""
CHUNK_WAIT_S = 5.0
"""How long the last chunk of a list waits for the others, which arrive as copies."""
CHUNK_POLL_S = 0.2
"""Interval of looks at whether they have arrived."""
Correction = HolderGone | PlacementChosen | LeaseChanged | ResyncRequested


class LedgerMismatch:
    """The differences between the ledger, which is added page by page, and the cluster.

    A lease that is younger than the listing is an orphan, too: its pod is read. So is a reservation
    whose pod is neither on a node nor `unbound`: a rollback brought it back.
    """

    def __init__(self, pods: Iterable[BoundPod], unbound: Iterable[PodUid] = ()) -> None:
        self.orphans: list[Lease] = []
        self.moved: list[tuple[Lease, BoundPod]] = []
        self._listed = {pod.pod: pod for pod in pods}
        self._unbound = frozenset(unbound)
        self._leased: set[PodUid] = set()

    def add(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._leased.add(lease.pod)
            if lease.state is LeaseState.RESERVED and lease.pod in self._unbound:
                continue
            pod = self._listed.get(lease.pod)
            if pod is not None and pod.node != lease.node:
                self.moved.append((lease, pod))
            if pod is None or generation_of(lease) not in {"", pod.generation}:
                self.orphans.append(lease)

    def unleased(self) -> list[BoundPod]:
        return [pod for pod in self._listed.values() if pod.lease and pod.pod not in self._leased]


@dataclass(eq=False)
class Reconciler:
    """Compares listings with the ledger; a read of the pod itself decides."""

    ledger: RedisLeases
    holders: LeaseHolders
    evidence: CollectedEvidence
    _: KW_ONLY
    publish: Publish
    clock: Clock

    def __post_init__(self) -> None:
        self.gated_pods = self.ledger.part(GatedPods)

    @handles
    async def reconcile_listing(self, chunks: Sequence[PodsListed]) -> list[Correction]:
        """Compare the ledger with each list of which these are the last chunks.

        Raises UnavailableError, after publishing other corrections, if a pod cannot be read.
        """
        self.evidence.add_chunks(chunks)
        corrections: list[Correction] = []
        if await self.ledger.generation() is None:
            return []
        for chunk in chunks:
            if chunk.chunk < chunk.chunks - 1:
                continue
            now = self.clock.now()
            pages = await self._pages(chunk.listing_id)
            if pages is None:
                corrections.append(ResyncRequested(reason="a part of a list of pods was lost"))
                continue
            holders = [holder for page in pages for holder in holders_in(page)]
            unbound = [pod for page in pages for pod in page.unbound]
            corrections += await self._compare(holders, unbound, now=now)
            corrections += await self._find_gone(unbound)
        return corrections

    async def _pages(self, listing_id: str) -> list[ListedPods] | None:
        """Return None if a chunk does not arrive."""
        until = self.clock.ticks() + CHUNK_WAIT_S
        pages = self.evidence.listed(listing_id)
        while pages is None and self.clock.ticks() < until:
            await self.clock.sleep(CHUNK_POLL_S)
            pages = self.evidence.listed(listing_id)
        return pages

    async def _compare(
        self, holders: Sequence[BoundPod], unbound: Sequence[PodUid], *, now: float
    ) -> list[Correction]:
        mismatch = LedgerMismatch(holders, unbound)
        async for leases in self.ledger.load_all():
            mismatch.add(leases)
        self._report(mismatch)
        suspects = [*mismatch.orphans, *(lease for lease, _ in mismatch.moved)]
        errors: list[LeaseholdError] = []
        events: list[Correction] = []
        for lease, pod in zip(suspects, await self.holders.read(suspects), strict=True):
            if isinstance(pod, LeaseholdError):
                errors.append(pod)
                continue
            correction = correction_for(lease, pod, now=now)
            if isinstance(correction, Lease):
                # Its pod lives on another node: it is not gone.
                reason = "its pod is bound to another node"
                ended = await release_as_read(self.ledger, [correction], reason=reason)
                events += [LeaseChanged(lease=ended_lease) for ended_lease in ended]
            elif correction is not None:
                events.append(correction)
        if errors:
            await self.publish(events)
            raise UnavailableError(f"{len(errors)} of {len(suspects)} pods not read: {errors[0]}")
        return events

    def _report(self, mismatch: LedgerMismatch) -> None:
        unleased = mismatch.unleased()
        texts = [
            f"pod {pod.namespace}/{pod.name} ({pod.pod}) on {pod.node} carries a lease that the "
            "ledger does not have"
            for pod in unleased
        ]
        texts += [
            f"the lease of pod {lease.namespace}/{lease.name} ({lease.pod}) is for {lease.node}, "
            f"and the pod is on {pod.node}"
            for lease, pod in mismatch.moved
        ]
        count_anomaly("pods_without_lease", len(unleased))
        count_anomaly("leases_elsewhere", len(mismatch.moved))
        if texts:
            logger.error("ledger mismatch: %s", summarize(texts))

    async def _find_gone(self, unbound: Collection[PodUid]) -> list[PodTerminated]:
        """Return events for recorded pods that are gone; remove records of bound ones.

        `unbound` are all pods without a node.
        """
        recorded = await self.holders.read_pods(await self._missing_from(frozenset(unbound)))
        await self._remove_bound([record for record, pod in recorded if pod and pod.node])
        return [
            pod_gone(record)
            for record, pod in recorded
            if pod is None or (pod.node is None and (pod.deleting or pod.terminal))
        ]

    async def _missing_from(self, unbound: frozenset[PodUid]) -> list[PodQueued | PodGated]:
        waiting_pods = self.ledger.waiting_pods
        missing = [pod for pod in await waiting_pods.uids() if pod not in unbound]
        waiting = await waiting_pods.load(missing) if missing else []
        suspects: list[PodQueued | PodGated] = [pod.queued for pod in waiting]
        for namespace in await self.gated_pods.namespaces():
            gated = await self.gated_pods.load(namespace)
            suspects += [pod for pod in gated if pod.pod not in unbound]
        return suspects

    async def _remove_bound(self, bound: Collection[PodQueued | PodGated]) -> None:
        queued = [pod.pod for pod in bound if isinstance(pod, PodQueued)]
        if queued:
            leases = await self.ledger.load(queued)
            unleased = [pod for pod, lease in zip(queued, leases, strict=True) if lease is None]
            await self.ledger.waiting_pods.remove_bound(unleased)
        for pod in bound:
            if isinstance(pod, PodGated):
                await self.gated_pods.remove(pod.namespace, [pod.pod])

    @handles
    async def remove_deleted_nodes(self, listings: Sequence[NodesListed]) -> None:
        """Remove the nodes that are missing from the newest list and are deleted.

        A read of the node decides.
        """
        if await self.ledger.generation() is None:
            return
        newest = max(listings, key=lambda listing: listing.revision)
        removed: list[NodeName] = []
        for name in sorted((await self.ledger.node_names()).difference(newest.nodes)):
            if await self.holders.pods.node_labels(name) is None:
                revision = NodeRevision(newest.revision)
                if await self.ledger.remove_node(name, revision=revision):
                    removed.append(name)
        if removed:
            count_anomaly("deleted_nodes", len(removed))
            logger.error("nodes that were deleted without an event: %s", summarize(removed))


def correction_for(
    lease: Lease, pod: PodSnapshot | None, *, now: float
) -> HolderGone | PlacementChosen | Lease | None:
    """Return the event for a lease whose pod was not listed, given the pod as it is now.

    A lease whose pod is on another node is returned: it must end.
    """
    same_pod = pod is not None and pod.pod == lease.pod
    if pod is not None and same_pod and not pod.terminal:
        if pod.node == lease.node:
            return None
        if not pod.node:
            unsent = _is_unsent(lease, now) and not pod.deleting
            return PlacementChosen(lease=lease, trace=lease.trace) if unsent else None
        return lease
    terminal = pod is not None and same_pod and pod.terminal
    return gone_event(lease, phase="Failed" if terminal else "")


def _is_unsent(lease: Lease, now: float) -> bool:
    return lease.state is LeaseState.BOUND and lease.created_at < now - BINDING_S

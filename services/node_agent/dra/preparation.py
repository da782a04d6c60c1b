"""Prepares ResourceClaims for the kubelet: waits for the lease, records it, writes CDI files.

The kubelet calls once for each claim, retries only after a minute, and never moves the pod: so a
lease that has not arrived is waited for within the call.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from weakref import WeakValueDictionary

from services.node_agent.agent_timing import DEFAULT_TIMING, AgentTiming
from services.node_agent.allocate.allocation import (
    HONOURED_STATES,
    DeviceMismatchError,
    NodeSnapshot,
    check_present,
)
from services.node_agent.allocate.cdi import qualified_name
from services.node_agent.allocate.claim_setup import claim_entry, requests_of
from services.node_agent.allocate.handler import ContainerPreparer, MigInstancesOf
from services.node_agent.allocate.reporter import Outbox
from services.node_agent.dra.claim_cdi import cdi_names
from services.node_agent.dra.claim_files import ClaimFiles
from services.node_agent.dra.resource_claims import ClaimReader, generation_of_claim, results_on
from services.node_agent.kubelet.claim_plugin import ClaimReference, PreparedDevice
from services.node_agent.metrics import AgentMetrics
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.device_guard import OvercommitError
from services.node_agent.records.lease_sync import LeaseSync
from shared.dialects.dialect import ContainerSetup
from shared.kubernetes.resource_claims import DeviceRequestAllocationResult
from shared.model.claim import DRIVER, device_name
from shared.model.clock import Clock
from shared.model.errors import ConflictError, LeaseholdError, UnavailableError
from shared.model.events.node_events import LeaseHolder, ShareActivated, ShareRefused
from shared.model.lease import Lease, LeaseState
from shared.model.names import DeviceUuid, NodeName, PodUid

logger = logging.getLogger(__name__)

LOOK_S = 0.1
FETCH_S = 2.0
RECORDS_PAUSE_S = 0.3


class LeaseEndedError(ConflictError):
    """A lease ended before the device had room for it; the claim may have another one."""


class ClaimPreparation:
    """Prepares and unprepares the claims of one node."""

    def __init__(
        self,
        node: NodeName,
        *,
        claims: ClaimReader,
        lease_sync: LeaseSync,
        require_snapshot: Callable[[], NodeSnapshot],
        checkpoint: Checkpoint,
        forget_ended: Callable[[NodeSnapshot], Awaitable[object]],
        files: ContainerPreparer,
        name_cdi_devices: Callable[[ContainerSetup], Awaitable[None]],
        claim_files: ClaimFiles,
        mig_instances_of: MigInstancesOf,
        outbox: Outbox,
        report_due: asyncio.Event,
        metrics: AgentMetrics,
        clock: Clock,
        timing: AgentTiming = DEFAULT_TIMING,
    ) -> None:
        self.node = node
        self.claims = claims
        self.lease_sync = lease_sync
        self.require_snapshot = require_snapshot
        self.checkpoint = checkpoint
        self.forget_ended = forget_ended
        self.files = files
        self.name_cdi_devices = name_cdi_devices
        self.claim_files = claim_files
        self.mig_instances_of = mig_instances_of
        self.outbox = outbox
        self.report_due = report_due
        self.metrics = metrics
        self.clock = clock
        self.timing = timing
        self._locks: WeakValueDictionary[PodUid, asyncio.Lock] = WeakValueDictionary()

    async def prepare(self, claim: ClaimReference) -> Sequence[PreparedDevice]:
        """Return the claim's devices once its lease is known and recorded; idempotent.

        Raises RequestError or UnavailableError with a sentence for the pod's owner.
        """
        began, outcome = self.clock.ticks(), "cancelled"
        try:
            async with self._lock(claim):
                devices = await self._prepare(claim)
            outcome = "allocated"
        except LeaseholdError as error:
            outcome = "unavailable" if isinstance(error, UnavailableError) else "refused"
            if isinstance(error, OvercommitError):
                self.metrics.count_overcommit()
            if isinstance(error, OvercommitError | DeviceMismatchError):
                self._report_refused(claim, str(error))
            logger.warning("ResourceClaim %s is not prepared: %s", claim, error)
            raise
        else:
            return devices
        finally:
            self.metrics.count_allocation(DRIVER, outcome, self.clock.ticks() - began)

    async def unprepare(self, claim: ClaimReference) -> None:
        """Forget a claim, whose containers have all ended; idempotent."""
        async with self._lock(claim):
            await self.checkpoint.forget((claim.uid,))
            await self.claim_files.remove(claim.uid)
        self.report_due.set()

    async def restore(self) -> None:
        """Write lost CDI files of prepared claims again, and remove those of others."""
        claims: dict[PodUid, list[CheckpointEntry]] = {}
        for entry in self.checkpoint.of_resource(DRIVER):
            claims.setdefault(entry.allocation.pod, []).append(entry)
        await self.claim_files.restore(claims)

    def list_unprepared(self) -> tuple[Lease, ...]:
        """Return the leases of claims for which the kubelet has not called, or was refused."""
        locked = {claim for claim, lock in tuple(self._locks.items()) if lock.locked()}
        prepared = self.checkpoint.claims
        return tuple(
            lease
            for lease in self.lease_sync.leases.leases.values()
            if lease.claim is not None
            and lease.state is LeaseState.BOUND
            and lease.pod not in locked | prepared
        )

    def _report_refused(self, claim: ClaimReference, reason: str) -> None:
        """Report a lease on what another holder has been given, or on what has left the node.

        The device report after it restores the lease of that holder, which was lost.
        """
        self.outbox.add(
            ShareRefused(
                node=self.node,
                reason=reason,
                pod=claim.uid,
                namespace=claim.namespace,
                name=claim.name,
                claim=True,
            )
        )
        self.report_due.set()

    def _lock(self, claim: ClaimReference) -> asyncio.Lock:
        return self._locks.setdefault(claim.uid, asyncio.Lock())

    async def _prepare(self, claim: ClaimReference) -> Sequence[PreparedDevice]:
        stored = await self.claims.read(claim)
        results, generation = results_on(stored, self.node), generation_of_claim(stored)
        entries: tuple[CheckpointEntry, ...] = ()
        if generation:
            entries = await self._prepared(claim, generation)
            await self.claim_files.write(claim.uid, entries)
        return _prepared_devices(results, entries, self.require_snapshot())

    async def _prepared(
        self, claim: ClaimReference, generation: str
    ) -> tuple[CheckpointEntry, ...]:
        """Return the records of all requests, made now unless they exist."""
        until = self.clock.ticks() + self.timing.claim_wait_s
        recorded = self._recorded(claim.uid, generation)
        if not recorded:
            while not await self._record_all(claim, generation, until):
                logger.info("ResourceClaim %s: its lease ended before it was prepared", claim)
            recorded = self._recorded(claim.uid, generation)
        for entry in recorded:
            await self.files.prepare(entry.limits)
            await self.name_cdi_devices(entry.setup)
        return recorded

    async def _record_all(self, claim: ClaimReference, generation: str, until: float) -> bool:
        """Record all requests of the claim's lease; return False if it ended meanwhile."""
        lease = await self._lease(claim, generation, until)
        await self._wait_for_records(until)
        try:
            for request in requests_of(lease):
                await self._record(lease, request, until)
        except LeaseholdError as error:
            await self.checkpoint.forget((claim.uid,))  # none of them has been handed out
            if isinstance(error, LeaseEndedError):
                return False
            raise
        return True

    def _recorded(self, claim: PodUid, generation: str) -> tuple[CheckpointEntry, ...]:
        """Return the records of this allocation; none unless all its requests have one."""
        entries = {
            entry.allocation.container: entry
            for entry in self.checkpoint.of_resource(DRIVER)
            if entry.allocation.pod == claim
            and entry.lease.claim is not None
            and entry.lease.claim.generation == generation
        }
        first = next(iter(entries.values()), None)
        complete = first is not None and entries.keys() >= set(requests_of(first.lease))
        return tuple(entries.values()) if complete else ()

    async def _lease(self, claim: ClaimReference, generation: str, until: float) -> Lease:
        """Wait for the lease of this allocation."""
        missing, fetch_at = "", 0.0
        while True:
            lease = self.lease_sync.leases.find(claim.uid)
            if (
                lease is not None
                and lease.claim is not None
                and lease.claim.generation == generation
                and lease.state in HONOURED_STATES
            ):
                return lease
            if self.clock.ticks() > until:
                raise UnavailableError(
                    f"ResourceClaim {claim} has no lease on node {self.node} after "
                    f"{self.timing.claim_wait_s:g} s: {missing or 'the ledger has none for it'}"
                )
            if self.clock.ticks() >= fetch_at:
                missing = await self._fetch(claim, generation)
                fetch_at = self.clock.ticks() + FETCH_S
            await self.clock.sleep(LOOK_S)

    async def _fetch(self, claim: ClaimReference, generation: str) -> str:
        """Request the lease; return why it is still unknown, or nothing.

        Raises UnavailableError if the claim has been allocated again: the kubelet retries.
        """
        try:
            fetched = await self.lease_sync.fetch_claim(
                LeaseHolder(pod=claim.uid, namespace=claim.namespace, name=claim.name, claim=True)
            )
        except UnavailableError as error:
            return f"{error}; are the binder and NATS running?"
        leases = [lease for lease in fetched if lease.pod == claim.uid]
        if any(each.claim and each.claim.generation != generation for each in leases):
            if generation_of_claim(await self.claims.read(claim)) != generation:
                raise UnavailableError(f"ResourceClaim {claim} has been allocated again")
            return "its lease is for another allocation"
        return f"its lease is {leases[0].state}" if leases else ""

    async def _record(self, lease: Lease, request: str, until: float) -> None:
        """Record one request, if its devices can hold it; report that it is active."""
        instances: dict[tuple[DeviceUuid, int], str] = {}
        if any(share.mig for share in lease.shares_of(request)):
            instances = await self.mig_instances_of(lease, request)
        node = self.require_snapshot()
        check_present(lease.shares_of(request), node)
        span = self.metrics.begin(
            lease, {"k8s.container.name": request, "leasehold.resource": DRIVER}
        )
        entry = claim_entry(
            lease,
            request,
            node,
            honoured=self.checkpoint.fences,
            instances=instances,
            now=self.clock.now(),
        )
        try:
            await self._save(entry, node, until)
        except LeaseholdError as error:
            span.end(str(error))
            raise
        span.end()
        self.outbox.add(
            ShareActivated(node=self.node, allocation=entry.allocation, trace=span.context)
        )

    async def _save(self, entry: CheckpointEntry, node: NodeSnapshot, until: float) -> None:
        """Record an entry once its devices can hold it: pods that have ended are forgotten.

        Raises LeaseEndedError if its lease ends first: the pods had lost their leases, not ended.
        """
        until = min(until, self.clock.ticks() + self.timing.full_device_s)
        sync_at = 0.0
        while True:
            try:
                await self.checkpoint.save(entry, devices=node.devices)
            except OvercommitError:
                if self.clock.ticks() > until:
                    raise
            else:
                return
            with contextlib.suppress(LeaseholdError):
                if self.clock.ticks() >= sync_at:
                    sync_at = self.clock.ticks() + FETCH_S
                    await self.lease_sync.sync()
                await self.forget_ended(node)
            _require_held(entry.lease, self.lease_sync.leases.find(entry.lease.pod))
            await self.clock.sleep(RECORDS_PAUSE_S)

    async def _wait_for_records(self, until: float) -> None:
        while self.checkpoint.lost:
            if self.clock.ticks() > until:
                raise UnavailableError(
                    "the node agent has lost its records of what runs here, and rebuilds them when "
                    "the ledger and the kubelet respond; are the binder and NATS running?"
                )
            await self.clock.sleep(LOOK_S)


def _require_held(lease: Lease, known: Lease | None) -> None:
    if known is None or known.shares != lease.shares:
        raise LeaseEndedError(f"version {lease.version} of the lease of claim {lease.pod} is old")


def _prepared_devices(
    results: Iterable[DeviceRequestAllocationResult],
    entries: Iterable[CheckpointEntry],
    node: NodeSnapshot,
) -> tuple[PreparedDevice, ...]:
    """Return the kubelet's answer: the first device of a request carries its CDI names.

    A request of a prioritized list is answered by its own name, without the choice. Administrative
    access needs no lease, and has the device without limits.
    """
    left = {entry.allocation.container: cdi_names(entry) for entry in entries}
    whole = {device_name(uuid): (qualified_name(uuid),) for uuid in node.devices}
    return tuple(
        PreparedDevice(
            request=result.request.partition("/")[0],
            pool=result.pool,
            device=result.device,
            share_id=result.share_id or "",
            cdi_devices=whole.get(result.device, ())
            if result.admin_access
            else left.pop(result.request, ()),
        )
        for result in results
    )

"""Prepares ResourceClaims for the kubelet.

The kubelet calls once for each claim, retries only after a minute, and never moves the pod.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from services.node_agent.allocate.allocation import (
    HONOURED_STATES,
    DeviceMismatchError,
    NodeSnapshot,
    claim_entry,
)
from services.node_agent.allocate.cdi import build_claim_specification, cdi_names, qualified_name
from services.node_agent.allocate.cdi_files import write_specification
from services.node_agent.allocate.grants import Grants, LeaseEndedError
from services.node_agent.dra.resource_claims import (
    generation_of_claim,
    read_claim,
    results_on,
)
from services.node_agent.node import Node
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.device_guard import OvercommitError
from services.node_agent.time_slices.time_slices import TimeSlices
from shared.kubelet_api.dra import api_pb2 as dra
from shared.kubernetes.resource_claims import DeviceRequestAllocationResult
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.events.node_events import LeaseHolder, ShareRefused
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import PodUid
from shared.model.requests.claim import DRIVER, claimable

logger = logging.getLogger(__name__)

CLAIM_WAIT_S = 40.0
"""How long Prepare waits for the lease: the kubelet's limit is 45 s."""
LOOK_S = 0.1
"""Interval of looks for a claim's lease among those known."""
FETCH_S = 2.0
"""Interval of requests for a claim's lease."""
PREFIX = "leasehold.dev-claim-"
FULL_DEVICE_S = 15.0
"""How long Prepare waits for room on a full device: containers of ended pods may still run."""


class ClaimPreparation:
    def __init__(
        self, node: Node, grants: Grants, time_slices: TimeSlices, cdi_directory: Path
    ) -> None:
        self.node = node
        self.grants = grants
        self.time_slices = time_slices
        self.cdi_directory = cdi_directory
        self._locks: WeakValueDictionary[PodUid, asyncio.Lock] = WeakValueDictionary()

    async def prepare(self, claim: LeaseHolder) -> Sequence[dra.Device]:
        """Idempotent.

        Raises RequestError or UnavailableError with a sentence for the pod's owner.
        """
        try:
            async with self.grants.counted(DRIVER), self._lock(claim):
                return await self._prepare(claim)
        except LeaseholdError as error:
            logger.warning("ResourceClaim %s is not prepared: %s", claim, error)
            raise

    async def unprepare(self, claim: LeaseHolder) -> None:
        """Idempotent. Raises UnavailableError if the records or files cannot be changed."""
        async with self._lock(claim):
            await self.node.checkpoint.forget((claim.pod,))
            path = self._path(claim.pod)
            try:
                await asyncio.to_thread(path.unlink, missing_ok=True)
            except OSError as error:
                raise UnavailableError(f"{path} cannot be removed: {error.strerror}") from error
        self.node.report_due.set()

    async def restore(self) -> None:
        """Write lost CDI files of prepared claims, as after a reboot; remove all others."""
        claims: dict[PodUid, list[CheckpointEntry]] = {}
        for entry in self.node.checkpoint.of_resource(DRIVER):
            claims.setdefault(entry.allocation.pod, []).append(entry)
        for claim, entries in claims.items():
            await self._write(claim, entries)
        await asyncio.to_thread(self._remove_others, set(map(self._path, claims)))

    def list_unprepared(self) -> tuple[Lease, ...]:
        locked = {claim for claim, lock in tuple(self._locks.items()) if lock.locked()}
        done = locked | self.node.checkpoint.claims
        return tuple(
            lease
            for lease in self.node.leases.leases.values()
            if lease.claim is not None and lease.state is LeaseState.BOUND and lease.pod not in done
        )

    def _path(self, claim: PodUid) -> Path:
        return self.cdi_directory / f"{PREFIX}{claim}.json"

    async def _write(self, claim: PodUid, entries: Iterable[CheckpointEntry]) -> None:
        specification = build_claim_specification(entries)
        if specification is not None:
            await asyncio.to_thread(write_specification, self._path(claim), specification)

    def _remove_others(self, live: Collection[Path]) -> None:
        with contextlib.suppress(OSError):
            for path in self.cdi_directory.glob(f"{PREFIX}*.json"):
                if path not in live:
                    path.unlink(missing_ok=True)

    def _report_refused(self, lease: Lease, reason: str) -> None:
        """The device report after it restores the lost lease of the device's holder."""
        self.node.outbox.add(
            ShareRefused(
                node=self.node.name,
                reason=reason,
                pod=lease.pod,
                namespace=lease.namespace,
                name=lease.name,
                claim=True,
                version=lease.version,
            )
        )
        self.node.report_due.set()

    def _lock(self, claim: LeaseHolder) -> asyncio.Lock:
        return self._locks.setdefault(claim.pod, asyncio.Lock())

    async def _prepare(self, claim: LeaseHolder) -> Sequence[dra.Device]:
        stored = await read_claim(self.node, claim)
        results = results_on(stored, self.node.name)
        generation = generation_of_claim(stored)
        entries: tuple[CheckpointEntry, ...] = ()
        if generation:
            entries = await self._recorded_now(claim, generation)
            await self._write(claim.pod, entries)
            await self.time_slices.ensure(
                {share.device for entry in entries for share in entry.lease.shares if not share.mig}
            )
        return _prepared_devices(results, entries, self.node.require_snapshot())

    async def _recorded_now(
        self, claim: LeaseHolder, generation: str
    ) -> tuple[CheckpointEntry, ...]:
        recorded = self._recorded(claim.pod, generation)
        for entry in recorded:
            await self.grants.prepare_again(entry)
        until = self.node.clock.ticks() + CLAIM_WAIT_S
        while not recorded:
            lease = await self._lease(claim, generation, until)
            try:
                for request in lease.containers:
                    await self._give(lease, request, until)
                return self._recorded(claim.pod, generation)
            except LeaseholdError as error:
                await self.node.checkpoint.forget((claim.pod,))  # none of them was handed out
                if isinstance(error, OvercommitError | DeviceMismatchError):
                    self._report_refused(lease, str(error))
                if not isinstance(error, LeaseEndedError):
                    raise
                logger.info("ResourceClaim %s: its lease ended before it was prepared", claim)
        return recorded

    def _recorded(self, claim: PodUid, generation: str) -> tuple[CheckpointEntry, ...]:
        entries = {
            entry.allocation.container: entry
            for entry in self.node.checkpoint.of_resource(DRIVER)
            if entry.allocation.pod == claim
            and entry.lease.claim is not None
            and entry.lease.claim.generation == generation
        }
        first = next(iter(entries.values()), None)
        complete = first is not None and entries.keys() >= set(first.lease.containers)
        return tuple(entries.values()) if complete else ()

    async def _give(self, lease: Lease, request: str, until: float) -> None:

        def decide(snapshot: NodeSnapshot) -> CheckpointEntry:
            return claim_entry(lease, request, snapshot)

        await self._wait_for_amounts(lease, until)
        await self.grants.give(
            lease,
            request,
            DRIVER,
            decide,
            records_s=CLAIM_WAIT_S,
            room_s=FULL_DEVICE_S,
            until=until,
        )

    async def _wait_for_amounts(self, lease: Lease, until: float) -> None:
        """This lease lets GPUs have amounts again that became replicas meanwhile."""
        clock = self.node.clock
        until = min(until, clock.ticks() + FULL_DEVICE_S)
        leased = {share.device for share in lease.shares}
        while clock.ticks() < until and any(
            device.replicas is not None and device.uuid in leased for device in self.node.devices
        ):
            await clock.sleep(LOOK_S)

    async def _lease(self, claim: LeaseHolder, generation: str, until: float) -> Lease:
        missing = ""
        fetch_at = 0.0
        clock = self.node.clock
        while True:
            lease = self.node.leases.find(claim.pod)
            if (
                lease is not None
                and lease.claim is not None
                and lease.claim.generation == generation
                and lease.state in HONOURED_STATES
            ):
                return lease
            if clock.ticks() > until:
                raise UnavailableError(
                    f"ResourceClaim {claim} has no lease on node {self.node.name} after "
                    f"{CLAIM_WAIT_S:g} s: "
                    f"{missing or 'the ledger has none for it'}"
                )
            if clock.ticks() >= fetch_at:
                missing = await self._fetch(claim, generation)
                fetch_at = clock.ticks() + FETCH_S
            await clock.sleep(LOOK_S)

    async def _fetch(self, claim: LeaseHolder, generation: str) -> str:
        """Return why the requested lease is still unknown, or an empty text.

        Raises UnavailableError if the claim was allocated again: the kubelet retries.
        """
        try:
            fetched = await self.node.lease_sync.fetch_claim(claim)
        except UnavailableError as error:
            return f"{error}; are the binder and NATS running?"
        leases = [lease for lease in fetched if lease.pod == claim.pod]
        if any(lease.claim and lease.claim.generation != generation for lease in leases):
            if generation_of_claim(await read_claim(self.node, claim)) != generation:
                raise UnavailableError(f"ResourceClaim {claim} has been allocated again")
            return "its lease is for another allocation"
        return f"its lease is {leases[0].state}" if leases else ""


def _prepared_devices(
    results: Iterable[DeviceRequestAllocationResult],
    entries: Iterable[CheckpointEntry],
    node: NodeSnapshot,
) -> tuple[dra.Device, ...]:
    """The first device of a request carries its CDI names.

    A request of a prioritized list is answered by its own name, without the choice. Administrative
    access needs no lease, and has the device without limits.
    """
    left = {entry.allocation.container: cdi_names(entry) for entry in entries}
    whole = {
        name: (qualified_name(uuid),)
        for uuid, device in node.devices.items()
        for name, part in claimable(device).items()
        if part.profile is None
    }
    return tuple(
        dra.Device(
            request_names=[result.request.partition("/")[0]],
            pool_name=result.pool,
            device_name=result.device,
            share_id=result.share_id or None,
            cdi_device_ids=whole.get(result.device, ())
            if result.admin_access
            else left.pop(result.request, ()),
        )
        for result in results
    )

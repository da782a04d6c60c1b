"""Gives containers and ResourceClaims their shares."""

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from services.node_agent.allocate.allocation import NOT_ITS_OWN, NodeSnapshot, check_present
from services.node_agent.allocate.failed_grants import FailedGrants
from services.node_agent.mig.instances import InstanceUuids
from services.node_agent.node import Node
from services.node_agent.partition.layout_reconciler import LayoutReconciler
from services.node_agent.reconcile.checkpoint_reconciler import CheckpointReconciler
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.device_guard import OvercommitError
from shared.model.errors import ConflictError, LeaseholdError, RequestError, UnavailableError
from shared.model.events.node_events import ShareActivated
from shared.model.leases.lease import Lease, Share
from shared.model.names import DeviceUuid

LOOK_S = 0.1
"""Interval of looks for room on a full device."""
LOOK_LATER_S = 0.5
"""Interval of looks for room while it cannot be seen whether there is some."""
SYNC_S = 0.5
"""Interval of requests for all leases of the node while a device is full."""

Decide = Callable[[NodeSnapshot], CheckpointEntry]
"""Raises RequestError with the reason for a refusal."""


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Raise an OSError as UnavailableError: it is not the pod's."""
    try:
        yield
    except OSError as error:
        named = f"{error.filename}: " if error.filename else "the node agent: "
        raise UnavailableError(f"{named}{error.strerror or error}") from error


class LeaseEndedError(ConflictError):
    """The claim may have another lease."""


class Grants:
    def __init__(self, node: Node, mig: LayoutReconciler, reconciler: CheckpointReconciler) -> None:
        self.node = node
        self.mig = mig
        self.reconciler = reconciler
        self.failed = FailedGrants(node)
        self._failed_pods: Set[DeviceUuid | None] = frozenset()
        """By closed device; None is the node."""

    @asynccontextmanager
    async def counted(self, resource: str) -> AsyncIterator[None]:
        node = self.node
        began = node.clock.ticks()
        outcome = "cancelled"  # by a kubelet that restarts
        try:
            yield
            outcome = "allocated"
        except LeaseholdError as error:
            outcome = "unavailable" if isinstance(error, UnavailableError) else "refused"
            if isinstance(error, OvercommitError):
                node.metrics.count_overcommit()
            raise
        finally:
            node.metrics.count_allocation(resource, outcome, node.clock.ticks() - began)

    async def give(
        self,
        lease: Lease,
        container: str,
        resource: str,
        decide: Decide,
        *,
        records_s: float,
        room_s: float,
        until: float = math.inf,
        blind_until: float = -math.inf,
        waiting: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> CheckpointEntry:
        """Give a container, or a claim's request, its shares; they are recorded on return.

        Waits for MIG instances, lost records and room until `until`; while room cannot be seen,
        until `blind_until`. What fails for a reason that is not the pod's own closes its devices.
        If another pod has failed since, this one was bound before: it is tried again until
        `blind_until`, since the kubelet fails it otherwise.
        """
        node = self.node
        ticks = self.node.clock.ticks
        shares = lease.shares_of(container)
        while True:
            closed = self._closed(shares)
            try:
                with node.metrics.traced(lease, container, resource) as context, os_errors():
                    check_present(shares, node.require_snapshot())
                    instances = await self._instances(lease, container, waiting)
                    await self._wait_for_records(max(blind_until, min(until, ticks() + records_s)))
                    snapshot = self._snapshot(instances)
                    entry = decide(snapshot)
                    await self._prepare(entry, new=lease.claim is None)
                    room_until = min(until, ticks() + room_s)
                    await self._record(entry, snapshot, room_until, blind_until)
                break
            except NOT_ITS_OWN as error:
                if lease.claim is not None:
                    raise
                self._close(lease, container, str(error), decide)
                if ticks() > blind_until or closed.isdisjoint(self._failed_pods):
                    self._failed_pods |= self._closed(shares)
                    raise
            await node.clock.sleep(LOOK_LATER_S)
        self.failed.open_devices(shares)
        node.outbox.add(ShareActivated(node=node.name, allocation=entry.allocation, trace=context))
        return entry

    async def _instances(
        self,
        lease: Lease,
        container: str,
        waiting: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> InstanceUuids:
        if not any(share.mig for share in lease.shares_of(container)):
            return {}
        async with waiting():
            return await self.mig.instance_uuids(lease, container)

    def _snapshot(self, instances: InstanceUuids) -> NodeSnapshot:
        return replace(
            self.node.require_snapshot(),
            fences=self.node.checkpoint.fences,
            instances=instances,
            now=self.node.clock.now(),
        )

    def _closed(self, shares: Iterable[Share]) -> Set[DeviceUuid | None]:
        node = self.node
        closed: set[DeviceUuid | None] = set(node.closed)
        if node.files.unwritable_reason or node.cdi.unwritable_reason:
            closed.add(None)
        self._failed_pods &= closed
        return closed & {None, *(share.device for share in shares)}

    def _close(self, lease: Lease, container: str, reason: str, decide: Decide) -> None:
        shares = lease.shares_of(container)
        if self._closed(shares):
            return

        async def try_again() -> None:
            with os_errors():
                check_present(shares, self.node.require_snapshot())
                entry = decide(self._snapshot(await self._instances(lease, container)))
                await self._prepare(entry)
                await self.node.checkpoint.write_again()

        self.failed.close_devices(shares, reason, try_again)

    async def prepare_again(self, entry: CheckpointEntry, *, starting: bool = False) -> None:
        allocation = entry.allocation
        if entry.instances:
            existing = await self.mig.instance_uuids(allocation.lease, allocation.container)
            if tuple(existing.values()) != entry.instances:
                raise RequestError(
                    f"container {allocation.container} of {entry.holder} was given "
                    f"{', '.join(entry.instances)}, and its lease is for "
                    f"{', '.join(existing.values())}: delete the pod"
                )
        async with self.node.checkpoint.changing.hold(allocation.pod):
            await self._prepare(
                self.node.checkpoint.by_key.get(entry.key, entry), starting=starting
            )

    async def _prepare(
        self, entry: CheckpointEntry, *, starting: bool = False, new: bool = False
    ) -> None:
        await self.node.enforcers.prepare(entry, starting=starting, new=new)
        await self.node.cdi.ensure_named(entry.setup)

    async def _wait_for_records(self, until: float) -> None:
        while self.node.checkpoint.lost:
            if self.node.clock.ticks() > until:
                raise UnavailableError(
                    "the node agent has lost its records of what runs here, and rebuilds them as "
                    "soon as a binder and the kubelet respond: check that the binder and NATS run"
                )
            await self.node.clock.sleep(LOOK_S)

    async def _record(
        self, entry: CheckpointEntry, snapshot: NodeSnapshot, until: float, blind_until: float
    ) -> None:
        """Record an entry once its devices can hold it.

        Raises OvercommitError, UnavailableError if their holders cannot be seen, and
        LeaseEndedError if a claim's lease ends first.
        """
        node = self.node
        pause_s = 0.0
        silence = ""
        sync_at = node.clock.ticks() + SYNC_S
        while True:
            try:
                return await node.checkpoint.save(entry, devices=snapshot.devices)
            except OvercommitError as error:
                if node.clock.ticks() > until:
                    unseen = self.reconciler.unseen_holders(entry) or silence
                    if not unseen:
                        raise
                    if node.clock.ticks() > blind_until:
                        raise UnavailableError(
                            f"whether its devices have room cannot be seen: {unseen}"
                        ) from error
                    pause_s = LOOK_LATER_S
            await node.clock.sleep(pause_s)
            pause_s = LOOK_S
            if node.clock.ticks() >= sync_at:
                silence = ""
                try:
                    await node.lease_sync.sync()
                except UnavailableError as error:  # the ledger may be being rebuilt
                    silence = f"which leases have ended is not known: {error}"
                sync_at = node.clock.ticks() + SYNC_S
            with contextlib.suppress(LeaseholdError):
                await self.reconciler.forget_ended()
            lease = entry.lease
            current = node.leases.find(entry.lease.pod)
            if lease.claim is not None and (current is None or current.shares != lease.shares):
                raise LeaseEndedError(f"the lease of claim {lease.pod} has changed meanwhile")

"""Serves the kubelet's calls: resolves the container, decides by its lease, records, replies.

Calls for one resource are served one after the other, since each changes which container is next;
while one waits for MIG instances, its container counts as served and others go on. A refused pod
fails permanently: its controller creates a new one.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from services.node_agent.agent_timing import DEFAULT_TIMING, AgentTiming
from services.node_agent.allocate.allocation import (
    NodeSnapshot,
    check_present,
    grant,
    preferred_device_ids,
    refusal_text,
    shares_for,
)
from services.node_agent.allocate.pod_resolution import Ambiguous, ContainerCandidate
from services.node_agent.allocate.pod_resolver import PodResolver
from services.node_agent.allocate.reporter import AllocationReporter
from services.node_agent.kubelet.device_ids import compact
from services.node_agent.kubelet.node_pods import PodResourcesLister
from services.node_agent.kubelet.pods import Holding
from services.node_agent.metrics import AgentMetrics
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import AllocationHistory, CheckpointEntry
from services.node_agent.records.device_guard import OvercommitError
from shared.dialects.dialect import ContainerSetup
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.node_events import Allocation
from shared.model.lease import Lease
from shared.model.names import DeviceUuid, NodeName, PodUid

MigInstancesOf = Callable[[Lease, str], Awaitable[dict[tuple[DeviceUuid, int], str]]]
"""Returns the UUIDs of a container's MIG instances, by device and position, once they exist."""
RECORDS_PAUSE_S = 0.1
ContainerPlace = tuple[str, str, str]
"""Namespace, pod name and container name."""


class ContainerPreparer(Protocol):
    """The host's disk."""

    async def prepare(self, setup: ContainerSetup, *, starting: bool = False) -> None:
        """Create a container's files; none of its processes runs if it is `starting`."""
        ...


class AllocationHandler:
    """The kubelet's three calls."""

    def __init__(
        self,
        node: NodeName,
        *,
        require_snapshot: Callable[[], NodeSnapshot],
        resolver: PodResolver,
        pod_resources: PodResourcesLister,
        checkpoint: Checkpoint,
        forget_ended: Callable[[NodeSnapshot], Awaitable[object]],
        files: ContainerPreparer,
        name_cdi_devices: Callable[[ContainerSetup], Awaitable[None]],
        mig_instances_of: MigInstancesOf,
        reporter: AllocationReporter,
        metrics: AgentMetrics,
        clock: Clock,
        timing: AgentTiming = DEFAULT_TIMING,
    ) -> None:
        self.node = node
        self.require_snapshot = require_snapshot
        self.resolver = resolver
        self.pod_resources = pod_resources
        self.checkpoint = checkpoint
        self.forget_ended = forget_ended
        self.files = files
        self.name_cdi_devices = name_cdi_devices
        self.mig_instances_of = mig_instances_of
        self.reporter = reporter
        self.metrics = metrics
        self.clock = clock
        self.timing = timing
        self._locks: dict[str, asyncio.Lock] = {}
        self._partitioning: dict[tuple[str, PodUid, str], tuple[str, ...]] = {}
        """Device IDs of calls that wait for MIG instances, by resource, pod and container."""

    async def get_preferred_allocation(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        """Return the IDs that the container's lease names; none if the container is ambiguous."""
        node = self.require_snapshot()
        async with self._locks.setdefault(resource, asyncio.Lock()):
            candidate = await self.resolver.resolve(resource, size, self._history(resource))
            if isinstance(candidate, Ambiguous):
                return []
            lease = await self.resolver.lease_of(candidate)
        return preferred_device_ids(
            lease,
            candidate,
            node,
            resource=resource,
            available=available,
            must_include=must_include,
            size=size,
        )

    async def allocate(self, resource: str, device_ids: Sequence[str]) -> ContainerSetup:
        """Return the container's setup, which is on disk before.

        Raises RequestError or UnavailableError with a sentence for the pod's owner.
        """
        began = self.clock.ticks()
        outcome = "cancelled"  # by a kubelet that restarts
        try:
            async with self._locks.setdefault(resource, asyncio.Lock()):
                setup = await self._allocate(resource, device_ids)
            outcome = "allocated"
        except LeaseholdError as error:
            text = refusal_text(
                str(error), node=self.node, resource=resource, device_ids=device_ids
            )
            unavailable = isinstance(error, UnavailableError)
            outcome = "unavailable" if unavailable else "refused"
            if isinstance(error, OvercommitError):
                self.metrics.count_overcommit()
            raise (UnavailableError if unavailable else RequestError)(text) from error
        else:
            return setup
        finally:
            self.metrics.count_allocation(resource, outcome, self.clock.ticks() - began)

    async def pre_start_container(self, resource: str, device_ids: Sequence[str]) -> None:
        """Allow a start if PodResources shows the IDs with the container they were allocated to.

        PodResources omits init containers. Missing files are created again. Raises RequestError if
        another container has the IDs, or they were not allocated.
        """
        ids = compact(device_ids)
        entries = [
            entry
            for entry in self.checkpoint.of_resource(resource)
            if entry.allocation.device_ids == ids
        ]
        holders = await self._holders(resource, ids)
        matching = [
            entry for entry in entries if (_place(entry) in holders if holders else entry.init)
        ]
        if not matching:
            raise RequestError(
                refusal_text(
                    f"the kubelet shows them with {_listed(holders)}, and they were allocated to "
                    f"{_listed(map(_place, entries))}",
                    node=self.node,
                    resource=resource,
                    device_ids=device_ids,
                )
            )
        for entry in matching:
            check_present(
                entry.lease.shares_of(entry.allocation.container), self.require_snapshot()
            )
            await self._prepare_again(entry, starting=True)
            self.checkpoint.note_start(entry.allocation.pod, self.clock.now())

    async def _prepare_again(self, entry: CheckpointEntry, *, starting: bool = False) -> None:
        """Create missing files again; a reset of the device removes its MIG instances."""
        allocation = entry.allocation
        if entry.instances:
            existing = await self.mig_instances_of(allocation.lease, allocation.container)
            if tuple(existing.values()) != entry.instances:
                raise RequestError(
                    f"container {allocation.container} of pod {allocation.namespace}/"
                    f"{allocation.name} was given {', '.join(entry.instances)}, and its lease is "
                    f"for {', '.join(existing.values())}: delete the pod"
                )
        async with self.checkpoint.changing:
            newest = self.checkpoint.find(*entry.key) or entry
            await self.files.prepare(newest.limits, starting=starting)
            await self.name_cdi_devices(newest.setup)

    async def _holders(self, resource: str, ids: tuple[str, ...]) -> set[ContainerPlace]:
        pod_resources = await self.pod_resources.list_holdings()
        return {
            (holding.namespace, holding.name, holding.container)
            for holding in pod_resources.holdings
            if _holds(holding, resource, ids)
        }

    async def _allocate(self, resource: str, device_ids: Sequence[str]) -> ContainerSetup:
        ids = compact(device_ids)
        candidate = await self.resolver.resolve(
            resource, len(device_ids), self._history(resource), device_ids=ids
        )
        if isinstance(candidate, Ambiguous):
            self.reporter.report_ambiguous(resource, candidate)
            unreadable = self.resolver.unreadable_reason
            because = f", and {unreadable}" if unreadable else ""
            raise RequestError(f"its container is ambiguous: {candidate}{because}")
        try:
            return await self._give(candidate, resource, device_ids, ids)
        except LeaseholdError as error:
            self.reporter.report_refused(candidate, str(error))
            raise

    async def _give(
        self,
        candidate: ContainerCandidate,
        resource: str,
        device_ids: Sequence[str],
        ids: tuple[str, ...],
    ) -> ContainerSetup:
        lease = await self.resolver.lease_of(candidate)
        container = candidate.container.name
        previous = self.checkpoint.find(candidate.pod.uid, container, resource)
        check_present(shares_for(lease, candidate, self.node), self.require_snapshot())
        if lease is None:
            raise AssertionError("shares_for refuses pods without a lease")
        if previous is not None and previous.allocation.device_ids == ids:
            await self._prepare_again(previous)
            return previous.setup
        span = self.metrics.begin(
            lease, {"k8s.container.name": container, "leasehold.resource": resource}
        )
        try:
            entry = await self._grant(lease, candidate, resource, device_ids, ids)
        except LeaseholdError as error:
            span.end(str(error))
            raise
        span.end()
        self.reporter.report_activated(
            entry.allocation, containers=self._activated(lease), trace=span.context
        )
        return entry.setup

    async def _grant(
        self,
        lease: Lease,
        candidate: ContainerCandidate,
        resource: str,
        device_ids: Sequence[str],
        ids: tuple[str, ...],
    ) -> CheckpointEntry:
        """Decide, create the container's files, and record the allocation."""
        container = candidate.container
        instances: dict[tuple[DeviceUuid, int], str] = {}
        if any(share.mig for share in lease.shares_of(container.name)):
            async with self._unlocked((resource, lease.pod, container.name), ids):
                instances = await self.mig_instances_of(lease, container.name)
        await self._wait_for_records()
        node = self.require_snapshot()
        setup = grant(
            lease,
            candidate,
            node,
            resource=resource,
            device_ids=device_ids,
            honoured=self.checkpoint.fences,
            reusable=self._of_init_containers(lease.pod, resource),
            instances=instances,
        )
        await self.files.prepare(setup)
        await self.name_cdi_devices(setup)
        allocation = Allocation(
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            container=container.name,
            resource=resource,
            device_ids=ids,
            lease=lease,
            activated_at=self.clock.now(),
        )
        entry = CheckpointEntry(
            allocation=allocation,
            setup=setup,
            init=container.init,
            instances=tuple(instances.values()),
        )
        await self._save(entry, node)
        return entry

    @contextlib.asynccontextmanager
    async def _unlocked(
        self, call: tuple[str, PodUid, str], ids: tuple[str, ...]
    ) -> AsyncIterator[None]:
        """Let other calls for the resource go on, for which this container counts as served."""
        lock = self._locks[call[0]]
        self._partitioning[call] = ids
        lock.release()
        try:
            yield
        finally:
            await lock.acquire()
            self._partitioning.pop(call, None)

    async def _save(self, entry: CheckpointEntry, node: NodeSnapshot) -> None:
        """Record the allocation once the device can hold it.

        Pods that have just ended may still be in the checkpoint; for `records_retry_s` they are
        looked for. Raises OvercommitError if the device cannot hold it then.
        """
        until, pause_s = self.clock.ticks() + self.timing.records_retry_s, 0.0
        while self.clock.ticks() <= until:
            with contextlib.suppress(OvercommitError):
                await self.checkpoint.save(entry, devices=node.devices)
                return
            await self.clock.sleep(pause_s)
            with contextlib.suppress(LeaseholdError):
                await self.resolver.sync_leases()
                await self.forget_ended(node)
            pause_s = RECORDS_PAUSE_S
        await self.checkpoint.save(entry, devices=node.devices)

    async def _wait_for_records(self) -> None:
        """Wait while a lost checkpoint is rebuilt. Raises UnavailableError if that takes long."""
        until = self.clock.ticks() + self.timing.lease_wait_s
        while self.checkpoint.lost:
            if self.clock.ticks() > until:
                raise UnavailableError(
                    "the node agent has lost its records of what runs here, and rebuilds them when "
                    "the ledger and the kubelet respond; are the binder and NATS running?"
                )
            await self.clock.sleep(RECORDS_PAUSE_S)

    def _activated(self, lease: Lease) -> frozenset[str]:
        """Return the containers of the lease's pod that have their devices."""
        containers = {share.container for share in lease.shares}
        resources = self.require_snapshot().served
        return frozenset(
            name
            for name in containers
            if any(self.checkpoint.find(lease.pod, name, resource) for resource in resources)
        )

    def _of_init_containers(self, pod: PodUid, resource: str) -> list[str]:
        """Return the IDs that were allocated to the pod's init containers."""
        return [
            text
            for entry in self.checkpoint.of_resource(resource)
            if entry.init and entry.allocation.pod == pod
            for text in entry.allocation.device_ids
        ]

    def _history(self, resource: str) -> Callable[[], AllocationHistory]:
        def history() -> AllocationHistory:
            known = self.checkpoint.allocation_history(resource, frozenset(self.reporter.refused))
            waiting = {
                (pod, container): ids
                for (of_resource, pod, container), ids in self._partitioning.items()
                if of_resource == resource
            }
            return replace(known, allocated={**known.allocated, **waiting})

        return history


def _place(entry: CheckpointEntry) -> ContainerPlace:
    allocation = entry.allocation
    return allocation.namespace, allocation.name, allocation.container


def _listed(places: Iterable[ContainerPlace]) -> str:
    return ", ".join("/".join(place) for place in sorted(places)) or "no container"


def _holds(holding: Holding, resource: str, ids: tuple[str, ...]) -> bool:
    return holding.resource == resource and compact(holding.device_ids) == ids

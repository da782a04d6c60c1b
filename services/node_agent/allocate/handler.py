"""Answers the kubelet: resolves the container, decides by its lease, records, then answers.

Calls for one resource are answered one after the other, since each answer changes which container
is next. A refusal fails the pod for good: its controller makes a new one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from services.node_agent.allocate.allocation import (
    NodeSnapshot,
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
from services.node_agent.records.checkpoint_entry import AllocationHistory, CheckpointEntry, Fence
from shared.dialects.dialect import ContainerSetup
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.node_events import Allocation
from shared.model.lease import Lease
from shared.model.names import DeviceUuid, NodeName, PodUid

MigInstancesOf = Callable[[Lease, str], Awaitable[dict[tuple[DeviceUuid, int], str]]]
"""Returns the UUIDs of a container's MIG instances, by device and position, once they exist."""
ContainerPlace = tuple[str, str, str]
"""Namespace, pod name and container name."""


class AllocationRecords(Protocol):
    """The checkpoint: what the kubelet was answered before."""

    fences: dict[str, Fence]
    changing: asyncio.Lock
    """Held while an entry and the region of its container change together."""

    async def save(self, entry: CheckpointEntry) -> None:
        """Record an answer; it is on disk when this returns."""
        ...

    def find(self, pod: PodUid, container: str, resource: str) -> CheckpointEntry | None:
        """Return what was answered for a container."""
        ...

    def of_resource(self, resource: str) -> list[CheckpointEntry]:
        """Return all answers for one resource."""
        ...

    def allocation_history(self, resource: str, refused: frozenset[PodUid]) -> AllocationHistory:
        """Return what pod resolution needs to know of our own answers."""
        ...


class ContainerPreparer(Protocol):
    """The host's disk."""

    async def prepare(self, setup: ContainerSetup, *, starting: bool = False) -> None:
        """Make what one container mounts; none of its processes runs if it is `starting`."""
        ...


class CdiNames(Protocol):
    """The CDI specification of the node's devices."""

    async def ensure_named(self, setup: ContainerSetup) -> None:
        """Have it name what a container is given; raises UnavailableError if it cannot."""
        ...


class AllocationSpan(Protocol):
    """One allocation in the pod's trace."""

    @property
    def context(self) -> str:
        """Trace context for events that follow."""
        ...

    def end(self, error: str = "") -> None:
        """End it, as failed if there is an error."""
        ...


class AllocationMetrics(Protocol):
    """Traces and counters."""

    def begin(self, lease: Lease, facts: Mapping[str, str]) -> AllocationSpan:
        """Begin a span below the lease's trace."""
        ...

    def count_allocation(self, resource: str, outcome: str, seconds: float) -> None:
        """Count one Allocate."""
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
        checkpoint: AllocationRecords,
        files: ContainerPreparer,
        cdi: CdiNames,
        mig_instances_of: MigInstancesOf,
        reporter: AllocationReporter,
        metrics: AllocationMetrics,
        clock: Clock,
    ) -> None:
        self.node = node
        self.require_snapshot = require_snapshot
        self.resolver = resolver
        self.pod_resources = pod_resources
        self.checkpoint = checkpoint
        self.files = files
        self.cdi = cdi
        self.mig_instances_of = mig_instances_of
        self.reporter = reporter
        self.metrics = metrics
        self.clock = clock
        self._locks: dict[str, asyncio.Lock] = {}

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
        """Return what the container gets; it is on disk before.

        Raises RequestError or UnavailableError with a sentence for the pod's owner.
        """
        began = self.clock.ticks()
        outcome = "refused"
        try:
            async with self._locks.setdefault(resource, asyncio.Lock()):
                setup = await self._allocate(resource, device_ids)
            outcome = "answered"
        except LeaseholdError as error:
            text = refusal_text(
                str(error), node=self.node, resource=resource, device_ids=device_ids
            )
            unavailable = isinstance(error, UnavailableError)
            outcome = "unavailable" if unavailable else "refused"
            raise (UnavailableError if unavailable else RequestError)(text) from error
        else:
            return setup
        finally:
            self.metrics.count_allocation(resource, outcome, self.clock.ticks() - began)

    async def pre_start_container(self, resource: str, device_ids: Sequence[str]) -> None:
        """Agree to a start if PodResources shows the IDs with the container they were given to.

        Init containers are not shown there. What the container mounts is made again if it is gone.
        Raises RequestError if another container holds the IDs, or they were given to none.
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
                    f"the kubelet shows them with {_listed(holders)}, and they were given to "
                    f"{_listed(map(_place, entries))}",
                    node=self.node,
                    resource=resource,
                    device_ids=device_ids,
                )
            )
        for entry in matching:
            await self._prepare_again(entry, starting=True)

    async def _prepare_again(self, entry: CheckpointEntry, *, starting: bool = False) -> None:
        """Ensure that what was given still exists; a device reset removes its MIG instances."""
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
            await self.cdi.ensure_named(newest.setup)

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
        shares_for(lease, candidate, self.node)
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
        """Decide, make what the container mounts, and record the answer."""
        container = candidate.container
        instances = await self.mig_instances_of(lease, container.name)
        setup = grant(
            lease,
            candidate,
            self.require_snapshot(),
            resource=resource,
            device_ids=device_ids,
            honoured=self.checkpoint.fences,
            reusable=self._of_init_containers(lease.pod, resource),
            instances=instances,
        )
        await self.files.prepare(setup)
        await self.cdi.ensure_named(setup)
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
        await self.checkpoint.save(entry)
        return entry

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
        """Return the IDs that the pod's init containers were given."""
        return [
            text
            for entry in self.checkpoint.of_resource(resource)
            if entry.init and entry.allocation.pod == pod
            for text in entry.allocation.device_ids
        ]

    def _history(self, resource: str) -> Callable[[], AllocationHistory]:
        return lambda: self.checkpoint.allocation_history(
            resource, frozenset(self.reporter.refused)
        )


def _place(entry: CheckpointEntry) -> ContainerPlace:
    allocation = entry.allocation
    return allocation.namespace, allocation.name, allocation.container


def _listed(places: Iterable[ContainerPlace]) -> str:
    return ", ".join("/".join(place) for place in sorted(places)) or "no container"


def _holds(holding: Holding, resource: str, ids: tuple[str, ...]) -> bool:
    return holding.resource == resource and compact(holding.device_ids) == ids

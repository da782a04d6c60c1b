"""Answers the kubelet: gathers who asks and what they hold, decides, writes down, then says it.

Calls for one resource are answered one after the other, since each answer changes who is asked for
next. Whatever is refused here fails the pod for good: its controller makes a new one.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from services.node_agent.allocate.allocation import (
    Fence,
    NodeSnapshot,
    grant,
    preferred_device_ids,
    refusal_text,
    shares_for,
)
from services.node_agent.allocate.pod_resolution import (
    AllocationHistory,
    Ambiguous,
    ContainerCandidate,
    Holding,
)
from services.node_agent.allocate.pod_resolver import PodResolver
from services.node_agent.kubelet.device_ids import compact
from services.node_agent.outbox import Outbox
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.dialects.dialect import ContainerSetup
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.node_events import Allocation, ShareActivated, ShareRefused
from shared.model.lease import Lease
from shared.model.names import DeviceUuid, NodeName, PodUid


class Record(Protocol):
    """What the kubelet was told before."""

    fences: dict[str, Fence]
    changing: asyncio.Lock
    """Held while an answer and the region of its container change together."""

    async def save(self, entry: CheckpointEntry) -> None:
        """Record an answer; it is safe when this returns."""
        ...

    def find(self, pod: PodUid, container: str, resource: str) -> CheckpointEntry | None:
        """Return what was answered for a container."""
        ...

    def of_resource(self, resource: str) -> list[CheckpointEntry]:
        """Return all answers for one resource."""
        ...

    def allocation_history(self, resource: str, refused: frozenset[PodUid]) -> AllocationHistory:
        """Return what identity needs to know."""
        ...


class ContainerPreparer(Protocol):
    """The host's disk."""

    async def prepare(self, setup: ContainerSetup, *, starting: bool = False) -> None:
        """Make what one container mounts; none of its processes runs if it is `starting`."""
        ...


class Specifying(Protocol):
    """The CDI specification of the node's devices."""

    async def ensure_named(self, setup: ContainerSetup) -> None:
        """See that it names what a container is given; UnavailableError if it cannot."""
        ...


class MigInstances(Protocol):
    """Instances of devices in MIG mode."""

    async def instance_uuids(
        self, lease: Lease, container: str
    ) -> dict[tuple[DeviceUuid, int], str]:
        """Return the UUIDs of a container's, by device and position, once they are there."""
        ...


class PodViews(Protocol):
    """Annotations that others like to read."""

    def show_allocated(self, lease: Lease, containers: frozenset[str]) -> None:
        """Show that these containers of the pod have their devices."""
        ...

    def show_failed(self, lease: Lease) -> None:
        """Show that the pod was refused."""
        ...


class Span(Protocol):
    """One allocation in the pod's trace."""

    context: str

    def end(self, error: str = "") -> None:
        """End it, as failed if there is an error."""
        ...


class AllocationMetrics(Protocol):
    """Traces and counters."""

    def begin(self, lease: Lease, facts: Mapping[str, str]) -> Span:
        """Begin a span below the lease's trace."""
        ...

    def count_allocation(self, resource: str, outcome: str, seconds: float) -> None:
        """Count one Allocate."""
        ...


class AllocationHandler:
    """The kubelet's three questions."""

    def __init__(
        self,
        node: NodeName,
        *,
        finding: PodResolver,
        record: Record,
        preparing: ContainerPreparer,
        cdi: Specifying,
        instances: MigInstances,
        views: PodViews,
        measuring: AllocationMetrics,
        clock: Clock,
    ) -> None:
        self.node = node
        self.finding = finding
        self.record = record
        self.preparing = preparing
        self.cdi = cdi
        self.instances = instances
        self.views = views
        self.measuring = measuring
        self.clock = clock
        self.facts: NodeSnapshot | None = None
        """Set as soon as the devices are known, and nothing is served before that."""
        self.outbox = Outbox()
        self.refused: set[PodUid] = set()
        self._locks: dict[str, asyncio.Lock] = {}

    async def get_preferred_allocation(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        """Return the IDs that the lease of whoever is asked for names; none if that is unclear."""
        facts = self._known_node()
        async with self._locks.setdefault(resource, asyncio.Lock()):
            who = await self.finding.resolve(resource, size, self._told(resource))
            if isinstance(who, Ambiguous):
                return []
            lease = await self.finding.lease_of(who)
        return preferred_device_ids(
            lease,
            who,
            facts,
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
            self.measuring.count_allocation(resource, outcome, self.clock.ticks() - began)

    async def pre_start_container(self, resource: str, device_ids: Sequence[str]) -> None:
        """Agree to a start if PodResources shows that the IDs are with whom they were given to.

        Init containers are not shown there. What the container mounts is made again if it is gone.
        Raises RequestError if another container holds the IDs, or nobody was told of them.
        """
        ids = compact(device_ids)
        entries = [
            entry
            for entry in self.record.of_resource(resource)
            if entry.allocation.device_ids == ids
        ]
        holders = await self._holders(resource, ids)
        if not holders:
            fitting = [entry for entry in entries if entry.init]
        else:
            fitting = [entry for entry in entries if _place(entry) in holders]
        if not fitting:
            holder = ", ".join("/".join(place) for place in sorted(holders)) or "nobody"
            told = ", ".join("/".join(_place(entry)) for entry in entries) or "nobody"
            raise RequestError(
                refusal_text(
                    f"the kubelet shows them with {holder}, and they were given to {told}",
                    node=self.node,
                    resource=resource,
                    device_ids=device_ids,
                )
            )
        for entry in fitting:
            await self._prepare_again(entry, starting=True)

    async def _prepare_again(self, entry: CheckpointEntry, *, starting: bool = False) -> None:
        """Make sure that what was told is there; MIG instances are lost when a device is reset."""
        told = entry.allocation
        if entry.instances:
            there = await self.instances.instance_uuids(told.lease, told.container)
            if tuple(there.values()) != entry.instances:
                raise RequestError(
                    f"container {told.container} of pod {told.namespace}/{told.name} was given "
                    f"{', '.join(entry.instances)}, and its lease is for "
                    f"{', '.join(there.values())}: delete the pod"
                )
        async with self.record.changing:
            newest = self.record.find(told.pod, told.container, told.resource) or entry
            await self.preparing.prepare(newest.limits, starting=starting)
            await self.cdi.ensure_named(newest.setup)

    async def _holders(self, resource: str, ids: tuple[str, ...]) -> set[tuple[str, str, str]]:
        held = await self.finding.pod_resources.list_holdings()
        return {_shown(one) for one in held.holdings if _holds(one, resource, ids)}

    async def _allocate(self, resource: str, device_ids: Sequence[str]) -> ContainerSetup:
        ids = compact(device_ids)
        who = await self.finding.resolve(
            resource, len(device_ids), self._told(resource), device_ids=ids
        )
        if isinstance(who, Ambiguous):
            self.outbox.add(ShareRefused(node=self.node, reason=f"{resource}: {who}"))
            blind = self.finding.pods.unreadable_reason
            because = f", and {blind}" if blind else ""
            raise RequestError(f"whom it is for is not certain: {who}{because}")
        try:
            return await self._give(who, resource, device_ids, ids)
        except LeaseholdError as error:
            self._refuse(who, str(error))
            raise

    def _refuse(self, who: ContainerCandidate, reason: str) -> None:
        self.refused.add(who.pod.uid)
        self.outbox.add(
            ShareRefused(
                node=self.node,
                reason=reason,
                pod=who.pod.uid,
                namespace=who.pod.namespace,
                name=who.pod.name,
                container=who.container.name,
            )
        )
        lease = self.finding.leases.find(who.pod.uid)
        if lease is not None:
            self.views.show_failed(lease)

    async def _give(
        self,
        who: ContainerCandidate,
        resource: str,
        device_ids: Sequence[str],
        ids: tuple[str, ...],
    ) -> ContainerSetup:
        lease = await self.finding.lease_of(who)
        before = self.record.find(who.pod.uid, who.container.name, resource)
        shares_for(lease, who, self.node)
        if lease is None:
            raise AssertionError("shares_for refuses pods without a lease")
        if before is not None and before.allocation.device_ids == ids:
            await self._prepare_again(before)
            return before.setup
        span = self.measuring.begin(
            lease, {"k8s.container.name": who.container.name, "leasehold.resource": resource}
        )
        try:
            entry = await self._settle(lease, who, resource, device_ids, ids)
        except LeaseholdError as error:
            span.end(str(error))
            raise
        span.end()
        self.refused.discard(who.pod.uid)
        told = entry.allocation
        self.outbox.add(ShareActivated(node=self.node, allocation=told, trace=span.context))
        self.views.show_allocated(lease, self._done(lease))
        return entry.setup

    async def _settle(
        self,
        lease: Lease,
        who: ContainerCandidate,
        resource: str,
        device_ids: Sequence[str],
        ids: tuple[str, ...],
    ) -> CheckpointEntry:
        instances = await self.instances.instance_uuids(lease, who.container.name)
        setup = grant(
            lease,
            who,
            self._known_node(),
            resource=resource,
            device_ids=device_ids,
            honoured=self.record.fences,
            reusable=self._of_init_containers(lease.pod, resource),
            instances=instances,
        )
        await self.preparing.prepare(setup)
        await self.cdi.ensure_named(setup)
        activation = Allocation(
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            container=who.container.name,
            resource=resource,
            device_ids=ids,
            lease=lease,
            activated_at=self.clock.now(),
        )
        entry = CheckpointEntry(
            allocation=activation,
            setup=setup,
            init=who.container.init,
            instances=tuple(instances.values()),
        )
        await self.record.save(entry)
        return entry

    def _done(self, lease: Lease) -> frozenset[str]:
        containers = {share.container for share in lease.shares}
        resources = self._known_node().served
        return frozenset(
            name
            for name in containers
            if any(self.record.find(lease.pod, name, resource) for resource in resources)
        )

    def _of_init_containers(self, pod: PodUid, resource: str) -> list[str]:
        return [
            text
            for entry in self.record.of_resource(resource)
            if entry.init and entry.allocation.pod == pod
            for text in entry.allocation.device_ids
        ]

    def _told(self, resource: str) -> Callable[[], AllocationHistory]:
        return lambda: self.record.allocation_history(resource, frozenset(self.refused))

    def _known_node(self) -> NodeSnapshot:
        if self.facts is None:
            raise UnavailableError("the node agent does not know its devices yet")
        return self.facts


def _place(entry: CheckpointEntry) -> tuple[str, str, str]:
    told = entry.allocation
    return told.namespace, told.name, told.container


def _shown(held: Holding) -> tuple[str, str, str]:
    return held.namespace, held.name, held.container


def _holds(held: Holding, resource: str, ids: tuple[str, ...]) -> bool:
    return held.resource == resource and compact(held.device_ids) == ids

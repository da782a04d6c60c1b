"""Reports the outcome of each Allocate on the bus and in the pod's annotations."""

import asyncio
from collections import deque
from collections.abc import Set
from typing import Protocol

from services.node_agent.allocate.pod_resolution import Ambiguous, ContainerCandidate
from services.node_agent.records.known_leases import KnownLeases
from shared.model.events.node_events import Allocation, ShareActivated, ShareRefused
from shared.model.lease import Lease
from shared.model.names import NodeName, PodUid

MAX_EVENTS = 4096

AllocationEvent = ShareActivated | ShareRefused


class PodViews(Protocol):
    """Annotations of pods that other programs read."""

    def show_allocated(self, lease: Lease, containers: frozenset[str]) -> None:
        """Show that these containers of the pod have their devices."""
        ...

    def show_failed(self, lease: Lease) -> None:
        """Show that the pod was refused."""
        ...


class Outbox:
    """Events to be published once the bus is connected.

    Beyond `MAX_EVENTS` the oldest are dropped; device reports contain the same allocations.
    """

    def __init__(self) -> None:
        self._events: deque[AllocationEvent] = deque(maxlen=MAX_EVENTS)
        self._added = asyncio.Event()

    def add(self, event: AllocationEvent) -> None:
        """Add an event."""
        self._events.append(event)
        self._added.set()

    async def take(self) -> list[AllocationEvent]:
        """Wait for events and take them all."""
        await self._added.wait()
        self._added.clear()
        events = list(self._events)
        self._events.clear()
        return events


class AllocationReporter:
    """Outcomes of Allocate on one node."""

    def __init__(self, node: NodeName, *, leases: KnownLeases, views: PodViews) -> None:
        self.node = node
        self.leases = leases
        self.views = views
        self.outbox = Outbox()
        self.refused: set[PodUid] = set()
        """Pods that were refused and got nothing since; the kubelet fails them."""

    def report_activated(
        self, allocation: Allocation, *, containers: frozenset[str], trace: str
    ) -> None:
        """Report that a container has its devices; `containers` are all of its pod that do."""
        self.refused.discard(allocation.pod)
        self.outbox.add(ShareActivated(node=self.node, allocation=allocation, trace=trace))
        self.views.show_allocated(allocation.lease, containers)

    def report_refused(self, candidate: ContainerCandidate, reason: str) -> None:
        """Report that a container was refused."""
        pod = candidate.pod
        self.refused.add(pod.uid)
        self.outbox.add(
            ShareRefused(
                node=self.node,
                reason=reason,
                pod=pod.uid,
                namespace=pod.namespace,
                name=pod.name,
                container=candidate.container.name,
            )
        )
        lease = self.leases.find(pod.uid)
        if lease is not None:
            self.views.show_failed(lease)

    def report_ambiguous(self, resource: str, ambiguous: Ambiguous) -> None:
        """Report that a call was refused because its container could not be resolved."""
        self.outbox.add(ShareRefused(node=self.node, reason=f"{resource}: {ambiguous}"))

    def retain_refused(self, pods: Set[PodUid]) -> None:
        """Forget refused pods other than these."""
        self.refused &= pods

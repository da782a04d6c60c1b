"""Updates of the ledger: inventory, activations, and leases that end with their pods."""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from services.binder.ledger_sync.vanished_pods import VanishedPods
from services.binder.ports.ledger import LeaseLedger
from services.binder.ports.reports import BinderMetrics
from services.binder.report.explanations import summarize
from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.node_events import DeviceReported, ShareActivated, ShareRefused
from shared.model.events.pod_events import BindingFailed, LeaseChanged, NodeChanged, PodTerminated
from shared.model.lease import Lease, LeaseState
from shared.model.names import NodeName, PodUid

logger = logging.getLogger(__name__)

TERMINAL = frozenset({"Succeeded", "Failed"})


class LedgerUpdater:
    """Writes facts into the ledger; several binders may do so at once."""

    def __init__(
        self, ledger: LeaseLedger, vanished_pods: VanishedPods, metrics: BinderMetrics
    ) -> None:
        self.ledger = ledger
        self.vanished_pods = vanished_pods
        self.metrics = metrics
        self._activated: dict[NodeName, frozenset[PodUid]] = {}

    async def save_nodes(self, events: Sequence[NodeChanged]) -> None:
        """Save the newest facts of each node, or remove it."""
        newest: dict[NodeName, NodeChanged] = {}
        for event in events:
            known = newest.get(event.node.name)
            if known is None or known.observed_at <= event.observed_at:
                newest[event.node.name] = event
        for name, event in newest.items():
            if event.deleted:
                await self.ledger.remove_node(name)
                self._activated.pop(name, None)
            else:
                await self.ledger.save_node(event.node, seen_at=event.observed_at)

    async def save_devices(self, events: Sequence[DeviceReported]) -> None:
        """Save each node's newest report, and activate the leases that it lists as active."""
        newest: dict[NodeName, DeviceReported] = {}
        for event in events:
            known = newest.get(event.node)
            if known is None or known.reported_at <= event.reported_at:
                newest[event.node] = event
        for event in newest.values():
            await self.ledger.save_devices(event)
        await self._activate_reported(newest.values())

    async def activate(self, events: Sequence[ShareActivated]) -> None:
        """Record that the kubelet has these pods' devices."""
        pods = sorted({event.allocation.pod for event in events})
        self._report_unleased(pods, await self.ledger.activate(pods))

    async def end_refused(self, events: Sequence[ShareRefused]) -> list[Lease]:
        """End the leases of pods that their node refused before any container started."""
        nodes = {event.pod: event.node for event in events if event.pod is not None}
        leases = [
            lease
            for lease in (await self.ledger.load(sorted(nodes)) if nodes else [])
            if lease is not None
            and lease.state is not LeaseState.ACTIVE
            and lease.node == nodes[lease.pod]
        ]
        return await self.release_unmoved(leases, reason="its node refused the pod")

    async def end_terminated(self, events: Sequence[PodTerminated]) -> list[LeaseChanged]:
        """End the leases of pods that are gone; ask the node agent where one may still run."""
        phases = {event.pod: event.phase for event in events}
        await self.ledger.waiting_pods.remove(list(phases))
        terminal = [pod for pod, phase in phases.items() if phase in TERMINAL]
        ended = []
        if terminal:
            ended += await self.ledger.release(terminal, reason="the pod has terminated")
        self.vanished_pods.remove(terminal)
        vanished = [pod for pod, phase in phases.items() if phase not in TERMINAL]
        ended += await self._end_vanished(vanished)
        return lease_changes(ended)

    async def end_confirmed(self) -> list[LeaseChanged]:
        """End the leases of vanished pods whose node agents confirm that nothing runs any more."""
        leases = await self.vanished_pods.find_terminated()
        if not leases:
            return []
        pods = [lease.pod for lease in leases]
        ended = await self.ledger.release(pods, reason="the pod was deleted and has terminated")
        self.vanished_pods.remove(pods)
        return lease_changes(ended)

    def reset(self) -> None:
        """Forget which activations were recorded: the ledger is a new one."""
        self._activated.clear()

    async def release_unmoved(self, leases: Sequence[Lease], *, reason: str) -> list[Lease]:
        """End leases as they were read. Raises ConflictError if one of them has moved on since."""
        ended = await asyncio.gather(
            *(
                self.ledger.release([lease.pod], reason=reason, version=lease.version)
                for lease in leases
            )
        )
        released = [lease for batch in ended for lease in batch]
        if len(released) < len(leases):
            others = {lease.pod for lease in leases} - {lease.pod for lease in released}
            if any(await self.ledger.load(sorted(others))):
                raise ConflictError(f"{len(others)} leases moved on while they were being ended")
        return released

    async def _end_vanished(self, pods: Sequence[PodUid]) -> list[Lease]:
        if not pods:
            return []
        reserved: list[Lease] = []
        for lease in await self.ledger.load(pods):
            if lease is None:
                continue
            if lease.state is LeaseState.RESERVED:
                reserved.append(lease)
            else:  # the kubelet may have the devices, and the report of it may be on its way
                self.vanished_pods.add(lease)
        return await self.release_unmoved(
            reserved, reason="the pod was deleted before it was bound"
        )

    async def _activate_reported(self, reports: Iterable[DeviceReported]) -> None:
        """Activate the leases that agents report as active, whenever that set has changed."""
        new: list[PodUid] = []
        current: dict[NodeName, frozenset[PodUid]] = {}
        for report in reports:
            active = frozenset(allocation.pod for allocation in report.allocations)
            current[report.node] = active
            new += active - self._activated.get(report.node, frozenset())
        if not new:
            self._activated.update(current)
            return
        try:
            leases = await self.ledger.activate(new)
        except UnavailableError:  # the ledger is being rebuilt, which collects all reports again
            return
        self._activated.update(current)
        self._report_unleased(new, leases)

    def _report_unleased(self, pods: Sequence[PodUid], leases: Sequence[Lease | None]) -> None:
        unleased = [
            f"pod {pod} is active without a lease"
            for pod, lease in zip(pods, leases, strict=True)
            if lease is None
        ]
        if unleased:
            self.metrics.count_anomaly("active_without_lease", len(unleased))
            logger.warning("%s", summarize(unleased))


def lease_changes(leases: Iterable[Lease]) -> list[LeaseChanged]:
    """Return the events by which node agents learn of leases that ended."""
    return [LeaseChanged(lease=lease) for lease in leases]


def binding_failed(lease: Lease, reason: str, trace: str) -> BindingFailed:
    """Return the event for a pod that will not be bound with this lease."""
    return BindingFailed(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        reason=reason,
        trace=trace,
    )

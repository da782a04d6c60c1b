"""Keeping the ledger in step: inventory in, allocations noted, leases ended with their pods."""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from services.binder.ledger_sync.vanished_pods import VanishedPods
from services.binder.ports.ledger import Ledger
from services.binder.ports.metrics import Tally
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

    def __init__(self, ledger: Ledger, vanished_pods: VanishedPods, tally: Tally) -> None:
        self.ledger = ledger
        self.vanished_pods = vanished_pods
        self.tally = tally
        self._activated: dict[NodeName, frozenset[PodUid]] = {}

    async def save_nodes(self, events: Sequence[NodeChanged]) -> None:
        """Save the newest facts of each node, or take it out."""
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
        """Save each node's newest report, and activate what its agent says it has activated."""
        newest: dict[NodeName, DeviceReported] = {}
        for event in events:
            known = newest.get(event.node)
            if known is None or known.reported_at <= event.reported_at:
                newest[event.node] = event
        for event in newest.values():
            await self.ledger.save_devices(event)
        await self._repair(newest.values())

    async def activate(self, events: Sequence[ShareActivated]) -> None:
        """Record what the kubelet was told."""
        pods = sorted({event.allocation.pod for event in events})
        self._report_unleased(pods, await self.ledger.activate(pods))

    async def end_refused(self, events: Sequence[ShareRefused]) -> list[Lease]:
        """End the leases of pods that their node refused before any container of them started."""
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
        """End the leases of pods that are gone; where one may still run, start asking its agent."""
        phases = {event.pod: event.phase for event in events}
        await self.ledger.waiting_pods.remove(list(phases))
        over = [pod for pod, phase in phases.items() if phase in TERMINAL]
        ended = await self.ledger.release(over, reason="the pod is over") if over else []
        self.vanished_pods.settle(over)
        vanished = [pod for pod, phase in phases.items() if phase not in TERMINAL]
        ended += await self._end_vanished(vanished)
        return lease_changes(ended)

    async def end_confirmed(self) -> list[LeaseChanged]:
        """End the leases whose agents say, by now, that nothing of the pod runs any more."""
        leases = await self.vanished_pods.ask()
        if not leases:
            return []
        pods = [lease.pod for lease in leases]
        ended = await self.ledger.release(pods, reason="the pod was deleted and has ended")
        self.vanished_pods.settle(pods)
        return lease_changes(ended)

    def forget(self) -> None:
        """Forget what was already noted: the ledger is a new one."""
        self._activated.clear()

    async def _end_vanished(self, pods: Sequence[PodUid]) -> list[Lease]:
        if not pods:
            return []
        ending: list[Lease] = []
        for lease in await self.ledger.load(pods):
            if lease is None:
                continue
            if lease.state is LeaseState.RESERVED:
                ending.append(lease)
            else:  # the kubelet may have been told, and the word of it may be on its way
                self.vanished_pods.add(lease)
        return await self.release_unmoved(ending, reason="the pod was deleted before it was bound")

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
            left = {lease.pod for lease in leases} - {lease.pod for lease in released}
            now = await self.ledger.load(sorted(left))
            if any(now):
                raise ConflictError(f"{len(left)} leases moved on while they were being ended")
        return released

    async def _repair(self, reports: Iterable[DeviceReported]) -> None:
        """Activate what agents say is active, whenever that set has changed."""
        news: list[PodUid] = []
        current: dict[NodeName, frozenset[PodUid]] = {}
        for report in reports:
            active = frozenset(each.pod for each in report.allocations)
            known = self._activated.get(report.node, frozenset())
            current[report.node] = active
            news += active - known
        if not news:
            self._activated.update(current)
            return
        try:
            found = await self.ledger.activate(news)
        except UnavailableError:  # the ledger is being rebuilt, and will ask agents itself
            return
        self._activated.update(current)
        self._report_unleased(news, found)

    def _report_unleased(self, activated: Sequence[PodUid], found: Sequence[Lease | None]) -> None:
        missing = [
            f"pod {pod} is active without a lease"
            for pod, lease in zip(activated, found, strict=True)
            if lease is None
        ]
        if missing:
            self.tally.count("active_without_lease", len(missing))
            logger.warning("%s", summarize(missing))


def lease_changes(leases: Iterable[Lease]) -> list[LeaseChanged]:
    """Return what the nodes' agents are to hear of leases that ended."""
    return [LeaseChanged(lease=lease) for lease in leases]


def binding_failed(lease: Lease, reason: str, trace: str) -> BindingFailed:
    """Return what is said of a pod that will not be bound with this lease."""
    return BindingFailed(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        reason=reason,
        trace=trace,
    )

"""Updates of the ledger: inventory, activations, and leases that end with their pods."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from services.binder.clients import NodeAgentClient
from services.binder.ledger_sync.agent_reports import LostAllocations, LostLeases, release_as_read
from services.binder.ledger_sync.recovery import copy_for, is_resized, places_of, sizes_of, slots_of
from services.binder.ledger_sync.unread_devices import with_unread
from services.binder.metrics import count_anomaly
from services.binder.report.event_writer import EventRecorder
from services.binder.report.explanations import shared_device_event, summarize
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock, ExpiringMap
from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.node_events import Allocation, DeviceReported, ShareActivated, ShareRefused
from shared.model.events.pod_events import (
    BindingFailed,
    LeaseChanged,
    NodeChanged,
    PodTerminated,
    QuotasUpdated,
    lease_changes,
)
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.claim import CLAIM_ENDED
from shared.pods.observed_pod import TERMINAL
from shared.pods.pod_snapshot import generation_of
from shared.runtime.service import handles, loops

logger = logging.getLogger(__name__)

SILENCE_S = 25.0
"""An agent that has not replied for this long counts as dead, and its pods as terminated."""
MIN_MISSED_REPLIES = 10
"""A suspended binder received no replies either."""
MAX_REQUESTS = 64
PODS_PER_REQUEST = 1000
SHARED_AGAIN_S = 3600.0
"""A device that two nodes report is reported again after this time."""
MOST_SHARED = 4096
_Held = tuple[PodUid, int, float]
"""A pod, and the version and last resize of its lease."""
GANG_ENDED = "a reservation of its gang ended before any of its pods was bound"


@dataclass(slots=True)
class VanishedPod:
    lease: Lease
    silent_since: float | None = None
    """In the ledger: no restart begins it anew."""
    missed_replies: int = 0


@dataclass(eq=False)
class VanishedPods:
    """Leases of pods that were deleted by force, and may still run.

    A node whose agent stays silent counts as gone.
    """

    ledger: RedisLeases
    agents: NodeAgentClient
    clock: Clock

    def __post_init__(self) -> None:
        self._pods: dict[PodUid, VanishedPod] = {}
        self._requests = asyncio.Semaphore(MAX_REQUESTS)

    @loops(every_s=1.0)
    async def end_vanished(self) -> list[LeaseChanged]:
        status = await self.ledger.status(now=self.clock.ticks())
        if status is None:
            return []
        pods = await self.ledger.list_vanished() if status.vanished else {}
        await self._load_leases(pods)
        terminated = await self._find_terminated(pods)
        await self.ledger.save_silence(self._changed(silent=True), self.clock.now())
        await self.ledger.save_silence(self._changed(silent=False), None)
        return lease_changes(await self._end(terminated) if terminated else [])

    def _changed(self, *, silent: bool) -> list[PodUid]:
        return [
            pod
            for pod, vanished in self._pods.items()
            if bool(vanished.missed_replies) is silent and (vanished.silent_since is None) is silent
        ]

    async def _load_leases(self, pods: Collection[PodUid]) -> None:
        """Read the lease of each pod once: there may be thousands while a zone is down."""
        new = [pod for pod in pods if pod not in self._pods]
        loaded = await self.ledger.load(new) if new else []
        live = (lease for lease in loaded if lease and lease.state is not LeaseState.RESERVED)
        before = {pod: self._pods[pod] for pod in pods if pod in self._pods}
        self._pods = before | {lease.pod: VanishedPod(lease) for lease in live}

    async def _find_terminated(self, silent_since: Mapping[PodUid, float | None]) -> list[Lease]:
        by_node: dict[NodeName, list[VanishedPod]] = {}
        for pod in self._pods.values():
            since = silent_since[pod.lease.pod]
            was_set_back = since is not None and since > self.clock.now()
            pod.silent_since = None if was_set_back else since
            by_node.setdefault(pod.lease.node, []).append(pod)
        of_nodes = await asyncio.gather(
            *(
                self._terminated_on(node, pods[first : first + PODS_PER_REQUEST])
                for node, pods in by_node.items()
                for first in range(0, len(pods), PODS_PER_REQUEST)
            )
        )
        return [lease for leases in of_nodes for lease in leases]

    async def _terminated_on(self, node: NodeName, pods: Sequence[VanishedPod]) -> list[Lease]:
        async with self._requests:
            try:
                uids = [pod.lease.pod for pod in pods]
                terminated = await self.agents.list_terminated(node, uids)
            except UnavailableError:
                return [pod.lease for pod in pods if self._is_silent(pod)]
        for pod in pods:
            pod.missed_replies = 0
        return [pod.lease for pod in pods if pod.lease.pod in terminated]

    def _is_silent(self, pod: VanishedPod) -> bool:
        pod.missed_replies += 1
        if pod.silent_since is None or pod.missed_replies < MIN_MISSED_REPLIES:
            return False
        return self.clock.now() - pod.silent_since >= SILENCE_S

    async def _end(self, leases: Sequence[Lease]) -> list[Lease]:
        current = await self.ledger.load([lease.pod for lease in leases])
        nodes = {lease.pod: lease.node for lease in leases}
        ending = [lease for lease in current if lease and lease.node == nodes[lease.pod]]
        for pod in nodes.keys() - {lease.pod for lease in ending}:
            self._pods.pop(pod, None)
        pods = [lease.pod for lease in ending if lease.claim is None]
        ended = await self.ledger.release(pods, reason="the pod was deleted and has terminated")
        claims = [lease for lease in ending if lease.claim]  # whose uids may have others by now
        return [*ended, *await release_as_read(self.ledger, claims, reason=CLAIM_ENDED)]


@dataclass(eq=False)
class LedgerUpdater:
    ledger: RedisLeases
    lost_leases: LostLeases
    events: EventRecorder
    clock: Clock

    def __post_init__(self) -> None:
        self._activated: dict[NodeName, frozenset[_Held]] = {}
        """By the ledger of `_generation`: no lease ends while its pod's containers run, so these
        are compared once."""
        self._generation = ""
        self._shared_devices: ExpiringMap[DeviceUuid, tuple[NodeName, NodeName]] = ExpiringMap(
            self.clock.ticks, expires_s=SHARED_AGAIN_S, most=MOST_SHARED
        )
        """Devices that two nodes reported, as logged."""

    @handles
    async def save_nodes(self, events: Sequence[NodeChanged]) -> None:
        newest: dict[NodeName, NodeChanged] = {}
        for event in events:
            newer = newest.get(event.node.name)
            if newer is None or not event.revision.node or newer.revision <= event.revision:
                newest[event.node.name] = event
        present = [event for event in newest.values() if not event.deleted]
        await self.ledger.save_nodes(
            [event.node for event in present], [event.revision for event in present]
        )
        for name, event in newest.items():
            if event.deleted:
                await self.ledger.remove_node(name, revision=event.revision)
                self._activated.pop(name, None)

    @handles
    async def save_quotas(self, events: Sequence[QuotasUpdated]) -> None:
        newest = max(events, key=lambda event: event.read_at)
        await self.ledger.quotas.save(newest.quotas, read_at=newest.read_at)
        self.ledger.freed.set()

    async def list_leases(self, node: NodeName, pods: Sequence[PodUid]) -> tuple[Lease, ...]:
        """Without `pods`, return all leases of the node."""
        if not pods:
            return tuple(await self.ledger.load_node(node))
        leases = await self.ledger.load(pods)
        return tuple(lease for lease in leases if lease and lease.node == node)

    async def save_devices(self, events: Sequence[DeviceReported]) -> dict[NodeName, str]:
        """Save each node's newest report, and activate the leases that it lists as active.

        Returns nodes whose agents report what they cannot have, with why.
        """
        newest = {
            report.node: report for report in sorted(events, key=lambda report: report.reported_at)
        }
        await self._add_unread(newest)
        shared = await self.ledger.save_devices(list(newest.values())) or {}
        for device, (node, owner) in shared.items():
            self._report_shared(device, node, owner)
        return await self._activate_reported(newest.values())

    async def _add_unread(self, reports: dict[NodeName, DeviceReported]) -> None:
        incomplete = [report for report in reports.values() if report.unread]
        if incomplete:
            stored = await self.ledger.devices_of([report.node for report in incomplete])
            for report in incomplete:
                reports[report.node] = with_unread(report, stored.get(report.node, ()))

    async def activate(self, events: Sequence[ShareActivated]) -> dict[NodeName, str]:
        """Returns nodes as `save_devices` does."""
        return (await self._activate([event.allocation for event in events])).refused

    async def end_refused(self, events: Sequence[ShareRefused]) -> list[Lease]:
        """A later lease of a claim stays."""
        refused = {event.pod: event for event in events if event.pod is not None}
        leases = [
            lease
            for lease in (await self.ledger.load(sorted(refused)) if refused else [])
            if lease is not None
            and lease.state is not LeaseState.ACTIVE
            and lease.node == refused[lease.pod].node
            and refused[lease.pod].version in {None, lease.version}
        ]
        return await self.release_unmoved(leases, reason="its node refused the pod")

    async def end_terminated(
        self, events: Sequence[PodTerminated]
    ) -> list[LeaseChanged | BindingFailed]:
        """End the leases of pods that are gone; query the node agent where one may still run.

        Other pods of their gangs that lose reservations are placed again.
        """
        phases = {event.pod: event.phase for event in events}
        terminal = [pod for pod, phase in phases.items() if phase in TERMINAL]
        _, ended = await asyncio.gather(  # in either order: both wait for the disk, so together
            self.ledger.waiting_pods.remove(list(phases)),
            self.ledger.release(terminal, reason="the pod has terminated"),
        )
        vanished = [pod for pod, phase in phases.items() if phase not in TERMINAL]
        ended += await self._end_vanished(vanished)
        released = [lease for lease in ended if lease.pod not in phases]
        failures = [binding_failed(lease, GANG_ENDED, lease.trace) for lease in released]
        return [*lease_changes(ended), *failures]

    async def release_unmoved(self, leases: Sequence[Lease], *, reason: str) -> list[Lease]:
        """End leases as they were read, and return all that ended with them.

        Raises ConflictError if a lease has moved on since.
        """
        released = await release_as_read(self.ledger, leases, reason=reason)
        others = {lease.pod for lease in leases} - {lease.pod for lease in released}
        if others and any(await self.ledger.load(sorted(others))):
            raise ConflictError(f"{len(others)} leases moved on while they were being ended")
        return released

    async def _end_vanished(self, pods: Sequence[PodUid]) -> list[Lease]:
        if not pods:
            return []
        leases = await self.ledger.load(pods)
        # In any other state the kubelet may have the devices: `end_confirmed` ends the lease.
        reserved = [lease for lease in leases if lease and lease.state is LeaseState.RESERVED]
        return await self.release_unmoved(
            reserved, reason="the pod was deleted before it was bound"
        )

    def _report_shared(self, device: DeviceUuid, node: NodeName, owner: NodeName) -> None:
        if self._shared_devices.get(device) == (node, owner):
            return
        self._shared_devices.set(device, (node, owner))
        self.events.record(shared_device_event(node, device, owner))
        count_anomaly("devices_on_two_nodes")
        logger.error(
            "device %s is reported by nodes %s: the one that has it keeps it until it does not "
            "report it any more, or its Node is deleted",
            device,
            " and ".join(sorted({node, owner})),
        )

    async def _activate_reported(self, reports: Iterable[DeviceReported]) -> dict[NodeName, str]:
        """Activate the leases that agents report, whenever that set has changed.

        Returns nodes as `save_devices` does.
        """
        status = await self.ledger.status(now=self.clock.ticks())
        if status is None:  # the ledger is being rebuilt, which collects all reports again
            return {}
        if status.generation != self._generation:
            self._activated.clear()
            self._generation = status.generation
        new: list[Allocation] = []
        current: dict[NodeName, frozenset[_Held]] = {}
        for report in reports:
            current[report.node] = frozenset(map(_held, report.allocations))
            before = self._activated.get(report.node, frozenset())
            new += [
                allocation for allocation in report.allocations if _held(allocation) not in before
            ]
        try:
            outcome = await self._activate(new) if new else LostAllocations()
        except UnavailableError:
            return {}
        for node, held in current.items():
            self._activated[node] = frozenset(
                entry for entry in held if entry[0] not in outcome.again
            )
        return outcome.refused

    async def _activate(self, allocations: Sequence[Allocation]) -> LostAllocations:
        """Activate leases on the nodes of their agents; restore those that are missing.

        Agents report pods that have ended for up to 10 s: that is no anomaly.
        """
        used = _newest(allocation.lease for allocation in allocations)
        activated = dict(zip(used, await self.ledger.activate(list(used)), strict=True))
        outcome, replaced = await self._compare(
            [(stored, used[key]) for key, stored in activated.items() if stored is not None]
        )
        missing = [
            used[key] for key, lease in activated.items() if not lease or lease.pod in replaced
        ]
        if missing:
            outcome.add(await self._restore(missing))
        return outcome

    async def _restore(self, missing: Sequence[Lease]) -> LostAllocations:
        gone = await self.ledger.waiting_pods.list_gone(sorted({lease.pod for lease in missing}))
        lost = [lease for lease in missing if lease.pod not in gone]
        if lost:
            count_anomaly("active_without_lease", len(lost))
            texts = [f"pod {lease.pod} is active without a lease" for lease in lost]
            logger.warning("%s", summarize(texts))
        return await self.lost_leases.restore(lost)

    async def _compare(
        self, pairs: Sequence[tuple[Lease, Lease]]
    ) -> tuple[LostAllocations, set[PodUid]]:
        """Compare stored leases with those that agents use; return pods whose lease has ended.

        An agent with a size from before a resize follows the lease. Otherwise the pod's copy
        decides: a rebuild that missed a Binding in flight gives a lease of other slots, and a
        rollback one of an earlier size.
        """
        outcome = LostAllocations()
        replaced = list[Lease]()
        outdated = list[Lease]()
        differing = [pair for pair in pairs if _differ(*pair)]
        copies = await self.lost_leases.read_copies([stored for stored, _ in differing])
        for (stored, used), text in zip(differing, copies, strict=True):
            copy = copy_for(stored, text or "")
            if text is None:
                outcome.again.add(stored.pod)
            elif copy is not None and _supersedes(copy, stored, used):
                replaced.append(stored)
            elif slots_of(stored) == slots_of(used):
                outdated.append(structs.replace(stored, version=used.version + 1))
            else:
                outcome.again.add(stored.pod)
                outcome.refused[stored.node] = (
                    f"pod {stored.pod} uses other devices or shares than those of its lease"
                )
        await self._restore_sizes(pairs, outdated)
        await self.release_unmoved(replaced, reason="its pod uses devices of an earlier lease")
        return outcome, {lease.pod for lease in replaced}

    async def _restore_sizes(
        self, pairs: Iterable[tuple[Lease, Lease]], outdated: list[Lease]
    ) -> None:
        if outdated:  # their agents follow newer leases only
            await self.ledger.restore(outdated, now=self.clock.now())
        unsynced = [*outdated, *(stored for stored, used in pairs if _is_late(used, stored))]
        if unsynced:
            await self.ledger.resizes.set_unsynced(unsynced)


def _newest(leases: Iterable[Lease]) -> dict[tuple[PodUid, NodeName], Lease]:
    by_version = sorted(leases, key=lambda lease: lease.version)
    return {(lease.pod, lease.node): lease for lease in by_version}


def _held(allocation: Allocation) -> _Held:
    return allocation.pod, allocation.lease.version, allocation.lease.resized_at


def _differ(stored: Lease, used: Lease) -> bool:
    return generation_of(stored) == generation_of(used) and (
        slots_of(stored) != slots_of(used) or is_resized(stored, used)
    )


def _is_late(used: Lease, stored: Lease) -> bool:
    """Return whether an agent has a size from before a resize."""
    is_same = generation_of(used) == generation_of(stored) and slots_of(used) == slots_of(stored)
    is_resized_since = stored.resized_at > used.resized_at
    return is_same and is_resized_since and sizes_of(stored.shares) != sizes_of(used.shares)


def _supersedes(copy: Lease, stored: Lease, used: Lease) -> bool:
    if places_of(copy) != places_of(used):
        return False
    return slots_of(stored) != slots_of(used) or is_resized(stored, copy)


def binding_failed(lease: Lease, reason: str, trace: str) -> BindingFailed:
    return BindingFailed(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        reason=reason,
        trace=trace,
    )

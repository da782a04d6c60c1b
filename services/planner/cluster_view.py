"""What plans are made from: a mirror of the ledger's nodes and leases, and the cluster's pods."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from services.planner.claim_requests import CLASSES, ClaimDemand, demand_of
from services.planner.plan import ClusterSnapshot, has_claims_alone
from shared.kubernetes.claim_specs import ClaimWithSpec, ClassWithSpec
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock, ExpiringMap
from shared.model.errors import RequestError
from shared.model.events.pod_events import PodQueued
from shared.model.leases.lease import LeaseState
from shared.model.leases.ledger import LedgerChange, LedgerNode, NodeTotals, WaitingPod
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.placing.starts import WaitingClaim
from shared.pods.pod_snapshot import DisruptionBudget, PodSnapshot
from shared.runtime.service import loops

logger = logging.getLogger(__name__)

BOUND_LOOK_S = 5.0
"""Interval of looks whether bound leases have become active: plans of starts need to know within
seconds since when a pod runs."""
MOST_UNSEEN = 64
"""The watch has the other waiting pods by the next snapshot."""
CLAIM_S = 120.0
"""A waiting pod's ResourceClaim is read again after this time: its spec never changes."""
UNREADY_S = 2.0
"""The same for one that is not there yet, or is allocated."""
CLASS_S = 15.0
"""The same for DeviceClasses, which administrators may change."""
UNLISTED_S = 60.0
"""For so long, no plan for a ResourceClaim has a node that had no ResourceSlices."""
MOST_UNLISTED = 1_024
MOST_CLAIMING = 16_384


class PodReader(Protocol):
    async def get(self, namespace: str, name: str) -> PodSnapshot | None: ...

    async def list_pods(self) -> tuple[dict[PodUid, PodSnapshot], list[DisruptionBudget]]:
        """The pods of a watch may lack one that was just created."""
        ...

    async def follow_pods(self) -> None: ...

    async def get_claim(self, namespace: str, name: str) -> ClaimWithSpec | None: ...

    async def get_class(self, name: str) -> ClassWithSpec | None: ...

    async def has_slices(self, node: NodeName) -> bool:
        """Return whether the node's agent lists its devices for ResourceClaims."""
        ...


def usable_devices(node: LedgerNode) -> set[DeviceUuid]:
    """Return the devices that may get leases, free or not."""
    if node.facts.unschedulable:
        return set()
    excluded = node.facts.excluded_devices
    return {
        device.uuid for device, _ in node.devices if device.healthy and device.index not in excluded
    }


@dataclass(eq=False)
class LeaseMirror:
    """The ledger's nodes with their leases: only what has changed is read again.

    The feed has no change to bound or active: a node is read at each call while it has a reserved
    lease, and every `BOUND_LOOK_S` while it has a bound one.
    """

    ledger: RedisLeases
    clock: Clock

    def __post_init__(self) -> None:
        self._totals: dict[NodeName, NodeTotals] = {}
        self._node_of: dict[DeviceUuid, NodeName] = {}
        self._stale: set[NodeName] = set()
        self._reserved: set[NodeName] = set()
        self._bound: set[NodeName] = set()
        self._bound_look_at = -inf
        self._follows = False
        self._reading = asyncio.Lock()
        self.awaited = frozenset[NodeName]()
        """Nodes on which plans wait for the end of leases."""
        self.has_awaited_change = asyncio.Event()
        self._usable: dict[NodeName, set[DeviceUuid]] = {}
        self.openings = 0
        """How often devices have become usable."""

    @loops
    async def follow_ledger(self) -> None:
        snapshot = await self.ledger.snapshot()
        self._stale.update(self._totals, (node.facts.name for node in snapshot.nodes))
        self._note_usable(snapshot.nodes)
        self._follows = True
        try:
            async for changes in self.ledger.changes(snapshot.position):
                for change in changes:
                    self._note_usable(change.nodes, change.removed)
                    names = self._nodes_of(change)
                    self._stale |= names
                    if not self.awaited.isdisjoint(names):
                        self.has_awaited_change.set()
        finally:
            self._follows = False

    def _note_usable(self, nodes: Iterable[LedgerNode], removed: Iterable[NodeName] = ()) -> None:
        for name in removed:
            self._usable.pop(name, None)
        for node in nodes:
            usable = usable_devices(node)
            self.openings += not usable <= self._usable.get(node.facts.name, set())
            self._usable[node.facts.name] = usable

    def _nodes_of(self, change: LedgerChange) -> set[NodeName]:
        return {
            *(node.facts.name for node in change.nodes),
            *change.removed,
            *change.used,
            *(self._node_of[uuid] for uuid in change.devices if uuid in self._node_of),
        }

    def note_changed(self, names: Iterable[NodeName]) -> None:
        """Read these nodes again, even before the feed shows the change."""
        self._stale.update(names)

    async def nodes(self) -> list[NodeTotals]:
        """Without the feed, read everything: no plan is made from an old state."""
        async with self._reading:
            if not self._follows:
                pages = [page async for page in self.ledger.totals.pages()]
                self._totals = {}
                self._reserved = set()
                self._bound = set()
                self._put(totals for page in pages for totals in page)
            elif names := sorted(self._due()):
                self._stale.clear()
                try:
                    read = await self.ledger.totals.of_nodes(names)
                except BaseException:
                    self._stale.update(names)
                    raise
                for name in names:
                    self._totals.pop(name, None)
                self._reserved.difference_update(names)
                self._bound.difference_update(names)
                self._put(read)
            return [self._totals[name] for name in sorted(self._totals)]

    def _due(self) -> set[NodeName]:
        now = self.clock.ticks()
        if now < self._bound_look_at + BOUND_LOOK_S:
            return self._stale | self._reserved
        self._bound_look_at = now
        return self._stale | self._reserved | self._bound

    def _put(self, read: Iterable[NodeTotals]) -> None:
        for totals in read:
            name = totals.node.facts.name
            self._totals[name] = totals
            states = {lease.state for lease in totals.leases}
            if LeaseState.RESERVED in states:
                self._reserved.add(name)
            elif LeaseState.BOUND in states:
                self._bound.add(name)
            self._node_of |= {device.uuid: name for device, _ in totals.node.devices}


@dataclass(eq=False)
class ClusterView:
    mirror: LeaseMirror
    pods: PodReader

    def __post_init__(self) -> None:
        ticks = self.mirror.clock.ticks
        self._demands: ExpiringMap[PodUid, ClaimDemand | None] = ExpiringMap(
            ticks, expires_s=CLAIM_S, most=MOST_CLAIMING
        )
        """None of pods for which no plan can be made."""
        self._unready_since: ExpiringMap[PodUid, float] = ExpiringMap(
            ticks, expires_s=CLAIM_S, most=MOST_CLAIMING
        )
        """When pods were read last whose claim was missing, or allocated."""
        self._classes: ExpiringMap[str, ClassWithSpec | None] = ExpiringMap(
            ticks, expires_s=CLASS_S, most=len(CLASSES)
        )
        self._unlisted: ExpiringMap[NodeName, NodeName] = ExpiringMap(
            ticks, expires_s=UNLISTED_S, most=MOST_UNLISTED
        )
        self._logged = ""

    @loops
    async def follow_pods(self) -> None:
        await self.pods.follow_pods()

    async def snapshot(self, waiting: Iterable[WaitingPod] = ()) -> ClusterSnapshot:
        pods, disruption_budgets = await self.pods.list_pods()
        unseen = [pod.queued for pod in waiting if pod.queued.pod not in pods][:MOST_UNSEEN]
        read = await asyncio.gather(*(self.pods.get(pod.namespace, pod.name) for pod in unseen))
        pods |= {pod.pod: pod for pod in read if pod is not None}
        return ClusterSnapshot(await self.mirror.nodes(), pods, disruption_budgets)

    async def claim_demands(self, waiting: Iterable[WaitingPod]) -> dict[PodUid, ClaimDemand]:
        claiming = [pod.queued for pod in waiting if has_claims_alone(pod.queued)]
        now = self.mirror.clock.ticks()
        unread = [
            (since, queued)
            for queued in claiming
            if queued.pod not in self._demands
            and now >= (since := self._unready_since.get(queued.pod) or -inf) + UNREADY_S
        ]
        unread.sort(key=lambda entry: entry[0])  # those that were not read for longest come first
        first = _in_turn([queued for _, queued in unread])[:MOST_UNSEEN]
        await asyncio.gather(*map(self._read_demand, first))
        demands = {queued.pod: self._demands.get(queued.pod) for queued in claiming}
        unlisted = tuple(sorted(self._unlisted.values()))
        return {
            pod: demand._replace(unlisted=unlisted)
            for pod, demand in demands.items()
            if demand is not None
        }

    async def may_be_allocated(self, claim: WaitingClaim, pod: PodQueued, node: NodeName) -> bool:
        """A node without ResourceSlices is spared by the next plans."""
        stored = await self.pods.get_claim(pod.namespace, claim.name)
        is_it = stored is not None and stored.metadata.uid == claim.claim
        if stored is None or not is_it or stored.status.allocation is not None:
            self._demands.pop(pod.pod)
            return False
        if not await self.pods.has_slices(node):
            self._unlisted.set(node, node)
            return False
        return True

    async def _read_demand(self, queued: PodQueued) -> None:
        try:
            pod = await self.pods.get(queued.namespace, queued.name)
            if pod is not None and len(pod.claims) > 1:
                self._demands.set(queued.pod, None)
                return
            claim = await self._read_claim(pod) if pod is not None else None
            if claim is not None and claim.status.allocation is None:
                self._demands.set(queued.pod, demand_of(claim, await self._read_classes()))
                return
        except RequestError as error:
            if self._logged != str(error):
                logger.warning("no pod is evicted for a ResourceClaim: %s", error)
                self._logged = str(error)
        self._unready_since.set(queued.pod, self.mirror.clock.ticks())

    async def _read_claim(self, pod: PodSnapshot) -> ClaimWithSpec | None:
        """Return None if the claim is not made from its template yet."""
        name = "".join(pod.claims)
        return await self.pods.get_claim(pod.namespace, name) if name else None

    async def _read_classes(self) -> dict[str, ClassWithSpec]:
        for name in CLASSES:
            if name not in self._classes:
                self._classes.set(name, await self.pods.get_class(name))
        classes = {name: self._classes.get(name) for name in CLASSES}
        return {name: read for name, read in classes.items() if read is not None}


def _in_turn(pods: Iterable[PodQueued]) -> list[PodQueued]:
    """Take turns of namespaces, so that many pods of one delay no other's."""
    numbers = Counter[Namespace]()
    in_turn = list[tuple[int, PodQueued]]()
    for pod in pods:
        in_turn.append((numbers[pod.namespace], pod))
        numbers[pod.namespace] += 1
    in_turn.sort(key=lambda entry: entry[0])
    return [pod for _, pod in in_turn]

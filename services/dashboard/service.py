"""The dashboard: hears copies of everything, reads from the ledger what changed, and tells pages.

The ledger's feed and the bus only say what to look at; what is shown is always read whole, so that
nothing depends on hearing everything once and in order. A slow sweep finds what nobody mentioned.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

from services.dashboard.change_feed import Hub
from services.dashboard.missing_components import Parts, Silent
from services.dashboard.projection import SILENT, Projection
from services.dashboard.recent_events import News
from shared.model.clock import Clock
from shared.model.events.node_events import ShareActivated, ShareRefused, ViolationFound
from shared.model.events.pod_events import (
    BindingFailed,
    BudgetChanged,
    Heartbeat,
    LeaseChanged,
    LeaseResized,
    PlacementChosen,
    PlacementRefused,
    PodBound,
    PodQueued,
    PodRejected,
    PodTerminated,
)
from shared.model.ledger import LedgerChange, NodeTotals, Snapshot, WaitingPod
from shared.model.names import NodeName, PodUid
from shared.runtime.service import loops, observes

logger = logging.getLogger(__name__)

ROUND_S = 0.15
"""Pause between two rounds: what happens meanwhile is told together."""
NODES_A_ROUND = 200
LOOK_AGAIN_S = 1.0
"""What was heard of is looked at once more after this: the ledger may learn of it later than we."""
SWEEP_S = 30.0
LISTEN_S = 1.0
"""Between two looks for who is silent."""


class Ledger(Protocol):
    """What is read of the ledger."""

    async def snapshot(self) -> Snapshot:
        """Return all nodes, and where to go on in the feed."""
        ...

    def changes(self, position: str) -> AsyncIterator[list[LedgerChange]]:
        """Yield what happens after a position, for ever."""
        ...

    @property
    def totals(self) -> "DashboardTotals":
        """Nodes with their leases."""
        ...

    @property
    def waiting_pods(self) -> "DashboardWaitingPods":
        """The pods that fit nowhere yet."""
        ...


class DashboardTotals(Protocol):
    """What is read of nodes' totals."""

    async def of_nodes(self, names: Sequence[NodeName]) -> list[NodeTotals]:
        """Return nodes with their leases."""
        ...


class DashboardWaitingPods(Protocol):
    """What is read of waiting pods."""

    async def load(self, pods: Sequence[PodUid] | None = None) -> list[WaitingPod]:
        """Return the pods that wait: all, or those among `pods`."""
        ...


class Dashboard:
    """Keeps the projection true. Any number of replicas may run: each sees everything."""

    def __init__(
        self, ledger: Ledger, clock: Clock, *, round_s: float = ROUND_S, sweep_s: float = SWEEP_S
    ) -> None:
        self.ledger = ledger
        self.clock = clock
        self.round_s = round_s
        self.sweep_s = sweep_s
        self.projection = Projection()
        self.parts = Parts(clock.now())
        self.hub = Hub()
        self.silent: list[Silent] = []
        self.has_read = False
        self._nodes: set[NodeName] = set()
        self._pods: set[PodUid] = set()
        self._all_pods = True
        self._wake = asyncio.Event()

    def missing(self) -> str | None:
        """Say what keeps the page from being shown, or None."""
        return None if self.has_read else "the ledger was not read yet"

    async def begin(self) -> None:
        """Note that news are heard from now on."""
        self.parts.began_at = self.clock.now()

    # What is heard

    @observes
    async def hear_news(
        self,
        events: Sequence[
            PodQueued
            | PodRejected
            | PodTerminated
            | PlacementChosen
            | PlacementRefused
            | PodBound
            | BindingFailed
            | LeaseResized
            | ShareActivated
            | ShareRefused
            | ViolationFound
        ],
    ) -> None:
        """Write the ticker, and look at whom it concerns."""
        self.hub.publish(self.projection.hear(events, self.clock.now()))
        nodes, pods = concerned(events)
        self._look_twice(nodes, pods)

    @observes
    async def hear_leases(self, events: Sequence[LeaseChanged]) -> None:
        """Look at nodes whose leases changed."""
        self._look({event.lease.node for event in events})

    @observes
    async def hear_budgets(self, events: Sequence[BudgetChanged]) -> None:
        """Take over how namespaces stand."""
        self.hub.publish(self.projection.take_budgets(events))

    @observes
    async def hear_parts(self, events: Sequence[Heartbeat]) -> None:
        """Note who runs."""
        for event in events:
            self.parts.hear(event, self.clock.now())

    # What is read

    @loops
    async def follow_ledger(self) -> None:
        """Look at every node that the feed names; at all of them when it begins."""
        snapshot = await self.ledger.snapshot()
        self._look({*self.projection.nodes, *(node.facts.name for node in snapshot.nodes)})
        self._all_pods = True
        self._wake.set()
        async for changes in self.ledger.changes(snapshot.position):
            self._look(name for change in changes for name in self._named(change))

    @loops
    async def sweep(self) -> None:
        """Look at everything now and then, whether or not anybody mentioned it."""
        while True:
            await self.clock.sleep(self.sweep_s)
            snapshot = await self.ledger.snapshot()
            self._look({*self.projection.nodes, *(node.facts.name for node in snapshot.nodes)})
            self._all_pods = True
            self._wake.set()

    @loops
    async def read(self) -> None:
        """Read what is to be looked at, round by round."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._nodes or self._pods or self._all_pods:
                await self.read_round()
            self.has_read = True
            await self.clock.sleep(self.round_s)

    async def read_round(self) -> None:
        """Read some nodes and all pods that are to be looked at; what fails is looked at again."""
        nodes = sorted(self._nodes)[:NODES_A_ROUND]
        pods, everybody = sorted(self._pods), self._all_pods
        self._nodes.difference_update(nodes)
        self._pods, self._all_pods = set(), False
        try:
            accounts = await self.ledger.totals.of_nodes(nodes) if nodes else []
            changed = self.projection.take_nodes(nodes, accounts)
            if everybody:
                changed |= self.projection.take_waiting(await self.ledger.waiting_pods.load())
            elif pods:
                found = await self.ledger.waiting_pods.load(pods)
                changed |= self.projection.take_waiting(found, asked=pods)
        except BaseException:
            self._nodes.update(nodes)
            self._pods.update(pods)
            self._all_pods = self._all_pods or everybody
            self._wake.set()
            raise
        self.hub.publish(changed)

    @loops
    async def listen(self) -> None:
        """Look who has fallen silent."""
        while True:
            now = self.clock.now()
            nodes = {shown.node for shown in self.projection.devices.values()}
            silent = self.parts.silent(nodes, now)
            if silent != self.silent:
                self.silent = silent
                self.hub.publish({SILENT})
            await self.clock.sleep(LISTEN_S)

    def _look(self, nodes: Iterable[NodeName], pods: Iterable[PodUid] = ()) -> None:
        self._nodes.update(nodes)
        self._pods.update(pods)
        if self._nodes or self._pods:
            self._wake.set()

    def _look_twice(self, nodes: Iterable[NodeName], pods: Iterable[PodUid]) -> None:
        nodes, pods = set(nodes), set(pods)
        self._look(nodes, pods)
        asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look, nodes, pods)

    def _named(self, change: LedgerChange) -> set[NodeName]:
        known = self.projection.devices
        return {
            *(node.facts.name for node in change.nodes),
            *change.removed,
            *change.used,
            *(known[uuid].node for uuid in change.devices if uuid in known),
        }


def concerned(events: Sequence[News]) -> tuple[set[NodeName], set[PodUid]]:
    """Return the nodes and pods that may look different after news."""
    nodes: set[NodeName] = set()
    pods: set[PodUid] = set()
    for event in events:
        match event:
            case PlacementChosen() | PodBound() | LeaseResized():
                nodes.add(event.lease.node)
                pods.add(event.lease.pod)
            case ShareActivated():
                nodes.add(event.node)
            case (
                PodQueued() | PodRejected() | PodTerminated() | PlacementRefused() | BindingFailed()
            ):
                pods.add(event.pod)
            case _:
                pass
    return nodes, pods

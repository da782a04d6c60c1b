"""What pods that have ended still hold: the agent's records beyond the ledger's leases.

A process may outlive its container, for example in uninterruptible sleep on a sick GPU.
"""

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping

from services.node_agent.node import Node
from services.node_agent.reconcile.checkpoint_reconciler import CheckpointReconciler
from services.node_agent.records.device_guard import Excess, beyond_leases, with_leftovers
from shared.model.clock import wait_for_event
from shared.model.devices.device import MOST_PIDS, Device
from shared.model.errors import LeaseholdError
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

SETTLE_S = 1.0
"""A record without a lease counts after this time: the ends of a pod and of its lease arrive one
after the other."""
COMPARE_S = 0.25
"""Interval of comparisons while some records have no lease."""
VANISHED_S = 5.0
"""The same for deleted pods with a lease, whose containers the kubelet kills after a grace period.
Also how long a binder's last request about one counts."""


class Leftovers:
    def __init__(self, node: Node, reconciler: CheckpointReconciler) -> None:
        self.node = node
        self.reconciler = reconciler
        self._since: dict[PodUid, tuple[float, float]] = {}
        """In ticks, and Unix seconds."""
        self._vanished: dict[PodUid, tuple[float, float, float]] = {}
        """Since when they may still run, and when a binder last requested them."""
        self._shown: Mapping[PodUid, Excess] = {}
        self._pids: Mapping[PodUid, tuple[int, ...]] = {}

    async def run(self) -> None:
        due = self.node.compare_due
        while True:
            await wait_for_event(due, COMPARE_S if self._since or self._vanished else None)
            due.clear()
            await self.compare()

    async def compare(self) -> None:
        beyond = self._beyond()
        if beyond:
            with contextlib.suppress(LeaseholdError):
                await self.reconciler.forget_ended()
            beyond = self._beyond()
        ticks = self.node.clock.ticks()
        now = self.node.clock.now()
        self._since = {pod: self._since.get(pod, (ticks, now)) for pod in beyond}
        recorded = self.node.checkpoint.pods
        self._vanished = {
            pod: times
            for pod, times in self._vanished.items()
            if pod in recorded and ticks - times[2] < VANISHED_S
        }
        settled = {
            pod: excess for pod, excess in beyond.items() if ticks - self._since[pod][0] >= SETTLE_S
        }
        late = {pod for pod, times in self._vanished.items() if ticks - times[0] >= VANISHED_S}
        pids = await self._find_processes(settled.keys() | late)
        if (settled, pids) != (self._shown, self._pids):
            self._log(settled.keys() - self._shown.keys())
            self._shown = settled
            self._pids = pids
            self.node.report_due.set()

    def count(self) -> int:
        return len(self._shown.keys() | self._pids.keys())

    def note_vanished(self, running: Iterable[PodUid]) -> None:
        """The API server no longer has these pods; they may still run here."""
        ticks = self.node.clock.ticks()
        now = self.node.clock.now()
        for pod in running:
            began, began_at, _ = self._vanished.get(pod, (ticks, now, ticks))
            self._vanished[pod] = began, began_at, ticks
        if self._vanished:
            self.node.compare_due.set()

    def described(self, devices: Iterable[Device]) -> tuple[Device, ...]:
        since = {pod: self._since[pod][1] for pod in self._shown if pod in self._since}
        leased = {pod: times[1] for pod, times in self._vanished.items() if pod in self._pids}
        return with_leftovers(
            devices,
            self.node.checkpoint.entries,
            self._shown,
            since=since,
            vanished=leased,
            pids=self._pids,
        )

    def _beyond(self) -> dict[PodUid, Excess]:
        node = self.node
        if not node.leases.synced or node.checkpoint.lost:
            return {}
        return beyond_leases(node.checkpoint.entries, node.leases.leases)

    async def _find_processes(self, pods: Collection[PodUid]) -> dict[PodUid, tuple[int, ...]]:
        if not pods:
            return {}
        processes: dict[PodUid, list[int]] = {pod: [] for pod in pods}
        for pid, pod in sorted((await self.reconciler.pods.list_processes()).items()):
            if pod in processes:
                processes[pod].append(pid)
        return {pod: tuple(pids[:MOST_PIDS]) for pod, pids in processes.items()}

    def _log(self, new: Iterable[PodUid]) -> None:
        names = {entry.allocation.pod: entry.holder for entry in self.node.checkpoint.entries}
        for pod in new:
            logger.warning(
                "%s has no lease any more, and its processes have not ended: what it has of its "
                "devices is given to no other pod until they have",
                names.get(pod, pod),
                extra={"pod": pod},
            )

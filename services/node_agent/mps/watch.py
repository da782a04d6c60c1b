"""Ends the work of MPS's clients before the kubelet kills them, and repairs servers that hang.

A client that is killed while its kernels run can leave the GPU so that all later clients hang, and
every command replies as ever. No hook of the runtime comes before the kill, so the time of a pod's
deletion says when it is. What nothing announces (OOM, a crash, an eviction by the kubelet) is found
by a probe.
"""

import asyncio
import contextlib
import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from services.node_agent.enforcers.mps import MOST_SERVERS, Mps, mps_shares, target_of
from services.node_agent.kubelet.pods import Deletion
from services.node_agent.metrics import MPS_DRAINED, MPS_WEDGES
from services.node_agent.mps.daemon import MpsTarget, WedgedError
from services.node_agent.node import Node
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.bounds import cut
from shared.model.clock import until_tick, wait_for_event
from shared.model.errors import LeaseholdError
from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.names import PodUid
from shared.model.quantity import timestamp

logger = logging.getLogger(__name__)

DRAIN_S = 3.0
"""How long before the kill of a pod the work of its clients is ended: the longest kernels end in
that time."""
LOOK_S = 1.0
"""Interval of looks for deleted pods while MPS holds shares: with a grace period of 1 s, too, the
kubelet kills a container only after 2 s."""
READING_SHARE = 10
"""The kubelet's list is read for a tenth of the time at most."""
MOST_PAUSE_S = 5.0
"""The longest pause after the kubelet's list took long to read."""
PROBE_S = 30.0
"""Interval of probes of servers, beside one after each restart of a container."""


def drain_at(killed_at: float, seen_at: float) -> float:
    """Return when to end the work of a pod's clients: never in the first half of its grace period.

    `seen_at` is when its deletion was seen.

    >>> drain_at(130.0, 100.0), drain_at(105.0, 100.0), drain_at(101.0, 100.0)
    (127.0, 102.5, 100.0)
    """
    grace_s = killed_at - seen_at
    if grace_s <= 1:
        return seen_at
    return max(killed_at - DRAIN_S, seen_at + grace_s / 2)


def pause_after(read_s: float) -> float:
    """Return for how long the kubelet's list is not read again after it took this time.

    >>> pause_after(0.01), pause_after(0.3), pause_after(60.0)
    (0.1, 3.0, 5.0)
    """
    return min(READING_SHARE * read_s, MOST_PAUSE_S)


class _EndingPod(NamedTuple):
    """Moments are in ticks: the node's clock may be behind the API server's, or be set."""

    deletion: Deletion
    seen_at: float
    killed_at: float


class MpsWatch:
    def __init__(self, node: Node, enforcer: Mps) -> None:
        self.node = node
        self.enforcer = enforcer
        self._ending: Mapping[PodUid, _EndingPod] = {}
        self._looked = asyncio.Event()
        self._drains = asyncio.Semaphore(MOST_SERVERS)
        self._probes = asyncio.Semaphore(MOST_SERVERS)
        self._silent: dict[Hashable, str] = {}
        """Since when a shared server has not replied."""

    @property
    def entries(self) -> Sequence[CheckpointEntry]:
        return [entry for entry in self.node.checkpoint.entries if self.enforcer.holds(entry)]

    @property
    def servers(self) -> Iterable[Sequence[CheckpointEntry]]:
        return _by_server(self.entries).values()

    async def drain_ending(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_for_deletions())
            group.create_task(self._drain_in_time())

    async def _look_for_deletions(self) -> None:
        clock = self.node.clock
        while True:
            began = clock.ticks()
            if self.enforcer.daemons is not None and self.entries:
                await self.look()
            await clock.sleep(max(until_tick(LOOK_S), pause_after(clock.ticks() - began)))

    async def _drain_in_time(self) -> None:
        """A daemon that hangs delays no work of other servers."""
        draining: dict[Hashable, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await self.node.wait(self._looked, LOOK_S)
                draining = {server: task for server, task in draining.items() if not task.done()}
                due = self.due()
                if not (due or draining):
                    self.enforcer.drained = frozenset()
                for server in due.keys() - draining.keys():
                    draining[server] = group.create_task(self.drain(due[server]))

    async def look(self) -> None:
        try:
            deletions = await self.node.kubelet.list_ending()
        except LeaseholdError as error:  # the next look is soon
            logger.info("pods that end cannot be seen for MPS: %s", error)
        else:
            self._ending = {pod: self._seen(pod, deletion) for pod, deletion in deletions.items()}
        self._looked.set()

    def _seen(self, pod: PodUid, deletion: Deletion) -> _EndingPod:
        """A second deletion may shorten the grace period."""
        before = self._ending.get(pod)
        if before is not None and before.deletion == deletion:
            return before
        ticks = self.node.clock.ticks()
        left_s = min(deletion.killed_at - self.node.clock.now(), deletion.grace_s)
        if before is None:
            return _EndingPod(deletion, ticks, ticks + left_s)
        return _EndingPod(deletion, before.seen_at, min(before.killed_at, ticks + left_s))

    def due(self) -> Mapping[Hashable, Sequence[CheckpointEntry]]:
        """Return whose work is to be ended now, by server."""
        if self.enforcer.daemons is None:
            return {}
        ticks = self.node.clock.ticks()
        pods = {
            pod
            for pod, ending in self._ending.items()
            if ticks >= drain_at(ending.killed_at, ending.seen_at)
        }
        return _by_server(
            entry
            for entry in self.entries
            if entry.lease.users and pods.issuperset(entry.lease.users)
        )

    async def drain(self, entries: Iterable[CheckpointEntry]) -> None:
        async with self._drains:
            for entry in entries:
                await self._drain(entry)

    async def _drain(self, entry: CheckpointEntry) -> None:
        target = target_of(entry)
        daemons = self.enforcer.required()
        try:
            clients = (await daemons.get(target)).clients
            if not clients:
                return
            self.enforcer.drained |= clients
            await daemons.terminate(target, clients)
        except WedgedError as error:
            await self._repair(target, str(error))
        except LeaseholdError as error:
            logger.warning("the clients of MPS of %s are not ended: %s", target, error)
        else:
            MPS_DRAINED.inc(len(clients))
            logger.info("the GPU work of %d processes of %s is ended", len(clients), target)

    async def probe_servers(self) -> None:
        due = self.enforcer.probes_due
        while True:
            if self.enforcer.daemons is not None:
                await self.probe_once()
            await wait_for_event(due, until_tick(PROBE_S))
            due.clear()

    async def probe_once(self) -> None:
        """A server that hangs delays the probe of no other one."""
        servers = {target_of(entries[0]).server: entries for entries in self.servers}
        self._silent = {server: at for server, at in self._silent.items() if server in servers}
        await asyncio.gather(*map(self._probe, servers.values()))

    async def _probe(self, entries: Sequence[CheckpointEntry]) -> None:
        targets = [target_of(entry) for entry in entries]
        first = targets[0]
        daemons = self.enforcer.required()
        async with self._probes:
            try:
                daemon = await daemons.get(first)
                if daemon.servers:
                    await daemons.probe(first)
            except WedgedError as error:
                await self._repair(first, str(error))
            except LeaseholdError as error:
                logger.info("the server of MPS of %s is not probed: %s", first, error)
                self._note_silence(entries, first, str(error))
            else:
                self._silent.pop(first.server, None)
                if daemon.problem:  # it is put back by the comparison of limits
                    return
                for target in targets:
                    self.enforcer.repairs.pop(target, None)
                self._open(first)

    def _note_silence(
        self, entries: Sequence[CheckpointEntry], first: MpsTarget, reason: str
    ) -> None:
        """A partitioner that starts again misses one probe."""
        if not first.gpu or first.server in self.enforcer.wedged:
            return
        since = self._silent.get(first.server)
        if since is None:
            self._silent[first.server] = timestamp(self.node.clock.now())
            return
        fault = cut(
            f"MpsSilent: the GPU's server of MPS has not replied since {since}: {reason}; what "
            "runs there goes on, and the server ends with the last of its containers"
        )
        self._close(entries, first, fault)
        logger.error("the server of MPS of %s: %s", first, fault)

    def _close(self, entries: Iterable[CheckpointEntry], target: MpsTarget, fault: str) -> None:
        devices = {share.device for entry in entries for share in mps_shares(entry)}
        self.enforcer.wedged[target.server] = dict.fromkeys(devices, fault)
        self.node.report_due.set()

    def _beside(self, target: MpsTarget) -> Sequence[CheckpointEntry]:
        return [entry for entry in self.entries if target_of(entry).server == target.server]

    async def _repair(self, target: MpsTarget, reason: str) -> None:
        """On a busy node a single probe may be late: a server is started anew if two hang."""
        entries = self._beside(target)
        if not entries:  # its last container has ended meanwhile
            return
        fault = cut(
            f"MpsWedged: a server of MPS hangs since {timestamp(self.node.clock.now())}: {reason}; "
            f"its daemon is started again, at least every {PROBE_S:g} s"
        )
        self._close(entries, target, fault)
        logger.error("%s of %s: %s", target, entries[0].holder, fault)
        try:
            await self.enforcer.required().probe(target)
        except WedgedError:
            pass
        except LeaseholdError as error:  # who cannot see ends nobody's work; the next probe is soon
            logger.warning("the server of MPS of %s is not probed again: %s", target, error)
            return
        else:
            self._open(target)
            return
        pods = sorted({entry.allocation.pod for entry in entries})
        try:
            async with contextlib.AsyncExitStack() as stack:
                for pod in pods:
                    await stack.enter_async_context(self.node.checkpoint.changing.hold(pod))
                done = await self.enforcer.required().repair(target)
            await self.enforcer.required().probe(target)
        except LeaseholdError as error:
            MPS_WEDGES.labels("failed").inc()
            text = f"and it could not be repaired: {error}"
        else:
            MPS_WEDGES.labels("repaired").inc()
            self._open(target)
            text = f"the agent has {done}, so the container's programs have failed: restart it"
        logger.warning("the server of MPS of %s: %s; %s", target, reason, text)
        for entry in self._beside(target):
            self.enforcer.repairs[target_of(entry)] = self._finding(entry, reason, text)

    def _finding(self, entry: CheckpointEntry, reason: str, text: str) -> ViolationFound:
        allocation = entry.allocation
        return ViolationFound(
            node=self.node.name,
            reason=ViolationReason.MPS_WEDGED,
            pod=allocation.pod,
            namespace=allocation.namespace,
            name=allocation.name,
            container=allocation.container,
            claim=entry.lease.claim is not None,
            message=cut(f"its server of MPS was wedged: {reason}; {text}"),
        )

    def _open(self, target: MpsTarget) -> None:
        if self.enforcer.wedged.pop(target.server, None) is not None:
            self.node.report_due.set()


def _by_server(
    entries: Iterable[CheckpointEntry],
) -> Mapping[Hashable, Sequence[CheckpointEntry]]:
    by_server: dict[Hashable, list[CheckpointEntry]] = {}
    for entry in entries:
        by_server.setdefault(target_of(entry).server, []).append(entry)
    return by_server

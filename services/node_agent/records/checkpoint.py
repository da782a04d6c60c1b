"""The checkpoint: a JSON file with each allocation, on disk before the kubelet gets the reply."""

import asyncio
import itertools
import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from services.node_agent.files import replace_file
from services.node_agent.records.checkpoint_entry import (
    CheckpointEntry,
    Fence,
    device_of_key,
    slot_key,
)
from services.node_agent.records.device_guard import check_room
from services.node_agent.records.holder_locks import HolderLocks
from shared.model.devices.device import Device
from shared.model.errors import UNDECODABLE, UnavailableError
from shared.model.events.node_events import Allocation
from shared.model.names import DeviceUuid, PodUid

logger = logging.getLogger(__name__)

FORMAT = 1
START_S = 3.0
"""A container that is not started within this time may pull its image, or follow another one."""
REPLY_S = 0.2
"""By this time, a reply has reached the kubelet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    v: int = FORMAT
    node: str = ""
    entries: tuple[CheckpointEntry, ...] = ()
    fences: Mapping[str, Fence] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    """Without their health."""


class Checkpoint:
    """Entries by pod, container and resource, and the newest fence honoured for each slot."""

    def __init__(self, path: Path, node: str) -> None:
        self.path = path
        self.node = node
        self.by_key: dict[tuple[PodUid, str, str], CheckpointEntry] = {}
        self.fences: dict[str, Fence] = {}
        self.devices: tuple[Device, ...] = ()
        self.lost = False
        self.unrecorded: Mapping[DeviceUuid, Collection[str]] = {}
        self.changing = HolderLocks()
        """Held while entries, and what limits their containers, change together."""
        self._called_at: dict[tuple[PodUid, str, str], tuple[float, bool]] = {}
        """Unix seconds, and whether to start the container."""
        self._writing = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._disk = threading.Lock()
        """A restarting kubelet cancels its calls, but a write in a thread continues."""
        self._newest = 0

    async def load(self) -> None:
        """Move a damaged or foreign file aside; never overwrite it.

        Raises UnavailableError if it can be neither read nor moved.
        """
        try:
            content = await asyncio.to_thread(self._read)
        except OSError as error:
            raise UnavailableError(f"{self.path} cannot be read: {error.strerror}") from error
        self.by_key = {entry.key: entry for entry in content.entries}
        self.fences = dict(content.fences)
        self.devices = content.devices

    async def save(
        self, entry: CheckpointEntry, *, devices: Mapping[DeviceUuid, Device] | None = None
    ) -> None:
        """Record an allocation; it is on disk when this returns.

        With `devices`, all allocations together must fit on them: raises OvercommitError naming the
        holders. Raises UnavailableError if the entry cannot be written. After an error nothing is
        recorded.
        """
        async with self._writing:
            if devices is not None:
                check_room(
                    entry.lease,
                    (entry.allocation.container,),
                    self.entries,
                    devices,
                    self.unrecorded,
                )
            await self._add((entry,))

    async def restore(self, entries: Iterable[CheckpointEntry]) -> None:
        """Record allocations of pods that have no entry, all in one write.

        One by one, an agent that is killed between them would take the pod for recorded. Raises
        UnavailableError if they cannot be written.
        """
        async with self._writing:
            await self._add(entries)

    async def record_devices(self, devices: Iterable[Device]) -> None:
        """Raises UnavailableError if they cannot be written. A lost file is rebuilt first."""
        facts = tuple(replace(device, healthy=True, fault="", links={}) for device in devices)
        if self.lost or facts == self.devices:
            return
        async with self._writing:
            await self._write(self.by_key, self.fences, facts)

    async def write_again(self) -> None:
        async with self._writing:
            if not self.lost:
                await self._write(self.by_key, self.fences, self.devices)

    async def forget(self, pods: Iterable[PodUid]) -> None:
        """Raises UnavailableError if that cannot be written."""
        ended = set(pods)
        async with self._writing:
            if not ended.intersection(key[0] for key in self.by_key):
                return
            entries = {key: entry for key, entry in self.by_key.items() if key[0] not in ended}
            own = tuple(f"/{pod}" for pod in ended)
            fences = {key: fence for key, fence in self.fences.items() if not key.endswith(own)}
            await self._write(entries, fences, self.devices)

    def find(self, pod: PodUid, container: str, resource: str) -> CheckpointEntry | None:
        return self.by_key.get((pod, container, resource))

    def of_resource(self, resource: str) -> list[CheckpointEntry]:
        return [entry for key, entry in self.by_key.items() if key[2] == resource]

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        return tuple(entry.allocation for entry in self.by_key.values())

    @property
    def reported(self) -> tuple[Allocation, ...]:
        by_version = sorted(self.allocations, key=lambda allocation: allocation.lease.version)
        return tuple({allocation.pod: allocation for allocation in by_version}.values())

    @property
    def device_fences(self) -> dict[DeviceUuid, int]:
        newest: dict[DeviceUuid, int] = {}
        for key, fence in self.fences.items():
            device = device_of_key(key)
            newest[device] = max(fence.fence, newest.get(device, 0))
        return newest

    @property
    def entries(self) -> tuple[CheckpointEntry, ...]:
        return tuple(self.by_key.values())

    @property
    def pods(self) -> frozenset[PodUid]:
        return frozenset(key[0] for key in self.by_key)

    @property
    def allocated(self) -> frozenset[tuple[PodUid, str]]:
        return frozenset((pod, container) for pod, container, _ in self.by_key)

    @property
    def claims(self) -> frozenset[PodUid]:
        return frozenset(
            allocation.pod for allocation in self.allocations if allocation.lease.claim is not None
        )

    def allocated_since(self, since: float) -> frozenset[PodUid]:
        return frozenset(
            allocation.pod for allocation in self.allocations if allocation.activated_at >= since
        )

    def note_call(self, entry: CheckpointEntry, now: float, *, starts: bool) -> None:
        self._called_at[entry.key] = now, starts

    def started_since(self, since: float) -> frozenset[PodUid]:
        return self.allocated_since(since) | {
            pod for (pod, _, _), (at, starts) in self._called_at.items() if starts and at >= since
        }

    def starts_due(self, now: float) -> bool:
        """Whether the kubelet is soon to call PreStartContainer, or to get its reply.

        If the plugin is gone by then, the container fails.
        """
        return any(
            now < at + (REPLY_S if starts else START_S) for at, starts in self._called_at.values()
        )

    async def _add(self, added: Iterable[CheckpointEntry]) -> None:
        entries = dict(self.by_key)
        fences = dict(self.fences)
        for entry in added:
            entries[entry.key] = entry
            lease = entry.allocation.lease
            for share in lease.shares_of(entry.allocation.container):
                key = slot_key(share, lease.pod)
                newest = fences.get(key)
                if newest is None or newest.fence <= share.fence:
                    fences[key] = Fence(fence=share.fence, pod=lease.pod)
        await self._write(entries, fences, self.devices)

    async def _write(
        self,
        entries: dict[tuple[PodUid, str, str], CheckpointEntry],
        fences: dict[str, Fence],
        devices: tuple[Device, ...],
    ) -> None:
        content = CheckpointFile(
            node=self.node, entries=tuple(entries.values()), fences=fences, devices=devices
        )
        try:
            encoded = msgspec.json.encode(content)
            await asyncio.to_thread(self._write_newer, encoded, next(self._numbers))
        except OSError as error:
            raise UnavailableError(
                f"{self.path} cannot be written: {error.strerror}; an allocation must be on "
                "disk before the kubelet gets it"
            ) from error
        self.by_key = entries
        self.fences = fences
        self.devices = devices
        self._called_at = {key: at for key, at in self._called_at.items() if key in entries}

    def _read(self) -> CheckpointFile:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            self.lost = True
            return CheckpointFile()
        try:
            content = msgspec.json.decode(data, type=CheckpointFile)
        except UNDECODABLE as error:
            return self._set_aside(f"is damaged ({error})")
        if content.v != FORMAT or content.node != self.node:
            return self._set_aside(f"is of node {content.node!r}, format {content.v}")
        return content

    def _set_aside(self, problem: str) -> CheckpointFile:
        aside = self.path.with_suffix(".damaged")
        self.path.replace(aside)
        self.lost = True
        logger.warning(
            "%s %s; moved to %s, to be rebuilt from the kubelet", self.path, problem, aside
        )
        return CheckpointFile()

    def _write_newer(self, data: bytes, number: int) -> None:
        with self._disk:
            if number > self._newest:
                replace_file(self.path, data)
                self._newest = number

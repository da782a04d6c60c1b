"""The kubelet's checkpoint of devices, and which resources it allocates by device plugin."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from services.node_agent.node import Node
from shared.model.errors import UNDECODABLE, UnavailableError

QUIET_S = 10.0
"""A resource that was not allocated by device plugin for this long no longer is: PodResources of a
kubelet that starts lists no pods at first."""
FILE_NAME = "kubelet_internal_checkpoint"
FileIdentity = tuple[int, int]


def file_identity(path: Path) -> FileIdentity | None:
    """Return what changes when a file or socket is replaced or written, or None without one."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


class _KubeletEntry(msgspec.Struct, frozen=True):
    pod: str = msgspec.field(name="PodUID")
    resource: str = msgspec.field(name="ResourceName")


class KubeletDevices(msgspec.Struct, frozen=True):
    allocated: tuple[_KubeletEntry, ...] | None = msgspec.field(
        name="PodDeviceEntries", default=None
    )
    registered: dict[str, frozenset[str] | None] | None = msgspec.field(
        name="RegisteredDevices", default=None
    )


class _KubeletCheckpoint(msgspec.Struct, frozen=True):
    data: KubeletDevices = msgspec.field(name="Data")


def read_kubelet_devices(plugins: Path) -> KubeletDevices | None:
    """Return None without a checkpoint. Raises UnavailableError if it cannot be read."""
    path = plugins / FILE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=_KubeletCheckpoint).data
    except FileNotFoundError:
        return None
    except (OSError, *UNDECODABLE) as error:
        raise UnavailableError(f"{path} is not a kubelet's checkpoint: {error}") from error


Allocatable = Callable[[str], Awaitable[int | None]]


class PluginResources:
    """The resources that the kubelet allocates by device plugin, and since when.

    Until five minutes after the plugin has stopped, or longer while containers hold IDs, the
    kubelet permanently rejects pods that request them; and afterwards while the node's status shows
    0.
    """

    def __init__(self, node: Node, plugins: Path, allocatable: Allocatable) -> None:
        self.node = node
        self.plugins = plugins
        self.checkpoint = plugins / FILE_NAME
        self.allocatable = allocatable
        self.since: dict[str, float] = {}
        self._seen_at: dict[str, float] = {}
        self._read: tuple[FileIdentity | None, frozenset[str]] = None, frozenset()

    async def refresh(self, amounts: frozenset[str]) -> None:
        """Raises LeaseholdError if the checkpoint, PodResources or the node cannot be read."""
        current = file_identity(self.checkpoint), amounts
        if current == self._read and self.since.keys().isdisjoint(amounts):
            return
        devices = await asyncio.to_thread(read_kubelet_devices, self.plugins)
        registered = frozenset((devices and devices.registered) or ())
        held = {
            holding.resource for holding in (await self.node.pod_resources.list_holdings()).holdings
        }
        zero = {name for name in self.since.keys() & amounts if not await self.allocatable(name)}
        now = time.monotonic()
        recorded = {resource for _, _, resource in self.node.checkpoint.by_key}
        self._seen_at |= dict.fromkeys(registered | held | recorded | zero, now)
        seen = {name for name, at in self._seen_at.items() if now - at < QUIET_S}
        self.since = {name: self.since.get(name, now) for name in amounts & seen}
        self._read = current

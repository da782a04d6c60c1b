"""What the node's containers may open: read once when a container appears, and again rarely."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from services.node_agent.container_runtime.bundles import list_bundles, read_bundle
from services.node_agent.kubelet.pods import ContainerDevices
from services.node_agent.usage.visible_gpus import EXEMPT_NAMESPACES, SEES_DEVICES
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.types import ApiObject
from shared.model.errors import RequestError
from shared.model.names import Namespace

logger = logging.getLogger(__name__)

MOST_READ = 64
MOST_READ_AGAIN = 8
READ_AGAIN_S = 300.0
"""A container can get devices later, by a program with privileges on the node."""
STARTING_S = 60.0
"""For this time, a bundle may be of a container that is being created."""
LABELS_AGAIN_S = 60.0
"""Interval of readings of a namespace's labels, by which administrators exempt its pods."""
MOST_LABELS = 16


@dataclass(frozen=True, slots=True)
class _Reading:
    began_at: float
    read_at: float
    devices: ContainerDevices | None


class ContainerViews:
    def __init__(self, directories: Sequence[Path], proc: Path) -> None:
        self.directories = directories
        self.proc = proc
        self._readings: dict[str, _Reading] = {}

    @property
    def count(self) -> int:
        return len(self._readings)

    def look(self, now: float) -> tuple[ContainerDevices, ...]:
        """`now` is in seconds of a steady clock. Raises OSError if a directory cannot be read."""
        bundles = list_bundles(self.directories)
        fresh = _Reading(now, float("-inf"), None)
        self._readings = {name: self._readings.get(name, fresh) for name in bundles}
        new = [name for name, reading in self._readings.items() if _is_new(reading, now)]
        new.sort(key=lambda name: self._readings[name].read_at)
        old = (name for name, reading in self._readings.items() if _is_old(reading, now))
        for name in (*new[:MOST_READ], *islice(old, MOST_READ_AGAIN)):
            began_at = self._readings[name].began_at
            self._readings[name] = _Reading(began_at, now, self._read(bundles[name] / name))
        return self._seeing()

    def look_at_all(self) -> tuple[ContainerDevices, ...]:
        bundles = list_bundles(self.directories)
        readings = ((name, self._read(where / name)) for name, where in bundles.items())
        self._readings = {name: _Reading(0.0, 0.0, devices) for name, devices in readings}
        return self._seeing()

    def _seeing(self) -> tuple[ContainerDevices, ...]:
        return tuple(
            reading.devices
            for reading in self._readings.values()
            if reading.devices is not None and reading.devices.sees_gpus
        )

    def exist(self, containers: Iterable[ContainerDevices]) -> tuple[ContainerDevices, ...]:
        listed = list(containers)
        bundles = list_bundles(self.directories) if listed else {}
        return tuple(container for container in listed if container.container_id in bundles)

    def _read(self, bundle: Path) -> ContainerDevices | None:
        try:
            return read_bundle(bundle, self.proc)
        except RequestError as error:
            logger.warning("which devices a container may open is not known: %s", error)
            return ContainerDevices(pod=None, container_id=bundle.name)


def _is_new(reading: _Reading, now: float) -> bool:
    return reading.devices is None and now - reading.began_at < STARTING_S


def _is_old(reading: _Reading, now: float) -> bool:
    return not _is_new(reading, now) and now - reading.read_at >= READ_AGAIN_S


class ExemptNamespaces:
    def __init__(self, kubernetes: KubernetesClient, *, most_read: int = MOST_LABELS) -> None:
        self.kubernetes = kubernetes
        self.most_read = most_read
        self._labels: dict[Namespace, tuple[float, bool]] = {}

    async def among(self, namespaces: Iterable[Namespace], now: float) -> frozenset[Namespace]:
        """Include namespaces that are not known yet.

        Raises LeaseholdError if the API server does not respond, or denies access.
        """
        wanted = sorted({name for name in namespaces if name not in EXEMPT_NAMESPACES})
        self._labels = {name: self._labels[name] for name in wanted if name in self._labels}
        read_at = {name: at for name, (at, _) in self._labels.items()}
        due = [
            name for name in wanted if now - read_at.get(name, -LABELS_AGAIN_S) >= LABELS_AGAIN_S
        ]
        for name in sorted(due, key=lambda name: read_at.get(name, 0.0))[: self.most_read]:
            self._labels[name] = (now, await self._is_exempt(name))
        exempt = {name for name in wanted if self._labels.get(name, (0.0, True))[1]}
        return frozenset({*exempt, *map(Namespace, EXEMPT_NAMESPACES)})

    async def _is_exempt(self, name: Namespace) -> bool:
        try:
            namespace = await self.kubernetes.read(f"/api/v1/namespaces/{name}", ApiObject)
        except NotFoundError:
            return True  # its pods end
        return namespace.metadata.labels.get(SEES_DEVICES) == "true"

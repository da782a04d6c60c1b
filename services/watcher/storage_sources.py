"""The watcher's sources of claims, volumes and what decides where they can be."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.watcher.claimed_storage import (
    StorageChanges,
    StorageKind,
    StorageObject,
    unreadable_storage,
)
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.reflector import Batch, follow
from shared.kubernetes.storage_objects import (
    ApiCsiDriver,
    ApiCsiNode,
    ApiStorageCapacity,
    ApiStorageClass,
    ApiVolume,
    ApiVolumeClaim,
)
from shared.kubernetes.watch_events import KubernetesObject
from shared.model.bounds import cut
from shared.model.errors import RequestError
from shared.pods.storage import (
    Claim,
    ClaimKey,
    Volume,
    parse_capacity,
    parse_claim,
    parse_class,
    parse_driver,
    parse_limits,
    parse_volume,
)

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=KubernetesObject)
MOST_REPORTED = 1000
STORAGE_API = "/apis/storage.k8s.io/v1"


@dataclass(frozen=True, slots=True)
class _Source(Generic[R]):
    kind: StorageKind
    path: str
    type: type[R]
    parse: Callable[[R], StorageObject | None]
    unreadable: Callable[[str, str], StorageObject | None] = lambda _name, _error: None
    """Returns an object that `parse` refuses, given its name and the error."""
    reported: set[ClaimKey] = field(default_factory=set)
    """Objects that `parse` refuses: their errors are logged once."""


@dataclass(slots=True)
class StorageReflectors:
    client: KubernetesClient
    retry_s: float

    async def batches(self) -> AsyncIterator[StorageChanges]:
        queue: asyncio.Queue[StorageChanges] = asyncio.Queue(maxsize=1)
        claims = _Source(
            StorageKind.CLAIM,
            "/api/v1/persistentvolumeclaims",
            ApiVolumeClaim,
            parse_claim,
            lambda name, error: Claim(name=name, error=error),
        )
        volumes = _Source(
            StorageKind.VOLUME,
            "/api/v1/persistentvolumes",
            ApiVolume,
            parse_volume,
            lambda name, error: Volume(name=name, error=error),
        )
        classes = _Source(
            StorageKind.CLASS, f"{STORAGE_API}/storageclasses", ApiStorageClass, parse_class
        )
        drivers = _Source(
            StorageKind.DRIVER, f"{STORAGE_API}/csidrivers", ApiCsiDriver, parse_driver
        )
        capacities = _Source(
            StorageKind.CAPACITY,
            f"{STORAGE_API}/csistoragecapacities",
            ApiStorageCapacity,
            parse_capacity,
        )
        nodes = _Source(StorageKind.CSI_NODE, f"{STORAGE_API}/csinodes", ApiCsiNode, parse_limits)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(claims, queue))
            tasks.create_task(self._watch(volumes, queue))
            tasks.create_task(self._watch(classes, queue))
            tasks.create_task(self._watch(drivers, queue))
            tasks.create_task(self._watch(capacities, queue))
            tasks.create_task(self._watch(nodes, queue))
            while True:
                yield await queue.get()

    async def _watch(self, source: _Source[R], queue: asyncio.Queue[StorageChanges]) -> None:
        refused: StorageChanges | None = None
        following = follow(self.client, source.path, source.type, retry_s=self.retry_s)
        async with aclosing(following) as batches:
            async for batch in batches:
                changes = _changes(source, batch)
                if batch.refusal is not None and changes == refused:
                    continue
                refused = changes if batch.refusal is not None else None
                if changes.unreadable:
                    logger.warning(
                        "%s cannot be read: %s; retrying every %g s",
                        source.kind, batch.refusal, self.retry_s,
                    )  # fmt: skip
                await queue.put(changes)


def _changes(source: _Source[R], batch: Batch[R]) -> StorageChanges:
    if isinstance(batch.refusal, NotFoundError):
        return StorageChanges(kind=source.kind, synced=True)
    if batch.refusal is not None:
        return unreadable_storage(source.kind, str(batch.refusal))
    changed: list[tuple[ClaimKey, StorageObject | None]] = []
    for named, stored in batch.changed:
        key = named.namespace, named.name
        try:
            changed.append((key, source.parse(stored) if stored is not None else None))
            source.reported.discard(key)
        except RequestError as error:
            if key not in source.reported and len(source.reported) < MOST_REPORTED:
                source.reported.add(key)
                logger.warning("%s %s/%s cannot be read: %s", source.kind, *key, error)
            changed.append((key, source.unreadable(named.name, cut(str(error)))))
    return StorageChanges(kind=source.kind, changed=tuple(changed), synced=batch.listed)

"""Reads recorded pods from the API server as they are now, some at once."""

import asyncio
from collections.abc import Iterable
from typing import TypeVar

from services.binder.observations import PodSnapshot
from services.binder.pod_client import PodClient
from shared.model.events.pod_events import PodGated, PodQueued
from shared.model.lease import Lease

MAX_READS = 32
"""Pods read at once."""

R = TypeVar("R", bound=Lease | PodGated | PodQueued)


class CurrentPods:
    """Compares records with the pods that they name."""

    def __init__(self, pods: PodClient) -> None:
        self.pods = pods
        self._reads = asyncio.Semaphore(MAX_READS)

    async def read(self, records: Iterable[R]) -> list[tuple[R, PodSnapshot | None]]:
        """Return each record with its pod; None: it is gone, whatever has its name.

        Raises UnavailableError while the API server does not respond.
        """
        found = list(records)
        return list(zip(found, await asyncio.gather(*map(self._read, found)), strict=True))

    async def _read(self, record: Lease | PodGated | PodQueued) -> PodSnapshot | None:
        async with self._reads:
            pod = await self.pods.get(record.namespace, record.name)
        return pod if pod is not None and pod.uid == record.pod else None

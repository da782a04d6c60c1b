"""The status manager: writes each change of a pod's status once to the API server."""

import asyncio
import time
from collections.abc import Callable

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json
from simcluster.kubelet.containers.container_spec import PodSpec
from simcluster.kubelet.containers.container_status import with_foreign_conditions
from simcluster.ports import ClusterStore

COALESCE_S = 0.02


class StatusManager:
    """Stores the latest status of each pod and writes those that have changed.

    `save` runs before each write, so the saved state of a pod is never older than its written
    status.
    """

    def __init__(self, store: ClusterStore, save: Callable[[str], None]) -> None:
        self._store = store
        self._save = save
        self._statuses: dict[str, Json] = {}
        self._previous: dict[str, tuple[Json, float]] = {}
        self._dirty: dict[str, PodSpec] = {}
        self._wake = asyncio.Event()

    def get(self, uid: str) -> Json | None:
        """Return a pod's latest status."""
        return self._statuses.get(uid)

    def get_delayed(self, uid: str, lag_s: float) -> Json | None:
        """Return the status that `/pods` shows: the previous one for the first `lag_s` seconds."""
        before, at = self._previous.get(uid, ({}, 0.0))
        return before if time.monotonic() - at < lag_s else self._statuses.get(uid)

    def set(self, pod: PodSpec, status: Json) -> None:
        """Set a new status; it is written soon."""
        before = self._statuses.get(pod.uid) or pod.obj.get("status") or {}
        self._previous[pod.uid] = (before, time.monotonic())
        self._statuses[pod.uid] = status
        self._dirty[pod.uid] = pod
        self._wake.set()

    def forget(self, uid: str) -> None:
        """Drop a deleted pod."""
        self._statuses.pop(uid, None)
        self._previous.pop(uid, None)
        self._dirty.pop(uid, None)

    async def run(self) -> None:
        """Write changes until cancelled, and once more at the end."""
        try:
            while True:
                await self._wake.wait()
                await asyncio.sleep(COALESCE_S)
                self.flush()
        finally:
            self.flush()

    def flush(self) -> None:
        """Write all changes now."""
        dirty, self._dirty = self._dirty, {}
        self._wake.clear()
        for uid, pod in dirty.items():
            self._save(uid)
            self._write(pod, self._statuses[uid])

    def _write(self, pod: PodSpec, status: Json) -> None:
        found = self._store.find("pods", pod.namespace, pod.name)
        if found is None or found.obj["metadata"]["uid"] != pod.uid:
            return

        def with_new_status(obj: Json) -> Json:
            return obj | {"status": with_foreign_conditions(status, obj.get("status") or {})}

        try:
            self._store.patch(
                "pods", pod.namespace, pod.name, with_new_status, subresource="status"
            )
        except ApiError as error:
            if error.code not in {404, 409}:
                raise

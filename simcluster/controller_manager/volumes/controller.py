"""Runs the controllers of storage whenever claims, volumes, classes, nodes or pods change."""

import asyncio
import logging

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json
from simcluster.apimachinery.volumes import CLAIMS, CLASSES, VOLUMES, pod_claims
from simcluster.controller_manager.volumes.binding import VolumeBinder
from simcluster.controller_manager.volumes.pod_claims import EphemeralClaims, StorageProtection
from simcluster.controller_manager.volumes.provisioner import Provisioner
from simcluster.controller_manager.waits import first_of
from simcluster.events import EventRecorder
from simcluster.ports import ClusterStore

log = logging.getLogger(__name__)

RETRY_S = 1.0


class VolumeController:
    """Plays the parts of kube-controller-manager and of external-provisioner."""

    def __init__(self, store: ClusterStore) -> None:
        events = EventRecorder(store)
        self._store = store
        self._ephemeral = EphemeralClaims(store, events)
        self._binder = VolumeBinder(store, events)
        self._provisioner = Provisioner(store, events)
        self._protection = StorageProtection(store)

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            pods = self._store.watch("pods")
            storage = [self._store.watch(table) for table in (CLAIMS, VOLUMES, CLASSES, "nodes")]
            watches = [pods, *storage]
            due_s: float | None = 0.0
            try:
                while True:
                    changed_pods = [event.object for event in pods.poll()]
                    changed = [event for watch in storage for event in watch.poll()]
                    if changed or due_s is not None or any(map(_has_claims, changed_pods)):
                        due_s = self._sync()
                    await first_of((watch.wait() for watch in watches), due_s)
            except ApiError as error:
                log.info("storage: %s", error)
                await asyncio.sleep(RETRY_S)

    def _sync(self) -> float | None:
        """Return after how many seconds a volume can be provisioned, or None if none is awaited."""
        self._ephemeral.sync()
        self._binder.sync()
        due_s = self._provisioner.sync()
        self._protection.sync()
        return due_s


def _has_claims(pod: Json) -> bool:
    return any(True for _ in pod_claims(pod))

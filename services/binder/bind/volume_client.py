"""Client of claims and PersistentVolumes at the API server."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime

from msgspec import Struct

from services.binder.bind.claim_progress import SELECTED_NODE
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError, Status, error_of
from shared.kubernetes.paths import node_path, objects_path
from shared.kubernetes.storage_objects import ApiVolume, ApiVolumeClaim
from shared.kubernetes.types import ApiObject
from shared.kubernetes.watch_events import EventReader, LineSplitter, WatchEvent
from shared.model.devices.node import NodeFacts
from shared.model.names import NodeName

BOUND_BY_CONTROLLER = "pv.kubernetes.io/bound-by-controller"
"""No user reserved the volume for its claim: controllers may unbind it again."""
CLAIMS_PATH = "/api/v1/persistentvolumeclaims"
KIND = "PersistentVolumeClaim"
MOST_EVENTS = 50
WATCH_S = 300
"""The API server ends a watch after this time."""
SILENCE_S = 150.0
"""A watch without a bookmark for this long is broken: API servers send one a minute."""


class _ClaimEvent(Struct, frozen=True, rename="camel", gc=False):
    type: str = ""
    reason: str = ""
    message: str = ""
    last_timestamp: datetime | None = None
    event_time: datetime | None = None

    @property
    def at(self) -> float:
        seen_at = self.last_timestamp or self.event_time
        return seen_at.timestamp() if seen_at else 0.0


@dataclass(eq=False)
class VolumeClient:
    client: KubernetesClient

    async def get_claim(self, namespace: str, name: str) -> ApiVolumeClaim | None:
        path = objects_path(namespace, "persistentvolumeclaims", name)
        try:
            return await self.client.read(path, ApiVolumeClaim)
        except NotFoundError:
            return None

    async def get_volume(self, name: str) -> ApiVolume | None:
        try:
            return await self.client.read(_volume_path(name), ApiVolume)
        except NotFoundError:
            return None

    async def get_node(self, name: NodeName) -> NodeFacts | None:
        """Return only name and labels."""
        try:
            node = await self.client.read(node_path(name), ApiObject)
        except NotFoundError:
            return None
        return NodeFacts(name=name, labels=node.metadata.labels)

    async def select_node(self, claim: ApiVolumeClaim, node: NodeName | None) -> ApiVolumeClaim:
        """Have the claim's volume provisioned for a node, or for none.

        Raises ConflictError if the claim has changed since it was read.
        """
        meta = claim.metadata
        patch = {
            "metadata": {
                "uid": meta.uid,
                "resourceVersion": meta.resource_version,
                "annotations": {SELECTED_NODE: node},
            }
        }
        path = objects_path(meta.namespace, "persistentvolumeclaims", meta.name)
        return await self.client.patch_merge(path, patch, ApiVolumeClaim)

    async def reserve_volume(self, volume: ApiVolume, claim: ApiVolumeClaim) -> None:
        """Reserve a volume for a claim; kube-controller-manager then binds both.

        Raises ConflictError if the volume has changed since it was read.
        """
        reference = {
            "apiVersion": "v1",
            "kind": KIND,
            "namespace": claim.metadata.namespace,
            "name": claim.metadata.name,
            "uid": claim.metadata.uid,
        }
        patch = {
            "metadata": {
                "uid": volume.metadata.uid,
                "resourceVersion": volume.metadata.resource_version,
                "annotations": {BOUND_BY_CONTROLLER: "yes"},
            },
            "spec": {"claimRef": reference},
        }
        await self.client.patch_merge(_volume_path(volume.metadata.name), patch)

    async def last_warning(self, namespace: str, claim: str) -> str:
        query = {"fieldSelector": f"involvedObject.kind={KIND},involvedObject.name={claim}"}
        path = objects_path(namespace, "events")
        page = await self.client.list_page(path, query=query, limit=MOST_EVENTS)
        warnings = [event for event in page.read(_ClaimEvent) if event.type == "Warning"]
        newest = max(warnings, key=lambda event: event.at, default=_ClaimEvent())
        return newest.message

    async def version(self) -> str:
        page = await self.client.list_page(CLAIMS_PATH, query={}, limit=1)
        return page.metadata.resource_version

    async def changes(self, version: str) -> AsyncGenerator[WatchEvent[ApiVolumeClaim], None]:
        """The API server ends the watch from time to time."""
        lines = LineSplitter()
        reader = EventReader(ApiVolumeClaim)
        query = {
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        async with self.client.watch(CLAIMS_PATH, query=query, silence_s=SILENCE_S) as chunks:
            async for chunk in chunks:
                for line in lines.feed(chunk):
                    event = reader.read_event(line)
                    if isinstance(event, Status):
                        raise error_of("GET", CLAIMS_PATH, event)
                    if isinstance(event, WatchEvent):
                        yield event


def _volume_path(name: str) -> str:
    return f"/api/v1/persistentvolumes/{name}"

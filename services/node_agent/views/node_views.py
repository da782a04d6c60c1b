"""What others like to read in Kubernetes: node status, node and pod annotations.

Views delay nobody: they are written in the background, the newest wish of each pod only, and again
until the API server takes them.
"""

import asyncio
import logging
from collections.abc import Mapping
from urllib.parse import quote

import msgspec

from services.node_agent.node_state import wait_for_event
from services.node_agent.views.advertisement import NodeAdvertisement
from services.node_agent.views.annotation_lists import merge_own_entries
from services.node_agent.views.node_objects import NodeObjects
from shared.dialects import DIALECTS
from shared.kubernetes.client import KubernetesClient, pod_path
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, RequestError
from shared.model.lease import Lease
from shared.model.names import NodeName, PodUid
from shared.model.quantity import parse_count

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""How often the node object is compared with what it should show."""
PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class _Metadata(msgspec.Struct):
    uid: str = ""
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    version: str = msgspec.field(name="resourceVersion", default="")


class _Status(msgspec.Struct):
    capacity: dict[str, str | int] | None = None
    allocatable: dict[str, str | int] | None = None


class _Node(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    status: _Status = msgspec.field(default_factory=_Status)


class ViewWriter:
    """The views of one node."""

    def __init__(self, kube: KubernetesClient, node: NodeName, clock: Clock) -> None:
        self.kube = kube
        self.objects = NodeObjects(kube, node, clock)
        self.path = f"/api/v1/nodes/{quote(node, safe='')}"
        self.advertisement: NodeAdvertisement | None = None
        self.pods: dict[PodUid, tuple[Lease, dict[str, str]]] = {}
        self._node_changed = asyncio.Event()
        self._pods_changed = asyncio.Event()

    def set_advertisement(self, shown: NodeAdvertisement) -> None:
        """Have the node show this."""
        self.advertisement = shown
        self._node_changed.set()

    def show_allocated(self, lease: Lease, containers: frozenset[str]) -> None:
        """Have the pod show that these containers have their devices."""
        dialect = DIALECTS.get(lease.dialect)
        if dialect is not None:
            self._annotate(lease, dialect.allocated_annotations(lease, containers))

    def show_failed(self, lease: Lease) -> None:
        """Have the pod show that it was refused."""
        dialect = DIALECTS.get(lease.dialect)
        if dialect is not None:
            self._annotate(lease, dialect.failed_annotations(lease))

    def _annotate(self, lease: Lease, annotations: Mapping[str, str]) -> None:
        if annotations:
            _, waiting = self.pods.get(lease.pod, (lease, {}))
            self.pods[lease.pod] = (lease, {**waiting, **annotations})
            self._pods_changed.set()

    async def read_allocatable(self, resource: str) -> int | None:
        """Return how much of a resource the node shows; None if it shows nothing of it."""
        node = await self.kube.read(self.path, _Node)
        amount = (node.status.allocatable or {}).get(resource)
        return None if amount is None else parse_count(amount)

    async def run(self) -> None:
        """Keep the views until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write_node_forever())
            group.create_task(self._write_pods_forever())

    async def _write_node_forever(self) -> None:
        pause_s = PAUSE_S
        while True:
            self._node_changed.clear()
            try:
                if self.advertisement is not None:
                    await self._write_node(self.advertisement)
                pause_s = PAUSE_S
                await wait_for_event(self._node_changed, LOOK_S)
            except LeaseholdError as error:
                logger.warning("the node's view waits %g s: %s", pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _write_node(self, shown: NodeAdvertisement) -> None:
        node = await self.kube.read(self.path, _Node)
        await self._write_metadata(node.metadata, shown)
        missing = {
            part: {
                name: str(amount)
                for name, amount in shown.patched.items()
                if name not in amounts or parse_count(amounts[name]) != amount
            }
            for part, amounts in (
                ("capacity", node.status.capacity or {}),
                ("allocatable", node.status.allocatable or {}),
            )
        }
        if any(missing.values()):
            await self.kube.patch_strategic(f"{self.path}/status", {"status": missing})
        await self.objects.write(shown.objects, node.metadata.uid)

    async def _write_metadata(self, seen: _Metadata, shown: NodeAdvertisement) -> None:
        present = seen.annotations or {}
        stale = {key: text for key, text in shown.annotations.items() if present.get(key) != text}
        entries = merge_own_entries(present, shown.lists)
        labels = {
            key: text for key, text in shown.labels.items() if (seen.labels or {}).get(key) != text
        }
        if stale or entries or labels:
            metadata: dict[str, object] = {"annotations": {**stale, **entries}, "labels": labels}
            if entries:  # only on what was read, or another's entry made meanwhile would be lost
                metadata["resourceVersion"] = seen.version
            await self.kube.patch_merge(self.path, {"metadata": metadata})

    async def _write_pods_forever(self) -> None:
        pause_s = PAUSE_S
        while True:
            await self._pods_changed.wait()
            self._pods_changed.clear()
            while self.pods:
                pod = next(iter(self.pods))
                lease, annotations = self.pods.pop(pod)
                try:
                    await self._write_pod(lease, annotations)
                    pause_s = PAUSE_S
                except (NotFoundError, KubernetesConflictError):
                    logger.debug("pod %s is gone, and its annotations with it", pod)
                except RequestError as error:
                    logger.warning("annotations of pod %s were not taken: %s", pod, error)
                except LeaseholdError as error:
                    _, newer = self.pods.get(pod, (lease, {}))
                    self.pods[pod] = (lease, {**annotations, **newer})
                    logger.warning("pod annotations wait %g s: %s", pause_s, error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _write_pod(self, lease: Lease, annotations: Mapping[str, str]) -> None:
        """Patch the pod if it is still the one that holds the lease."""
        body = {"metadata": {"uid": lease.pod, "annotations": annotations}}
        await self.kube.patch_merge(pod_path(lease.namespace, lease.name), body)

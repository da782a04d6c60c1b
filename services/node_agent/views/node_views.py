"""Writes node status, and annotations of node and pods, for other programs to read.

Of each pod only the newest annotations are written.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing

from services.node_agent.node import Node
from services.node_agent.views.advertisement import NodeAdvertisement
from services.node_agent.views.node_patches import (
    changes_to,
    merge_own_entries,
    merge_own_labels,
    new_object,
    sharing_condition,
)
from shared.dialects import DIALECTS
from shared.dialects.advertised import NodeObject
from shared.dialects.volcano.device_register import HANDSHAKE, REPORT_S, reported
from shared.kubernetes.errors import KubernetesConflictError, KubernetesError, NotFoundError
from shared.kubernetes.known_objects import newer
from shared.kubernetes.paths import node_path, pod_path
from shared.kubernetes.reflector import follow
from shared.kubernetes.types import ApiNode, NodeStatus, ObjectMeta, RawObject
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.leases.lease import Lease
from shared.model.names import PodUid
from shared.model.quantity import parse_count

logger = logging.getLogger(__name__)

NODES = "/api/v1/nodes"
COMPARE_S = 30.0
"""Interval of reads of the Node object, although it is watched."""
OBJECT_RETRY_S = 60.0
"""Pause before a custom object is retried whose kind is not defined, or which we may not write."""
REPLY_S = 3.0
"""A comparison that takes longer makes the agent unready."""
WRITE_AGAIN_S = 1.0
"""Pause after a change of others was overwritten: they may change it back each time."""
FRESH_S = 0.5
"""A status that was read within this time is not read again."""
UNWATCHABLE_RETRY_S = 60.0
"""Pause after the API server refused the watch; the node is still read every `COMPARE_S`."""
MIN_BACKOFF_S = 1.0
"""First pause after the API server refused a write of node status; it doubles."""
MAX_BACKOFF_S = 5.0
"""The longest such pause."""


class ViewWriter:
    def __init__(self, node: Node, *, handshake: bool = False) -> None:
        self.client = node.kubernetes
        self.clock = node.clock
        self.wait = node.wait
        self._object_retry_at: dict[str, float] = {}
        self.node = node.name
        self.known = node
        self.handshake = handshake
        """Older schedulers of Volcano then learn that the device plugin runs."""
        self.path = node_path(node.name)
        self.advertisement: NodeAdvertisement | None = None
        self.pods: dict[PodUid, tuple[Lease, dict[str, str]]] = {}
        self._node_changed = asyncio.Event()
        self._pods_changed = asyncio.Event()
        self._read_at: float | None = None
        self._failure = ""
        self._observed: ApiNode | None = None
        self._written = "0"
        """The watch shows older versions after a write."""
        self._reading = asyncio.Lock()
        self._status = NodeStatus()
        self._status_read_at = float("-inf")

    def unready_reason(self) -> str | None:
        if self._read_at is None or self.clock.ticks() < self._read_at + COMPARE_S + REPLY_S:
            return None
        reason = self._failure or f"no response within {REPLY_S:g} s"
        return f"the Node object cannot be compared with the node's devices: {reason}"

    def set_advertisement(self, advertisement: NodeAdvertisement) -> None:
        self.advertisement = advertisement
        self._node_changed.set()

    def show_allocated(self, lease: Lease, containers: frozenset[str]) -> None:
        if dialect := DIALECTS.get(lease.dialect):
            self._annotate(lease, dialect.allocated_annotations(lease, containers))

    def show_failed(self, lease: Lease) -> None:
        if dialect := DIALECTS.get(lease.dialect):
            self._annotate(lease, dialect.failed_annotations(lease))

    def _annotate(self, lease: Lease, annotations: Mapping[str, str]) -> None:
        if annotations:
            _, pending = self.pods.get(lease.pod, (lease, {}))
            self.pods[lease.pod] = (lease, {**pending, **annotations})
            self._pods_changed.set()

    async def read_allocatable(self, resource: str) -> int | None:
        """Return None if the node has no such resource."""
        async with self._reading:
            if (
                not self._allocatable(resource)
                and self.clock.ticks() >= self._status_read_at + FRESH_S
            ):
                self._status = (await self.client.read(self.path, ApiNode)).status
                self._status_read_at = self.clock.ticks()
        return self._allocatable(resource)

    def _allocatable(self, resource: str) -> int | None:
        amount = self._status.allocatable.get(resource)
        return None if amount is None else parse_count(amount)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sync_node())
            group.create_task(self._watch_node())
            group.create_task(self._sync_pods())
            if self.handshake:
                group.create_task(self._repeat_handshake())

    async def _sync_node(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            self._node_changed.clear()
            try:
                if self.advertisement is not None:
                    await self._write_node(self.advertisement)
                backoff_s = MIN_BACKOFF_S
                await self.wait(self._node_changed, COMPARE_S)
            except LeaseholdError as error:
                self._failure = str(error)
                self._note_away()
                backoff_s = await _back_off("the node view", backoff_s, error)

    async def _watch_node(self) -> None:
        selector = f"metadata.name={self.node}"
        retry_s = UNWATCHABLE_RETRY_S
        changes = follow(self.client, NODES, ApiNode, retry_s=retry_s, field_selector=selector)
        async with aclosing(changes) as batches:
            async for batch in batches:
                if batch.listed:
                    self._note_away()
                for _, node in batch.changed:
                    if node is not None:
                        self._observe(node)
                if batch.refusal is not None:
                    logger.warning(
                        "the Node object is not watched, but read every %g s: %s",
                        COMPARE_S,
                        batch.refusal,
                    )

    def _note_away(self) -> None:
        self.known.api_away_at = self.clock.ticks()

    def _observe(self, node: ApiNode) -> None:
        self._status = node.status
        wanted = self.advertisement
        if wanted is not None and (
            _metadata_changes(node.metadata, wanted)
            or _status_changes(node.status, wanted, self.clock.now())
        ):
            self._observed = node
            self._node_changed.set()

    async def _write_node(self, wanted: NodeAdvertisement) -> None:
        observed = self._observed
        node = observed
        self._observed = None
        if self._read_at is None:
            self._read_at = self.clock.ticks()
        if node is None or newer(self._written, node.metadata.resource_version):
            # Any version may be compared; this one is in the API server's memory.
            node = await self.client.read(f"{self.path}?resourceVersion=0", ApiNode)
            self._status = node.status
        self._read_at = self.clock.ticks()
        self._failure = ""
        if metadata := _metadata_changes(node.metadata, wanted):
            self._take_written(
                await self.client.patch_merge(self.path, {"metadata": metadata}, ApiNode)
            )
        if status := _status_changes(node.status, wanted, self.clock.now()):
            path = f"{self.path}/status"
            self._take_written(await self.client.patch_strategic(path, {"status": status}, ApiNode))
        for obj in wanted.objects:
            await self._write_object(obj, node.metadata.uid)
        if observed is not None:
            await self.clock.sleep(WRITE_AGAIN_S)

    async def _write_object(self, wanted: NodeObject, node_uid: str) -> None:
        """Raises UnavailableError if the API server does not respond.

        A refusal is logged, and retried after `OBJECT_RETRY_S`.
        """
        if self.clock.ticks() < self._object_retry_at.get(wanted.collection, 0.0):
            return
        try:
            await self._sync_object(wanted, node_uid)
        except UnavailableError:
            raise
        except KubernetesError as error:
            self._object_retry_at[wanted.collection] = self.clock.ticks() + OBJECT_RETRY_S
            if isinstance(error, NotFoundError):
                logger.debug("%s is not defined here", wanted.collection)
            else:
                logger.warning("%s %s was not written: %s", wanted.kind, self.node, error)

    async def _sync_object(self, wanted: NodeObject, node_uid: str) -> None:
        path = f"{wanted.collection}/{self.node}"
        now = self.clock.now()
        try:
            stored = await self.client.read(path, RawObject)
        except NotFoundError:
            new = new_object(wanted, self.node, node_uid, now_s=now)
            await self.client.create(wanted.collection, new)
            return
        spec = stored.spec if isinstance(stored.spec, Mapping) else {}
        devices = spec.get("devices") or []
        changes = changes_to(wanted, stored.metadata.labels, devices, now_s=now)
        if changes:
            await self.client.patch_merge(path, changes)

    def _take_written(self, node: ApiNode) -> None:
        self._written = node.metadata.resource_version

    async def _sync_pods(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            await self._pods_changed.wait()
            self._pods_changed.clear()
            while self.pods:
                pod = next(iter(self.pods))
                lease, annotations = self.pods.pop(pod)
                try:
                    await self._write_pod(lease, annotations)
                    backoff_s = MIN_BACKOFF_S
                except (NotFoundError, KubernetesConflictError):
                    logger.debug("pod %s was deleted before its annotations were written", pod)
                except RequestError as error:
                    logger.warning("annotations of pod %s were rejected: %s", pod, error)
                except LeaseholdError as error:
                    _, newer = self.pods.get(pod, (lease, {}))
                    self.pods[pod] = (lease, {**annotations, **newer})
                    backoff_s = await _back_off("pod annotations", backoff_s, error)

    async def _write_pod(self, lease: Lease, annotations: Mapping[str, str]) -> None:
        body = {"metadata": {"uid": lease.pod, "annotations": annotations}}
        await self.client.patch_merge(pod_path(lease.namespace, lease.name), body)

    async def _repeat_handshake(self) -> None:
        """Write the handshake until cancelled, whatever a scheduler has changed in it."""
        while True:
            body = {"metadata": {"annotations": {HANDSHAKE: reported(self.clock.now())}}}
            try:
                await self.client.patch_merge(self.path, body)
            except LeaseholdError as error:
                logger.warning("the handshake was not written: %s", error)
            await asyncio.sleep(REPORT_S)


async def _back_off(what: str, pause_s: float, error: LeaseholdError) -> float:
    logger.warning("%s could not be written, retrying in %g s: %s", what, pause_s, error)
    await asyncio.sleep(pause_s)
    return min(2 * pause_s, MAX_BACKOFF_S)


def _metadata_changes(current: ObjectMeta, wanted: NodeAdvertisement) -> dict[str, object]:
    entries = merge_own_entries(current.annotations, wanted.annotation_entries)
    own_labels, record = merge_own_labels(current.labels, current.annotations, wanted.own_labels)
    annotations = {**_stale(current.annotations, wanted.annotations), **entries, **record}
    labels = {**_stale(current.labels, wanted.labels), **own_labels}
    if not annotations and not labels:
        return {}
    changes: dict[str, object] = {"annotations": annotations, "labels": labels}
    if entries:  # a conflict protects entries that others add meanwhile
        changes["resourceVersion"] = current.resource_version
    return changes


def _stale(current: Mapping[str, str], wanted: Mapping[str, str | None]) -> dict[str, str | None]:
    return {key: text for key, text in wanted.items() if current.get(key) != text}


def _status_changes(
    current: NodeStatus, wanted: NodeAdvertisement, now_s: float
) -> dict[str, object]:
    parts = {"capacity": current.capacity, "allocatable": current.allocatable}
    missing = {
        part: {
            name: str(amount)
            for name, amount in wanted.node_status.items()
            if name not in amounts or parse_count(amounts[name]) != amount
        }
        for part, amounts in parts.items()
    }
    conditions = sharing_condition(current.conditions, wanted.sharing_problem, now_s=now_s)
    changes: dict[str, object] = dict(missing) if any(missing.values()) else {}
    return {**changes, "conditions": conditions} if conditions else changes

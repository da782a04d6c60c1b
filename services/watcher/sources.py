"""The watcher's sources: two reflectors and a fresh list, read into the watcher's own values."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from services.watcher import nodes, pods
from services.watcher.observed_pod import PodSeen
from services.watcher.pod_groups import GroupNews, cannot_read
from shared.dialects.pod_groups import PATHS, PodGroupKind
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.known_objects import ObjectAdded, ObjectDeleted, ObjectUpdated
from shared.kubernetes.reflector import Reflector
from shared.kubernetes.types import ApiNode, ApiPod, PodGroup
from shared.model.errors import LeaseholdError, RequestError
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import BoundPod, PodsListed
from shared.model.lease_copy import ANNOTATION
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.node import NodeFacts

logger = logging.getLogger(__name__)

PAGE = 500
LOOK_S = 30.0
"""How often a kind that the API server does not know is looked for again."""
GLANCE_S = 1.0
"""How often at the most, if pods name its groups."""
PIECE_BYTES = 256 * 1024
"""Leases' texts in one piece of a listing: a message must hold it."""
LEASE_BYTES = 64 * 1024
"""A lease's text is never this long; the pod's owner may have written something else there."""


@dataclass(slots=True)
class PodReflector:
    """Pods through a reflector."""

    kube: KubernetesClient
    reader: pods.PodReader
    synced: bool = False
    last: dict[PodUid, PodSeen] = field(default_factory=dict)

    async def batches(self) -> AsyncIterator[list[tuple[PodSeen | None, PodSeen | None]]]:
        """Yield (now, before) of every change."""
        reflector = Reflector(self.kube, "/api/v1/pods", ApiPod)
        async with aclosing(reflector.batches()) as batches:
            async for batch in batches:
                seen: list[tuple[PodSeen | None, PodSeen | None]] = []
                for change in batch:
                    match change:
                        case ObjectAdded(item=item) | ObjectUpdated(item=item):
                            seen.append(self._seen(item))
                        case ObjectDeleted(item=item):
                            seen.append((None, self._forget(item)))
                        case _:
                            self.synced = True
                yield seen

    def _seen(self, pod: ApiPod) -> tuple[PodSeen, PodSeen | None]:
        now = self.reader.read(pod)
        before = self.last.get(now.pod)
        self.last[now.pod] = now
        return now, before

    def _forget(self, pod: ApiPod) -> PodSeen:
        known = self.last.pop(PodUid(pod.metadata.uid), None)
        return known or self.reader.read(pod)


@dataclass(slots=True)
class NodeReflector:
    """Nodes through a reflector."""

    kube: KubernetesClient
    synced: bool = False

    async def batches(
        self,
    ) -> AsyncIterator[list[tuple[NodeName, NodeFacts | None, DeviceReported | None]]]:
        """Yield every change: the node's facts, or none when it is gone."""
        reflector = Reflector(self.kube, "/api/v1/nodes", ApiNode)
        async with aclosing(reflector.batches()) as batches:
            async for batch in batches:
                seen: list[tuple[NodeName, NodeFacts | None, DeviceReported | None]] = []
                for change in batch:
                    match change:
                        case ObjectAdded(item=item) | ObjectUpdated(item=item):
                            seen += self._read(item)
                        case ObjectDeleted(item=item):
                            seen.append((NodeName(item.metadata.name), None, None))
                        case _:
                            self.synced = True
                yield seen

    def _read(
        self, node: ApiNode
    ) -> list[tuple[NodeName, NodeFacts | None, DeviceReported | None]]:
        try:
            facts = nodes.read(node)
            return [(facts.name, facts, nodes.foreign_devices(node, now_s=time.time()))]
        except RequestError as error:
            logger.warning("node %s is passed over: %s", node.metadata.name, error)
            return []


@dataclass(slots=True)
class GroupReflectors:
    """PodGroups of every kind that the API server knows; one that it does not is asked for again.

    CustomResourceDefinitions come and go; looking for one costs a request every `look_s` seconds,
    and one a second while pods come that name such a group.
    """

    kube: KubernetesClient
    look_s: float = LOOK_S
    _looked_at: float = -GLANCE_S
    _seen: dict[PodGroupKind, asyncio.Event] = field(
        default_factory=lambda: {kind: asyncio.Event() for kind in PATHS}
    )

    async def batches(self) -> AsyncIterator[GroupNews]:
        """Yield every change of how many pods of a group run together."""
        news: asyncio.Queue[GroupNews] = asyncio.Queue(maxsize=1)
        async with asyncio.TaskGroup() as tasks:
            for kind in PATHS:
                tasks.create_task(self._follow(kind, news))
            while True:
                yield await news.get()

    async def appeared(self, kinds: frozenset[PodGroupKind]) -> set[PodGroupKind]:
        """Return which of these kinds, absent so far, are there by now: news of them follow."""
        now = time.monotonic()
        if now < self._looked_at + GLANCE_S:
            return set()
        self._looked_at = now
        return {kind for kind in kinds if await self._is_there(kind)}

    async def _is_there(self, kind: PodGroupKind) -> bool:
        try:
            await self.kube.list_page(PATHS[kind], query={}, limit=1, continue_token="")
        except LeaseholdError:
            return False
        self._seen[kind].set()
        return True

    async def _follow(self, kind: PodGroupKind, news: asyncio.Queue[GroupNews]) -> None:
        told: GroupNews | None = None
        while True:
            self._seen[kind].clear()
            try:
                await self._reflect(kind, news)
            except NotFoundError:
                found = GroupNews(kind=kind, absent=True)
            except RequestError as error:
                found = cannot_read(kind, str(error))
            if found != told:
                if found.unreadable:
                    logger.warning("%s; looking again every %g s", found.unreadable, self.look_s)
                await news.put(found)
                told = found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.look_s):
                    await self._seen[kind].wait()

    async def _reflect(self, kind: PodGroupKind, news: asyncio.Queue[GroupNews]) -> None:
        """Tell of changes for ever. Raises RequestError if there can be no first list."""
        reflector = Reflector(self.kube, PATHS[kind], PodGroup)
        async with aclosing(reflector.batches()) as batches:
            async for batch in batches:
                listed, sizes = False, dict[str, int | None]()
                for change in batch:
                    match change:
                        case ObjectAdded(item=item) | ObjectUpdated(item=item):
                            sizes[_key(item)] = item.spec.min_member
                        case ObjectDeleted(item=item):
                            sizes[_key(item)] = None
                        case _:
                            listed = True
                await news.put(GroupNews(kind=kind, sizes=tuple(sizes.items()), listed=listed))


def _key(group: PodGroup) -> str:
    return f"{group.metadata.namespace}/{group.metadata.name}"


@dataclass(slots=True)
class FreshListing:
    """Bound pods of ours, listed now: never from what a watch may have missed."""

    kube: KubernetesClient
    schedulers: frozenset[str]

    async def pieces(self) -> AsyncIterator[PodsListed]:
        """Yield one complete list in pieces; the last piece says how many there were."""
        listing, began = uuid.uuid4().hex, time.time()
        bound: list[BoundPod] = []
        token = ""
        while True:
            page = await self.kube.list_page(
                "/api/v1/pods",
                query={"fieldSelector": "spec.nodeName!="},
                limit=PAGE,
                continue_token=token,
            )
            pods_here = (msgspec.json.decode(raw, type=ApiPod) for raw in page.items or ())
            bound += [self._bound(pod) for pod in pods_here if self._ours(pod)]
            token = page.metadata.continue_
            if not token:
                break
        pieces = _pieces(bound)
        for number, piece in enumerate(pieces):
            yield PodsListed(
                listing_id=listing,
                chunk=number,
                chunks=len(pieces),
                pods=tuple(piece),
                listed_at=began,
            )

    def _ours(self, pod: ApiPod) -> bool:
        over = pod.status.phase in {"Succeeded", "Failed"}
        return pod.spec.scheduler_name in self.schedulers and not over

    def _bound(self, pod: ApiPod) -> BoundPod:
        lease = pod.metadata.annotations.get(ANNOTATION, "")
        return BoundPod(
            pod=PodUid(pod.metadata.uid),
            namespace=Namespace(pod.metadata.namespace),
            name=pod.metadata.name,
            node=NodeName(pod.spec.node_name),
            lease=lease if len(lease) <= LEASE_BYTES else "",
        )


def _pieces(pods: Iterable[BoundPod]) -> list[list[BoundPod]]:
    """Cut a listing into pieces that fit a message each; there is always one."""
    pieces: list[list[BoundPod]] = [[]]
    size = 0
    for pod in pods:
        if len(pieces[-1]) >= PAGE or (pieces[-1] and size + len(pod.lease) > PIECE_BYTES):
            pieces.append([])
            size = 0
        pieces[-1].append(pod)
        size += len(pod.lease)
    return pieces

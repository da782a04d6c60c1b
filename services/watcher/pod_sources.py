"""The watcher's sources of pods and namespaces, and lists of our pods."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Container, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import zip_longest

from services.watcher.claim_sources import RETRY_S, ClaimReflector
from shared.kubernetes.client import PAGE_SIZE, KubernetesClient
from shared.kubernetes.known_objects import as_number
from shared.kubernetes.reflector import Reflector, follow
from shared.kubernetes.types import ApiObject, ApiPod, PodOutline
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.pod_events import LEASE_PRESENT, BoundPod, ListedPods, PodsListed
from shared.model.leases.lease_copy import ANNOTATION
from shared.model.names import Namespace, NodeName, PodUid
from shared.pods.observed_pod import TERMINAL, ObservedPod
from shared.pods.pod_parser import PodParser

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
"""Of leases, in a chunk that must fit a message."""
CHUNK_UIDS = 4096
CHUNK_CLAIMS = 100
"""Each has a copy of at most 10 KiB."""
LEASE_BYTES = 64 * 1024
"""A longer annotation is not a lease: the pod's owner may write anything there."""


@dataclass(slots=True)
class PodReflector:
    client: KubernetesClient
    parser: PodParser
    synced: bool = False
    revision: int = 0
    restored: bool = False
    """The API server may have gone back to an older state."""
    observed: dict[PodUid, ObservedPod] = field(default_factory=dict)

    async def batches(self) -> AsyncIterator[list[tuple[ObservedPod | None, ObservedPod | None]]]:
        """Yield pairs of a pod as it is and as it was."""
        reflector = Reflector(self.client, "/api/v1/pods", ApiPod)
        async with aclosing(reflector.batches()) as batches:
            async for batch in batches:
                changes = [
                    self._update(item)
                    if item
                    else (None, self.observed.pop(PodUid(named.uid), None))
                    for named, item in batch.changed
                ]
                self.synced, self.restored = self.synced or batch.listed, batch.restored
                if self.synced:
                    self.revision = as_number(reflector.resource_version)
                yield changes

    def _update(self, pod: ApiPod) -> tuple[ObservedPod | None, ObservedPod | None]:
        now = self.parser.parse(pod)
        before = self.observed.get(now.pod)
        self.observed[now.pod] = now
        return now, before


@dataclass(slots=True)
class NamespaceReflector:
    client: KubernetesClient
    synced: asyncio.Event = field(default_factory=asyncio.Event)
    """All were listed, or they cannot be read."""
    retry_s: float = RETRY_S

    async def batches(self) -> AsyncIterator[dict[Namespace, Mapping[str, str] | None]]:
        following = follow(self.client, "/api/v1/namespaces", ApiObject, retry_s=self.retry_s)
        async with aclosing(following) as batches:
            async for batch in batches:
                if batch.refusal is not None:
                    logger.warning("namespaces cannot be read: %s; retrying", batch.refusal)
                else:
                    yield {
                        Namespace(named.name): item.metadata.labels if item else None
                        for named, item in batch.changed
                    }
                self.synced.set()


@dataclass(slots=True)
class ManagedPodLister:
    """A watch may have missed some pods."""

    client: KubernetesClient
    schedulers: frozenset[str]
    claims: ClaimReflector

    async def chunks(
        self, request_ids: tuple[str, ...] = (), claiming: Container[PodUid] = ()
    ) -> AsyncIterator[PodsListed]:
        """Yield a complete list in chunks, with the IDs of the requests that it answers.

        Only a list that answers requests contains leases, for a rebuild. `claiming` are pods of
        other schedulers.
        """
        list_id = uuid.uuid4().hex
        bound: list[BoundPod] = []
        unbound: list[PodUid] = []
        async for page in self.client.pages("/api/v1/pods"):
            for pod in page.read(PodOutline):
                if self._is_ours(pod):
                    if pod.spec.node_name:
                        bound.append(_bound_pod(pod, with_lease=bool(request_ids)))
                    else:
                        unbound.append(PodUid(pod.metadata.uid))
                elif pod.metadata.uid in claiming and not pod.spec.node_name:
                    unbound.append(PodUid(pod.metadata.uid))
        chunks = _chunks(bound, unbound, await self.claims.list_all())
        for number, chunk in enumerate(chunks):
            yield PodsListed(
                listing_id=list_id,
                chunk=number,
                chunks=len(chunks),
                pods=chunk,
                request_ids=request_ids,
            )

    def _is_ours(self, pod: PodOutline) -> bool:
        terminated = pod.status.phase in TERMINAL
        return pod.spec.scheduler_name in self.schedulers and not terminated


def _bound_pod(pod: PodOutline, *, with_lease: bool) -> BoundPod:
    lease = pod.metadata.annotations.get(ANNOTATION, "")
    if len(lease) > LEASE_BYTES:
        lease = ""
    return BoundPod(
        pod=PodUid(pod.metadata.uid),
        namespace=Namespace(pod.metadata.namespace),
        name=pod.metadata.name,
        node=NodeName(pod.spec.node_name),
        lease=lease if with_lease else lease and LEASE_PRESENT,
    )


def _chunks(
    bound: Iterable[BoundPod], unbound: Sequence[PodUid], claims: Sequence[AllocatedClaim]
) -> list[ListedPods]:
    """A chunk fits a message; an empty list has one."""
    chunks: list[list[BoundPod]] = [[]]
    size = 0
    for pod in bound:
        if len(chunks[-1]) >= PAGE_SIZE or (chunks[-1] and size + len(pod.lease) > CHUNK_BYTES):
            chunks.append([])
            size = 0
        chunks[-1].append(pod)
        size += len(pod.lease)
    parts = [
        tuple(unbound[first : first + CHUNK_UIDS]) for first in range(0, len(unbound), CHUNK_UIDS)
    ]
    pieces = [
        tuple(claims[first : first + CHUNK_CLAIMS]) for first in range(0, len(claims), CHUNK_CLAIMS)
    ]
    return [
        ListedPods(bound=tuple(pods), unbound=uids, claims=allocated)
        for pods, uids, allocated in zip_longest(chunks, parts, pieces, fillvalue=())
    ]

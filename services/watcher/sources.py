"""The watcher's sources in the API server: pods, nodes, PodGroups, and a list of our pods."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Container, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import msgspec

from services.watcher.claiming_pods import ClaimUpdate, requested_classes
from services.watcher.pod_groups import (
    SCHEDULED,
    KnownGroup,
    PodGroupChanges,
    PodGroupIndex,
    known_group,
    unreadable_groups,
)
from shared.dialects import LEDGER_RESOURCES
from shared.dialects.kai.managers import managing_condition
from shared.dialects.pod_groups import PATHS, PodGroupKind
from shared.dialects.pod_requests import cordoned_devices
from shared.dialects.volcano import device_register
from shared.kubernetes.client import PAGE_SIZE, KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.kubernetes.known_objects import as_number
from shared.kubernetes.paths import objects_path
from shared.kubernetes.reflector import Batch, Reflector, follow
from shared.kubernetes.resource_claims import (
    CLAIMS_PATH,
    CLASSES_PATH,
    ApiResourceClaim,
    DeviceClass,
    allocated_claim,
)
from shared.kubernetes.types import ApiNode, ApiObject, ApiPod, PodGroup, PodOutline
from shared.model.bounds import MOST_FACTS, check_bounds, check_size
from shared.model.devices.node import AGENT_ANNOTATION, CORDON_MANAGER, NodeFacts, Taint
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.node_events import DevicesRegistered
from shared.model.events.pod_events import LEASE_PRESENT, BoundPod, ListedPods, PodsListed
from shared.model.leases.lease_copy import ANNOTATION
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.quantity import parse_available, timestamp
from shared.pods.observed_pod import TERMINAL, ObservedPod
from shared.pods.pod_parser import PodParser

logger = logging.getLogger(__name__)

FIELD_MANAGER = "leasehold"
RETRY_S = 30.0
"""The interval at which a kind is requested that the API server does not know."""
APPEARANCE_CHECK_S = 1.0
"""The shortest such interval, while pods name groups of the kind."""
CHUNK_BYTES = 256 * 1024
"""Of leases, in a chunk that must fit a message."""
CHUNK_UIDS = 4096
CHUNK_CLAIMS = 100
"""Each has a copy of at most 10 KiB."""
MOST_AUTHOR = 128
"""The API server's limit for the name of a field manager."""
LEASE_BYTES = 64 * 1024
"""A longer annotation is not a lease: the pod's owner may write anything there."""


@dataclass(slots=True)
class ClaimReflector:
    client: KubernetesClient
    retry_s: float = RETRY_S
    unreadable: str = field(default="", init=False)
    _logged: str = field(default="", init=False)

    async def batches(self) -> AsyncIterator[list[ClaimUpdate]]:
        following = follow(self.client, CLAIMS_PATH, ApiResourceClaim, retry_s=self.retry_s)
        async with aclosing(following) as batches:
            async for batch in batches:
                if isinstance(batch.refusal, NotFoundError):
                    self._log_once(f"ResourceClaims are not watched: {batch.refusal}")
                elif batch.refusal is not None:
                    self._refused(batch.refusal)
                else:
                    if batch.listed:
                        self.unreadable = ""
                    yield [
                        ClaimUpdate(
                            PodUid(named.uid),
                            Namespace(named.namespace),
                            named.name,
                            self._parse(item) if item else None,
                            requested_classes(item) if item else frozenset(),
                        )
                        for named, item in batch.changed
                    ]

    async def list_all(self) -> tuple[AllocatedClaim, ...]:
        """Return none without the API or the permission.

        The absence of a claim from this list alone ends no lease.
        """
        allocated: list[AllocatedClaim] = []
        try:
            async for page in self.client.pages(CLAIMS_PATH):
                claims = page.read(ApiResourceClaim, skip=self._ignore)
                allocated += filter(None, map(self._parse, claims))
        except NotFoundError:
            pass
        except RequestError as error:
            self._refused(error)
            return ()
        self.unreadable = ""
        return tuple(allocated)

    def _parse(self, claim: ApiResourceClaim) -> AllocatedClaim | None:
        try:
            return allocated_claim(claim)
        except RequestError as error:
            self._ignore(error)
            return None

    def _ignore(self, error: RequestError) -> None:
        self._log_once(f"a claim is ignored: {error}")

    def _refused(self, error: RequestError) -> None:
        self.unreadable = f"ResourceClaims cannot be read: {error}"
        self._log_once(self.unreadable)

    def _log_once(self, text: str) -> None:
        if text != self._logged:
            logger.warning("%s", text)
            self._logged = text


@dataclass(slots=True)
class DeviceClassReflector:
    """Which DeviceClasses are for our devices."""

    client: KubernetesClient
    retry_s: float = RETRY_S

    async def batches(self) -> AsyncIterator[dict[str, bool]]:
        following = follow(self.client, CLASSES_PATH, DeviceClass, retry_s=self.retry_s)
        refused = ""
        async with aclosing(following) as batches:
            async for batch in batches:
                if batch.refusal is None:
                    yield {
                        named.name: item is not None and item.is_ours
                        for named, item in batch.changed
                    }
                elif str(batch.refusal) != refused and not isinstance(batch.refusal, NotFoundError):
                    refused = str(batch.refusal)
                    logger.warning(
                        "pods of other schedulers that wait for ResourceClaims are not listed: %s",
                        refused,
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUpdate:
    name: NodeName
    facts: NodeFacts | None = None
    """None if it was deleted."""
    devices: DevicesRegistered | None = None
    revision: int = 0
    """0 if unknown."""


def author_of(node: ApiNode, *path: str) -> str:
    """Return which user or program wrote a field last, or an empty text.

    kubectl names no user: only the audit log of the API server has them.
    """
    manager = node.metadata.manager_of(*path)[:MOST_AUTHOR]
    names_none = manager == FIELD_MANAGER or manager.startswith("kubectl")
    return "" if names_none else manager.removeprefix(CORDON_MANAGER)


def parse_node(node: ApiNode) -> NodeFacts:
    """Raises RequestError for an invalid quantity, and for what is too large."""
    allocatable = parse_available(node.status.allocatable)
    author = partial(author_of, node, "metadata", "annotations")
    closed = cordoned_devices(node.metadata.annotations, author)
    unschedulable = node.spec.unschedulable
    check_size("metadata.labels", len(msgspec.json.encode(node.metadata.labels)), MOST_FACTS)
    facts = NodeFacts(
        name=NodeName(node.metadata.name),
        labels=node.metadata.labels,
        taints=tuple(
            Taint(key=taint.key, value=taint.value, effect=taint.effect)
            for taint in node.spec.taints
        ),
        unschedulable=unschedulable,
        cordoned_by=author_of(node, "spec", "unschedulable") if unschedulable else "",
        allocatable={key: n for key, n in allocatable.items() if key not in LEDGER_RESOURCES},
        unserved_resources=tuple(
            sorted(key for key in LEDGER_RESOURCES if allocatable.get(key) == 0)
        ),
        other_manager=managing_condition(
            condition.type for condition in node.status.conditions if condition.status == "True"
        ),
        excluded_devices=tuple(closed),
        exclusions=tuple(closed.values()),
    )
    check_bounds(facts, "the node")
    return facts


def foreign_devices(node: ApiNode, *, now_s: float) -> DevicesRegistered | None:
    """Return what Volcano's device plugin registered, or None on nodes of our agent.

    There are no devices without slots in allocatable, or if an older scheduler has marked the
    plugin as not responding.
    """
    annotations = node.metadata.annotations
    if AGENT_ANNOTATION in annotations:
        return None
    allocatable = parse_available(node.status.allocatable)
    report = DevicesRegistered(
        node=NodeName(node.metadata.name),
        devices=device_register.registered_devices(annotations, allocatable, now_s=now_s),
        served=device_register.SERVED,
        reported_at=now_s,
    )
    check_bounds(report, "the devices that another device plugin registered")
    return report


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
class NodeReflector:
    client: KubernetesClient
    revision: int | None = None
    """0 if unknown, None before the first list."""
    restored: bool = False

    async def batches(self) -> AsyncIterator[list[NodeUpdate]]:
        reflector = Reflector(self.client, "/api/v1/nodes", ApiNode)
        async with aclosing(reflector.batches()) as batches:
            async for batch in batches:
                self.restored = batch.restored
                if batch.listed or self.revision is not None:
                    self.revision = as_number(reflector.resource_version)
                yield [
                    self._parse(NodeName(named.name), named.resource_version, node)
                    for named, node in batch.changed
                ]

    def _parse(self, name: NodeName, resource_version: str, node: ApiNode | None) -> NodeUpdate:
        revision = as_number(resource_version)
        devices = None
        if node is None:
            return NodeUpdate(name=name, revision=revision)
        try:
            facts = parse_node(node)
            devices = foreign_devices(node, now_s=time.time())
        except RequestError as error:
            logger.warning("node %s gets no pods: %s", name, error)
            facts = NodeFacts(name=name, unschedulable=True)
        except Exception:  # of one node: the others are watched all the same
            logger.exception("node %s gets no pods: a bug in how it is read", name)
            facts = NodeFacts(name=name, unschedulable=True)
        return NodeUpdate(name=name, facts=facts, devices=devices, revision=revision)


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
class PodGroupReflectors:
    client: KubernetesClient
    retry_s: float = RETRY_S
    _checked_at: float = -APPEARANCE_CHECK_S
    _appeared: dict[PodGroupKind, asyncio.Event] = field(
        default_factory=lambda: {kind: asyncio.Event() for kind in PATHS}
    )

    async def batches(self) -> AsyncIterator[PodGroupChanges]:
        queue: asyncio.Queue[PodGroupChanges] = asyncio.Queue(maxsize=1)
        async with asyncio.TaskGroup() as tasks:
            for kind in PATHS:
                tasks.create_task(self._watch(kind, queue))
            while True:
                yield await queue.get()

    async def appeared(self, kinds: frozenset[PodGroupKind]) -> set[PodGroupKind]:
        now = time.monotonic()
        if now < self._checked_at + APPEARANCE_CHECK_S:
            return set()
        self._checked_at = now
        return {kind for kind in kinds if await self._is_installed(kind)}

    async def _is_installed(self, kind: PodGroupKind) -> bool:
        try:
            await self.client.list_page(PATHS[kind][0], query={}, limit=1, continue_token="")
        except LeaseholdError:
            return False
        self._appeared[kind].set()
        return True

    async def _watch(self, kind: PodGroupKind, queue: asyncio.Queue[PodGroupChanges]) -> None:
        refused: PodGroupChanges | None = None
        paths = PATHS[kind]
        appeared = self._appeared[kind]
        following = follow(self.client, paths, PodGroup, retry_s=self.retry_s, appeared=appeared)
        async with aclosing(following) as batches:
            async for batch in batches:
                changes = _group_changes(kind, batch)
                if batch.refusal is not None and changes == refused:
                    continue
                refused = changes if batch.refusal is not None else None
                if changes.unreadable and not isinstance(batch.refusal, NotFoundError):
                    logger.warning("%s; retrying every %g s", changes.unreadable, self.retry_s)
                await queue.put(changes)


def _group_changes(kind: PodGroupKind, batch: Batch[PodGroup]) -> PodGroupChanges:
    if isinstance(batch.refusal, NotFoundError):
        if kind is PodGroupKind.KUBERNETES:
            return unreadable_groups(kind, "the API server does not serve PodGroups")
        return PodGroupChanges(kind=kind, absent=True)
    if batch.refusal is not None:
        return unreadable_groups(kind, str(batch.refusal))
    groups = {
        f"{named.namespace}/{named.name}": known_group(kind, item) if item else None
        for named, item in batch.changed
    }
    return PodGroupChanges(
        kind=kind, groups=tuple(groups.items()), synced=batch.listed, path=batch.path
    )


@dataclass(slots=True)
class PodGroupConditions:
    """Writes what kube-scheduler writes about its PodGroups: whether enough pods have a node.

    Once that is true, it stays: pods that come later are no part of the first start.
    """

    client: KubernetesClient
    _pods: dict[str, dict[PodUid, ObservedPod]] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)
    _logged: str = ""

    def observe(self, batch: Sequence[tuple[ObservedPod | None, ObservedPod | None]]) -> None:
        changes = [state for now, before in batch for state in ((before, False), (now, True))]
        for pod, is_there in changes:
            if pod is None or pod.group is None or pod.group.kind is not PodGroupKind.KUBERNETES:
                continue
            name = pod.group.name
            self._changed.add(name)
            members = self._pods.setdefault(name, {})
            if is_there:
                members[pod.pod] = pod
            else:
                members.pop(pod.pod, None)
            if not members:
                del self._pods[name]

    def retry(self, names: Iterable[str]) -> None:
        self._changed.update(names)

    async def write(self, groups: PodGroupIndex, now_s: float) -> None:
        """Raises UnavailableError if the API server does not respond; the rest is written later."""
        while self._changed:
            name = self._changed.pop()
            group = groups.get(PodGroupKind.KUBERNETES, name)
            condition = group and self._condition(name, group, now_s)
            if group is None or condition is None:
                continue
            meta = group.metadata
            served = groups.paths[PodGroupKind.KUBERNETES]
            api, _, _ = served.rpartition("/")
            path = objects_path(meta.namespace, "podgroups", meta.name, group=api)
            body = {
                "apiVersion": api.removeprefix("/apis/"),
                "kind": "PodGroup",
                "metadata": {
                    "name": meta.name,
                    "namespace": meta.namespace,
                    "uid": meta.uid,
                    "resourceVersion": meta.resource_version,
                },
                "status": {"conditions": [condition]},
            }
            try:
                await self.client.apply(f"{path}/status", body, manager=FIELD_MANAGER)
            except (NotFoundError, KubernetesConflictError):
                continue
            except UnavailableError:
                self._changed.add(name)
                raise
            except RequestError as error:
                self._log_once(f"conditions of PodGroups cannot be written: {error}")

    def _condition(self, name: str, group: KnownGroup, now_s: float) -> Mapping[str, Any] | None:
        pods = self._pods.get(name, {}).values()
        before = group.scheduled
        if before.status == "True" or not any(pod.ours for pod in pods):
            return None
        placed = sum(pod.node is not None for pod in pods)
        waiting = [pod for pod in pods if pod.is_pending and pod.reason]
        if placed >= max(group.min_member, 1):
            now = ("True", "Scheduled", f"{placed} pods have a node")
        elif waiting:
            oldest = min(waiting, key=lambda pod: (pod.created_at, pod.pod))
            now = ("False", "Unschedulable", f"pod {oldest.name}: {oldest.reason}")
        else:
            return None
        if now == (before.status, before.reason, before.message):
            return None
        status, reason, message = now
        return {
            "type": SCHEDULED,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": group.metadata.generation,
            "lastTransitionTime": before.last_transition_time
            if status == before.status
            else timestamp(now_s),
        }

    def _log_once(self, text: str) -> None:
        if text != self._logged:
            logger.warning("%s", text)
            self._logged = text


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

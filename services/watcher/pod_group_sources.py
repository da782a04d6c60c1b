"""The watcher's sources of PodGroups, and what it writes about them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from services.watcher.claim_sources import RETRY_S
from services.watcher.pod_groups import (
    SCHEDULED,
    KnownGroup,
    PodGroupChanges,
    PodGroupIndex,
    known_group,
    unreadable_groups,
)
from shared.dialects.pod_groups import PATHS, PodGroupKind
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.kubernetes.paths import objects_path
from shared.kubernetes.reflector import Batch, follow
from shared.kubernetes.types import PodGroup
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.names import PodUid
from shared.model.quantity import timestamp
from shared.pods.observed_pod import ObservedPod

logger = logging.getLogger(__name__)

FIELD_MANAGER = "leasehold"
APPEARANCE_CHECK_S = 1.0
"""The shortest interval at which an absent kind is requested, while pods name groups of it."""


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
        self._changed.update(name for name in names if name in self._pods)

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

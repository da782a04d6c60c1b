"""Custom objects that show a node's devices: written where their kind is defined."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from shared.dialects.advertised import NodeObject
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesError, NotFoundError
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.names import NodeName

logger = logging.getLogger(__name__)

AGAIN_S = 60.0
"""After this long a kind that was not defined, or not ours to write, is tried again."""
SINCE = "lastTransitionTime"

Entry = Mapping[str, Any]


class _Metadata(msgspec.Struct):
    labels: dict[str, str] | None = None


class _Spec(msgspec.Struct):
    devices: list[dict[str, Any]] | None = None


class _Stored(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec | None = None


class NodeObjects:
    """The objects of one node; they belong to it, and are deleted with it."""

    def __init__(self, kube: KubernetesClient, node: NodeName, clock: Clock) -> None:
        self.kube = kube
        self.node = node
        self.clock = clock
        self._rests: dict[str, float] = {}

    async def write(self, objects: Iterable[NodeObject], node_uid: str) -> None:
        """Create what is missing and change what differs, of each kind that is defined.

        Labels and annotations of others stay. Raises UnavailableError if the API server does not
        answer; a refusal is logged, and the object tried again after a minute.
        """
        for wanted in objects:
            if self.clock.ticks() < self._rests.get(wanted.collection, 0.0):
                continue
            try:
                await self._write(wanted, node_uid)
            except UnavailableError:
                raise
            except NotFoundError:
                self._rest(wanted)
                logger.debug("%s is not defined here", wanted.collection)
            except KubernetesError as error:
                self._rest(wanted)
                logger.warning("%s %s is not written: %s", wanted.kind, self.node, error)

    def _rest(self, wanted: NodeObject) -> None:
        self._rests[wanted.collection] = self.clock.ticks() + AGAIN_S

    async def _write(self, wanted: NodeObject, node_uid: str) -> None:
        path = f"{wanted.collection}/{self.node}"
        now = self.clock.now()
        try:
            stored = await self.kube.read(path, _Stored)
        except NotFoundError:
            await self.kube.create(
                wanted.collection, new_object(wanted, self.node, node_uid, now_s=now)
            )
            return
        devices = (stored.spec.devices if stored.spec else None) or []
        changes = changes_to(wanted, stored.metadata.labels or {}, devices, now_s=now)
        if changes:
            await self.kube.patch_merge(path, changes)


def new_object(wanted: NodeObject, node: NodeName, node_uid: str, *, now_s: float) -> Entry:
    """Return the whole object, owned by its node."""
    _, _, group, version, _ = wanted.collection.split("/")
    return {
        "apiVersion": f"{group}/{version}",
        "kind": wanted.kind,
        "metadata": {
            "name": node,
            "labels": {key: text for key, text in wanted.labels.items() if text is not None},
            "ownerReferences": [
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "name": node,
                    "uid": node_uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {"devices": date_conditions(wanted.devices, (), now_s=now_s)},
    }


def changes_to(
    wanted: NodeObject,
    labels: Mapping[str, str],
    devices: Sequence[Entry],
    *,
    now_s: float,
) -> Entry:
    """Return what a merge patch must change in a stored object; nothing where all is well."""
    stale = {key: text for key, text in wanted.labels.items() if labels.get(key) != text}
    fresh = date_conditions(wanted.devices, devices, now_s=now_s)
    changes: dict[str, Any] = {}
    if stale:
        changes["metadata"] = {"labels": stale}
    if fresh != list(devices):
        changes["spec"] = {"devices": fresh}
    return changes


def date_conditions(
    devices: Iterable[Entry], before: Iterable[Entry], *, now_s: float
) -> list[Entry]:
    """Date every condition: since before if it was so before, since now otherwise."""
    since = {
        (entry.get("id"), one.get("type"), one.get("status")): one.get(SINCE)
        for entry in before
        for one in entry.get("conditions") or ()
    }
    now = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def dated_one(entry: Entry) -> Entry:
        conditions = [
            {**one, SINCE: since.get((entry["id"], one["type"], one["status"])) or now}
            for one in entry.get("conditions", ())
        ]
        return {**entry, "conditions": conditions} if conditions else entry

    return [dated_one(entry) for entry in devices]

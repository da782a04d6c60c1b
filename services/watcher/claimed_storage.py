"""What pods' PersistentVolumeClaims need, from all claims and volumes; pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import msgspec
from msgspec import structs

from shared.model.bounds import MOST, MOST_FACTS, check_bounds, check_size, cut
from shared.model.denial import Denial
from shared.model.errors import RequestError
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import ALL_PERCENT, NodeTerm
from shared.placing.node_filters import ATTACHABLE
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_volumes import ClaimingPod, volume_needs
from shared.pods.storage import (
    Capacity,
    Claim,
    ClaimKey,
    Driver,
    NodeLimits,
    Storage,
    StorageClass,
    Volume,
)

PreferredTerm = tuple[int, tuple[NodeTerm, ...]]
"""Weight and requirements."""
K = TypeVar("K")
NO_LIMITS = NodeLimits({})
V = TypeVar("V")


MOST_GIVEN_UP = 8
"""Nodes that are remembered for a claim: the newest ones."""


class StorageKind(StrEnum):
    CLAIM = "PersistentVolumeClaims"
    VOLUME = "PersistentVolumes"
    CLASS = "StorageClasses"
    DRIVER = "CSIDrivers"
    CAPACITY = "CSIStorageCapacities"
    CSI_NODE = "CSINodes"


StorageObject = Claim | Volume | StorageClass | Driver | Capacity | NodeLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageChanges:
    kind: StorageKind
    changed: tuple[tuple[ClaimKey, StorageObject | None], ...] = ()
    """By namespace (or an empty text) and name; None if it was deleted, or decides nothing."""
    synced: bool = False
    unreadable: str = ""


class ClaimedStorage:
    """All claims and volumes, and the pods that use the claims.

    A pod with claims waits until all kinds are listed; one that cannot be read is its reason.
    """

    def __init__(self) -> None:
        self.storage = Storage()
        self.users: dict[ClaimKey, dict[PodUid, NodeName]] = {}
        self.limited: frozenset[str] = frozenset()
        """CSI drivers that can attach only so many volumes to some node."""
        self._unleased: dict[NodeName, dict[PodUid, frozenset[ClaimKey]]] = {}
        """By node: the claims of its pods whose usage no lease counts."""
        self._given_up: dict[ClaimKey, tuple[NodeName, ...]] = {}
        """Nodes that were selected for claims, and for which no volume was provisioned."""
        self._listed: set[StorageKind] = set()
        self._unreadable: dict[StorageKind, str] = {}

    def apply(self, changes: StorageChanges) -> set[ClaimKey] | None:
        """Apply changes; return the claims that they concern, or None if it may be any."""
        kind = changes.kind
        was_listed = kind in self._listed
        if changes.unreadable:
            self._unreadable[kind] = changes.unreadable
            self._listed.add(kind)
            return None
        for key, stored in changes.changed:
            self._put(kind, key, stored)
        if kind is StorageKind.CSI_NODE:
            limits = self.storage.limits.values()
            self.limited = frozenset().union(*(limit.by_driver for limit in limits))
        if changes.synced:
            self._unreadable.pop(kind, None)
            self._listed.add(kind)
        if kind is StorageKind.CLAIM and was_listed and not changes.synced:
            return {key for key, _ in changes.changed}
        return None

    def _put(self, kind: StorageKind, key: ClaimKey, stored: StorageObject | None) -> None:
        storage = self.storage
        _, name = key
        match kind:
            case StorageKind.VOLUME:
                storage.put_volume(name, stored if isinstance(stored, Volume) else None)
            case StorageKind.CLAIM:
                claim = stored if isinstance(stored, Claim) else None
                self._note_given_up(key, storage.claims.get(key), claim)
                _set(storage.claims, key, claim)
            case StorageKind.CLASS:
                _set(storage.classes, name, stored if isinstance(stored, StorageClass) else None)
            case StorageKind.DRIVER:
                _set(storage.drivers, name, stored if isinstance(stored, Driver) else None)
            case StorageKind.CAPACITY:
                _set(storage.capacities, key, stored if isinstance(stored, Capacity) else None)
            case StorageKind.CSI_NODE:
                _set(storage.limits, name, stored if isinstance(stored, NodeLimits) else None)

    def _note_given_up(self, key: ClaimKey, before: Claim | None, now: Claim | None) -> None:
        if now is None or now.bound or before is None or before.uid != now.uid:
            self._given_up.pop(key, None)
        elif before.selected_node and not now.selected_node:
            node = NodeName(before.selected_node)
            others = [name for name in self._given_up.get(key, ()) if name != node]
            self._given_up[key] = (*others, node)[-MOST_GIVEN_UP:]

    def count(self, now: ObservedPod | None, before: ObservedPod | None) -> set[ClaimKey]:
        """Count pods that use claims on a node; return the claims whose users have changed."""
        changed: set[ClaimKey] = set()
        for pod, is_there in ((before, False), (now, True)):
            if pod is None or pod.node is None or pod.is_terminated:
                continue
            for key in pod.claim_keys:
                users = self.users.setdefault(key, {})
                if is_there:
                    users[pod.pod] = pod.node
                else:
                    users.pop(pod.pod, None)
                if not users:
                    del self.users[key]
                changed ^= {key}
            is_leased = pod.ours and pod.has_lease and not pod.by_kube_scheduler
            unleased = self._unleased.setdefault(pod.node, {})
            if is_there and not is_leased:
                unleased[pod.pod] = frozenset(pod.claim_keys)
            else:
                unleased.pop(pod.pod, None)
            if not unleased:
                del self._unleased[pod.node]
        return changed

    def attachable(self, node: NodeName) -> dict[str, int]:
        """Return how many volumes can be attached to a node, as resources by driver.

        A driver that limits them on other nodes only has the largest amount here.
        """
        limits = self.storage.limits.get(node, NO_LIMITS).by_driver
        return {f"{ATTACHABLE}{driver}": limits.get(driver, MOST) for driver in self.limited}

    def attached(self, node: NodeName) -> dict[str, int]:
        """Return how many volumes pods without a lease have on a node, each volume once."""
        if not self.limited:
            return {}
        keys = frozenset().union(*self._unleased.get(node, {}).values())
        claims = [self.storage.claims[key] for key in keys if key in self.storage.claims]
        names = {claim.volume for claim in claims if claim.volume}
        volumes = [self.storage.volumes[name] for name in names if name in self.storage.volumes]
        return Counter(
            f"{ATTACHABLE}{volume.driver}" for volume in volumes if volume.driver in self.limited
        )

    def with_claims(self, pod: ObservedPod) -> ObservedPod | None:
        """Return the pod with what its claims need, or None if that is not known yet.

        A pod that has to wait for its claims is returned with the reason as a requirement. It
        prefers nodes for which no volume of its claims has failed to be provisioned.
        """
        if pod.request is None:
            return pod
        if self._unreadable:
            return _waiting(pod, next(iter(self._unreadable.values())))
        if len(self._listed) < len(StorageKind):
            return None
        claiming = ClaimingPod(pod=pod.pod, namespace=pod.namespace, name=pod.name, uses=pod.claims)
        needs = volume_needs(claiming, self.storage, self.users)
        if isinstance(needs, Denial):
            return _waiting(pod, needs.text)
        before = pod.request.node_requirements
        requirements = structs.replace(
            before,
            volumes=needs.requirements,
            preferred=(*before.preferred, *self._other_nodes(pod.claim_keys)),
        )
        attachments = {
            f"{ATTACHABLE}{driver}": count
            for driver, count in needs.attachments.items()
            if driver in self.limited
        }
        request = structs.replace(
            pod.request,
            node_requirements=requirements,
            claims=needs.claims,
            resources=pod.request.resources | attachments,
        )
        try:
            check_size("what its volumes require", len(msgspec.msgpack.encode(needs)), MOST_FACTS)
            check_bounds(request, "the pod's volumes")
        except RequestError as error:
            return _with_error(pod, str(error))
        return structs.replace(pod, request=request)

    def _other_nodes(self, claims: Iterable[ClaimKey]) -> list[PreferredTerm]:
        """Return terms that prefer nodes for which no volume has failed to be provisioned."""
        terms: list[PreferredTerm] = []
        for key in sorted(claims):
            names = self._given_up.get(key)
            if names:
                term = NodeTerm(key="metadata.name", operator="NotIn", values=names, field=True)
                terms.append((ALL_PERCENT, (term,)))
        return terms


def _set(objects: dict[K, V], key: K, value: V | None) -> None:
    if value is None:
        objects.pop(key, None)
    else:
        objects[key] = value


def _waiting(pod: ObservedPod, reason: str) -> ObservedPod:
    """Return a pod that no node fits, so that it is among the waiting pods with its reason."""
    if pod.request is None:
        return pod
    requirements = structs.replace(pod.request.node_requirements, waits_for=cut(reason))
    request = structs.replace(pod.request, node_requirements=requirements)
    return structs.replace(pod, request=request)


def _with_error(pod: ObservedPod, error: str) -> ObservedPod:
    return structs.replace(pod, request=None, request_error=cut(error))


def unreadable_storage(kind: StorageKind, reason: str) -> StorageChanges:
    text = (
        f"the pod has PersistentVolumeClaims, and {kind} cannot be read: {reason}; "
        "apply the manifests of this version, by which the watcher may read them"
    )
    return StorageChanges(kind=kind, unreadable=text)

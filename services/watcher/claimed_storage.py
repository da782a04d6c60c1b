"""What pods' PersistentVolumeClaims need, from all claims and volumes; pure."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import msgspec
from msgspec import structs

from services.watcher.kept_objects import Room
from shared.model.bounds import MOST, MOST_FACTS, check_bounds, check_size, cut
from shared.model.denial import Denial
from shared.model.devices.node import HOSTNAME
from shared.model.errors import RequestError
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import ALL_PERCENT, Gang, NodeTerm
from shared.placing.node_filters import ATTACHABLE
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_volumes import (
    ClaimingPod,
    claim_of_one_node,
    shared_by_one,
    volume_needs,
)
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


MOST_STORED = 200_000
"""A claim and its volume take about 2.3 KiB."""
MOST_OF_NAMESPACE = 50_000
"""A volume is of the namespace of its claim."""
MOST_GIVEN_UP = 8


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
    """None if it was deleted, or decides nothing."""
    synced: bool = False
    unreadable: str = ""


class ClaimedStorage:
    """A pod with claims waits until all kinds are listed, and while one cannot be read."""

    def __init__(self) -> None:
        self.storage = Storage()
        self.users: dict[ClaimKey, dict[PodUid, NodeName]] = {}
        self.limited: frozenset[str] = frozenset()
        """CSI drivers that limit how many volumes some node attaches."""
        self._on_nodes: dict[NodeName, dict[PodUid, ObservedPod]] = {}
        self._given_up: dict[ClaimKey, tuple[NodeName, ...]] = {}
        """Nodes that were selected, and where no volume was provisioned."""
        self.rooms = {
            kind: Room(kind, most=MOST_STORED, most_of_namespace=MOST_OF_NAMESPACE)
            for kind in (StorageKind.CLAIM, StorageKind.VOLUME, StorageKind.CAPACITY)
        }
        """Administrators create the other kinds, or there is one for each node."""
        self._listed: set[StorageKind] = set()
        self._unreadable: dict[StorageKind, str] = {}

    def apply(self, changes: StorageChanges) -> set[ClaimKey] | None:
        """Return the claims that the changes concern, or None if it may be any."""
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
                volume = stored if isinstance(stored, Volume) else None
                storage.put_volume(name, self._kept(kind, key, storage.volumes.get(name), volume))
            case StorageKind.CLAIM:
                before = storage.claims.get(key)
                claim = stored if isinstance(stored, Claim) else None
                claim = self._kept(kind, key, before, claim)
                self._note_given_up(key, before, claim)
                _set(storage.claims, key, claim)
            case StorageKind.CLASS:
                _set(storage.classes, name, stored if isinstance(stored, StorageClass) else None)
            case StorageKind.DRIVER:
                _set(storage.drivers, name, stored if isinstance(stored, Driver) else None)
            case StorageKind.CAPACITY:
                capacity = stored if isinstance(stored, Capacity) else None
                capacity = self._kept(kind, key, storage.capacities.get(key), capacity)
                storage.put_capacity(key, capacity)
            case StorageKind.CSI_NODE:
                _set(storage.limits, name, stored if isinstance(stored, NodeLimits) else None)

    def _kept(self, kind: StorageKind, key: ClaimKey, before: V | None, now: V | None) -> V | None:
        """Return an object if there is room for it, in place of `before`."""
        room = self.rooms[kind]
        if before is not None:
            room.release(_namespace_of(key, before), before)
        return now if now is not None and room.admits(_namespace_of(key, now), now) else None

    def _unkept(self, pod: ObservedPod) -> str:
        claims = [self.storage.claims.get(key) for key in pod.claim_keys]
        room = self.rooms[StorageKind.CLAIM]
        if pod.namespace in room.left_out and None in claims:
            return f"its claim does not exist, or is not kept: {room.text}"
        names = {claim.volume for claim in claims if claim is not None and claim.volume}
        room = self.rooms[StorageKind.VOLUME]
        is_complete = room.left_out.isdisjoint((pod.namespace, ""))
        if not is_complete and not names <= self.storage.volumes.keys():
            return f"its volume does not exist, or is not kept: {room.text}"
        return ""

    def _note_given_up(self, key: ClaimKey, before: Claim | None, now: Claim | None) -> None:
        if now is None or now.bound or before is None or before.uid != now.uid:
            self._given_up.pop(key, None)
        elif before.selected_node and not now.selected_node:
            node = NodeName(before.selected_node)
            others = [name for name in self._given_up.get(key, ()) if name != node]
            self._given_up[key] = (*others, node)[-MOST_GIVEN_UP:]

    def count(self, now: ObservedPod | None, before: ObservedPod | None) -> set[ClaimKey]:
        """Return the claims whose users have changed."""
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
            on_node = self._on_nodes.setdefault(pod.node, {})
            if is_there:
                on_node[pod.pod] = pod
            else:
                on_node.pop(pod.pod, None)
            if not on_node:
                del self._on_nodes[pod.node]
        return changed

    def attachable(self, node: NodeName) -> dict[str, int]:
        """Return how many volumes can be attached to a node, as resources by driver.

        A driver that limits only other nodes has the largest amount.
        """
        limits = self.storage.limits.get(node, NO_LIMITS).by_driver
        return {f"{ATTACHABLE}{driver}": limits.get(driver, MOST) for driver in self.limited}

    def attached(self, node: NodeName) -> dict[str, int]:
        """Return how many more volumes are attached than leases count there.

        The number is negative where pods with leases share volumes.
        """
        if not self.limited or len(self._listed) < len(StorageKind):
            return {}
        drivers: dict[str, str] = {}
        leased = Counter[str]()
        for pod in self._on_nodes.get(node, {}).values():
            volumes = [self._volume_of(key) for key in pod.claim_keys]
            if pod.leased_volumes and None in volumes:
                continue  # what its lease counts may be no other pod's
            drivers.update({volume.name: volume.driver for volume in volumes if volume})
            leased.update(pod.leased_volumes)
        more = Counter(f"{ATTACHABLE}{drivers[name]}" for name in drivers)
        more.subtract(leased)
        limited = {f"{ATTACHABLE}{driver}" for driver in self.limited}
        return {name: count for name, count in more.items() if count and name in limited}

    def _volume_of(self, key: ClaimKey) -> Volume | None:
        claim = self.storage.claims.get(key)
        return self.storage.volumes.get(claim.volume) if claim is not None else None

    def with_claims(
        self, pod: ObservedPod, shared: Collection[ClaimKey] = ()
    ) -> ObservedPod | None:
        """Return the pod with what its claims need, or None if that is not known yet.

        Pods of a gang that share a claim for one node have to be on one node.
        """
        if pod.request is None:
            return pod
        unread = next(iter(self._unreadable.values()), "") or self._unkept(pod)
        if unread:
            return _waiting(pod, unread)
        if len(self._listed) < len(StorageKind):
            return None
        gang = pod.request.gang
        if gang is None or gang.min_member == 1:
            shared = ()
        claiming = ClaimingPod(pod=pod.pod, namespace=pod.namespace, name=pod.name, uses=pod.claims)
        needs = shared_by_one(claiming, shared, self.storage) or volume_needs(
            claiming, self.storage, self.users
        )
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
            gang=_on_one_node(gang, claim_of_one_node(claiming, shared, self.storage)),
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
        terms: list[PreferredTerm] = []
        for key in sorted(claims):
            names = self._given_up.get(key)
            if names:
                term = NodeTerm(key="metadata.name", operator="NotIn", values=names, field=True)
                terms.append((ALL_PERCENT, (term,)))
        return terms


def _namespace_of(key: ClaimKey, stored: object) -> str:
    if isinstance(stored, Volume):
        return stored.reserved_for.namespace if stored.reserved_for else ""
    namespace, _ = key
    return namespace


def _set(objects: dict[K, V], key: K, value: V | None) -> None:
    if value is None:
        objects.pop(key, None)
    else:
        objects[key] = value


def _on_one_node(gang: Gang | None, claim: str) -> Gang | None:
    if gang is None or not claim:
        return gang
    topology = tuple(dict.fromkeys((*gang.required_topology, HOSTNAME)))
    return structs.replace(gang, required_topology=topology, one_node_claim=claim)


def _waiting(pod: ObservedPod, reason: str) -> ObservedPod:
    """Return a pod that fits no node, so that it is listed with its reason."""
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

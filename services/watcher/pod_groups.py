"""Groups of pods: what their PodGroups ask for; pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from msgspec import structs

from services.watcher.kept_objects import Room
from shared.dialects.gang_topologies import KUEUE_REQUIRED, NO_TOPOLOGY
from shared.dialects.pod_groups import PATHS, PodGroupKind
from shared.kubernetes.types import (
    ObjectMeta,
    PodGroup,
    PodGroupCondition,
    SchedulingConstraints,
)
from shared.model.bounds import check_bounds
from shared.model.errors import RequestError
from shared.model.requests.request import Gang
from shared.pods.observed_pod import ObservedPod

SCHEDULED = "PodGroupScheduled"
NO_CONDITION = PodGroupCondition()
NO_METADATA = ObjectMeta()
HYPER_NODES = (
    "in mode hard, and Leasehold does not read HyperNodes: remove it, and name the label that the "
    f"nodes of its pods share in the pods' annotation {KUEUE_REQUIRED}"
)


MOST_GROUPS = 100_000
MOST_OF_NAMESPACE = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGroup:
    min_member: int
    """With 0, its pods start one by one."""
    priority: int | None = None
    """In place of the pods' own."""
    required_topology: tuple[str, ...] = ()
    """All pods share these labels' values of their nodes."""
    error: str = ""
    metadata: ObjectMeta = NO_METADATA
    scheduled: PodGroupCondition = NO_CONDITION


def known_group(kind: PodGroupKind, group: PodGroup) -> KnownGroup:
    """https://kubernetes.io/docs/concepts/workloads/workload-api/."""
    meta = group.metadata
    spec = group.spec
    if kind is not PodGroupKind.KUBERNETES:
        topology = spec.network_topology
        hard = topology is not None and topology.mode != "soft"
        error = f"PodGroup {meta.name} has spec.networkTopology {HYPER_NODES}" if hard else ""
        return KnownGroup(min_member=spec.min_member, error=error)
    gang = spec.scheduling_policy.gang
    error = ""
    constraints = SchedulingConstraints()
    try:
        constraints = msgspec.convert(spec.scheduling_constraints or {}, SchedulingConstraints)
    except msgspec.ValidationError as invalid:
        error = (
            f"PodGroup {meta.name} has spec.schedulingConstraints that Leasehold cannot obey "
            f"({invalid}): create it without"
        )
    conditions = (condition for condition in group.status.conditions if condition.type == SCHEDULED)
    return KnownGroup(
        min_member=gang.min_count if gang else 0,
        priority=spec.priority,
        required_topology=tuple(dict.fromkeys(item.key for item in constraints.topology)),
        error=error,
        metadata=ObjectMeta(  # without annotations, which may be large
            name=meta.name,
            namespace=meta.namespace,
            uid=meta.uid,
            resource_version=meta.resource_version,
            generation=meta.generation,
        ),
        scheduled=next(conditions, NO_CONDITION),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroupChanges:
    kind: PodGroupKind
    groups: tuple[tuple[str, KnownGroup | None], ...] = ()
    """By `namespace/name`, None if it was deleted."""
    synced: bool = False
    absent: bool = False
    unreadable: str = ""
    path: str = ""


class PodGroupIndex:
    """A pod whose PodGroup is missing waits for it; where the kind is missing, it does not."""

    def __init__(self) -> None:
        self.paths: dict[PodGroupKind, str] = {}
        self.rooms = {kind: _room_for(kind) for kind in PodGroupKind}
        self._groups: dict[PodGroupKind, dict[str, KnownGroup]] = {}
        self._unreadable: dict[PodGroupKind, str] = {}
        self._listed: set[PodGroupKind] = set()
        self._placed_elsewhere: Counter[str] = Counter()

    def apply(self, changes: PodGroupChanges) -> set[str] | None:
        """Return the names of affected groups, or None for all of the kind."""
        kind = changes.kind
        groups = self._groups.setdefault(changes.kind, {})
        if changes.absent or changes.unreadable:
            self._unreadable[kind] = changes.unreadable
            groups.clear()
            self.rooms[kind] = _room_for(kind)
            self._listed.add(kind)
            return None
        self.paths[kind] = changes.path
        changed = {name for name, group in changes.groups if groups.get(name) != group}
        room = self.rooms[kind]
        for name, group in changes.groups:
            namespace, _, _ = name.partition("/")
            before = groups.pop(name, None)
            if before is not None:
                room.release(namespace, before)
            if group is not None and room.admits(namespace, group):
                groups[name] = group
        if not changes.synced:
            return changed
        self._unreadable.pop(kind, None)
        self._listed.add(kind)
        return None

    def get(self, kind: PodGroupKind, name: str) -> KnownGroup | None:
        return self._groups.get(kind, {}).get(name)

    def count(self, now: ObservedPod | None, before: ObservedPod | None) -> set[str]:
        """Return the groups whose count of pods changed."""
        group, former = (pod.placed_elsewhere if pod else "" for pod in (now, before))
        if group == former:
            return set()
        for name, more in ((group, 1), (former, -1)):
            self._placed_elsewhere[name] += more
            if not name or not self._placed_elsewhere[name]:
                del self._placed_elsewhere[name]
        return {group, former} - {""}

    def absent_kinds(self, pods: Iterable[ObservedPod | None]) -> frozenset[PodGroupKind]:
        return frozenset(
            pod.group.kind
            for pod in pods
            if pod and pod.is_pending and pod.group and pod.group.kind
            if self._unreadable.get(pod.group.kind) == ""
        )

    def await_list(self, kind: PodGroupKind) -> None:
        self._listed.discard(kind)

    def with_gang(self, pod: ObservedPod) -> ObservedPod | None:
        """Return the pod with its gang or an error, or None if the gang is not known yet.

        Of `minMember: 4`, with one pod placed by another scheduler, it is a gang of 3.
        """
        named = pod.group
        if named is None or pod.request is None:
            return pod
        if named.kind is None:
            return self._in_gang(pod, named.name, KnownGroup(min_member=named.min_member))
        if named.kind not in self._listed:
            return None
        if named.kind in self._unreadable:
            error = self._unreadable[named.kind]
            return self._in_gang(pod, named.name, KnownGroup(min_member=0, error=error))
        group = self.get(named.kind, named.name)
        if group is None:
            return _with_error(pod, self._missing(named.kind, named.name))
        return self._in_gang(pod, named.name, group)

    def _missing(self, kind: PodGroupKind, name: str) -> str:
        namespace, _, group = name.partition("/")
        what = (
            f"the pod belongs to PodGroup {group} ({kind}), which does not exist in namespace "
            f"{namespace}"
        )
        room = self.rooms[kind]
        if namespace in room.left_out:
            return f"{what}, or is not kept: {room.text}"
        return f"{what}: create the PodGroup, or remove its name from the pod"

    def _in_gang(self, pod: ObservedPod, name: str, group: KnownGroup) -> ObservedPod:
        if group.error or pod.request is None:
            return _with_error(pod, group.error)
        request = pod.request
        if group.priority is not None:
            request = structs.replace(request, priority=group.priority)
        named = pod.group.topology if pod.group else NO_TOPOLOGY
        required = tuple(dict.fromkeys((*group.required_topology, *named.required)))
        if group.min_member or required or named.preferred:
            elsewhere = self._placed_elsewhere.get(name, 0)
            gang = Gang(
                name=name,
                min_member=max(group.min_member - elsewhere, 1),
                placed_elsewhere=elsewhere,
                required_topology=required,
                preferred_topology=named.preferred,
            )
            request = structs.replace(request, gang=gang)
        try:
            check_bounds(request, f"pod group {name}")
        except RequestError as error:
            return _with_error(pod, str(error))
        return structs.replace(pod, request=request)


def _room_for(kind: PodGroupKind) -> Room:
    return Room(f"podgroups.{kind}", most=MOST_GROUPS, most_of_namespace=MOST_OF_NAMESPACE)


def _with_error(pod: ObservedPod, error: str) -> ObservedPod:
    return structs.replace(pod, request=None, request_error=error)


def unreadable_groups(kind: PodGroupKind, reason: str) -> PodGroupChanges:
    text = f"the pod belongs to a PodGroup, and {PATHS[kind][0]} cannot be read: {reason}"
    return PodGroupChanges(kind=kind, unreadable=text)

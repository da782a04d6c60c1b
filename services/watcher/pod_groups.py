"""PodGroups by name, and the gangs of the pods that name them; pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import structs

from shared.dialects.pod_groups import PATHS, PodGroupKind
from shared.model.bounds import check_bounds
from shared.model.errors import RequestError
from shared.model.request import Gang
from shared.pods.observed_pod import ObservedPod


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroupChanges:
    """Changes of PodGroups of one kind."""

    kind: PodGroupKind
    sizes: tuple[tuple[str, int | None], ...] = ()
    """minMember of each added or changed PodGroup, by `namespace/name`; None: it was deleted."""
    synced: bool = False
    """The initial list is complete with these changes."""
    absent: bool = False
    """The API server does not know the kind: names of such groups have no meaning."""
    unreadable: str = ""
    """Why PodGroups cannot be read."""


class PodGroupIndex:
    """PodGroups by kind, each with its minMember, less the pods that other schedulers have placed.

    A pod whose PodGroup is missing waits for it, as with the schedulers that define these
    PodGroups. Where the kind itself is missing, no such scheduler was installed, no PodGroup can be
    created, and pods are placed one by one.
    """

    def __init__(self) -> None:
        self._sizes: dict[PodGroupKind, dict[str, int]] = {}
        self._unreadable: dict[PodGroupKind, str] = {}
        self._listed: set[PodGroupKind] = set()
        self._placed_elsewhere: Counter[str] = Counter()
        """How many pods of each group other schedulers have placed."""

    def apply(self, changes: PodGroupChanges) -> set[str] | None:
        """Apply changes; return the names of the groups they may concern, None: all of the kind."""
        kind, known = changes.kind, self._sizes.setdefault(changes.kind, {})
        if changes.absent or changes.unreadable:
            self._unreadable[kind] = changes.unreadable
            known.clear()
            self._listed.add(kind)
            return None
        changed = {name for name, size in changes.sizes if known.get(name) != size}
        for name, size in changes.sizes:
            if size is None:
                known.pop(name, None)
            else:
                known[name] = size
        if not changes.synced:
            return changed
        self._unreadable.pop(kind, None)
        self._listed.add(kind)
        return None

    def count(self, now: ObservedPod | None, before: ObservedPod | None) -> set[str]:
        """Count pods that other schedulers place; return the groups of which that changes."""
        group, former = (pod.placed_elsewhere if pod else "" for pod in (now, before))
        if group == former:
            return set()
        for name, more in ((group, 1), (former, -1)):
            self._placed_elsewhere[name] += more
            if not name or not self._placed_elsewhere[name]:
                del self._placed_elsewhere[name]
        return {group, former} - {""}

    def absent_kinds(self, pods: Iterable[ObservedPod | None]) -> frozenset[PodGroupKind]:
        """Return the kinds that pending pods among these name and that are not installed."""
        return frozenset(
            pod.group.kind
            for pod in pods
            if pod and pod.is_pending and pod.group and pod.group.kind
            if self._unreadable.get(pod.group.kind) == ""
        )

    def await_list(self, kind: PodGroupKind) -> None:
        """Make pods that name groups of this kind wait for its list: the kind was installed."""
        self._listed.discard(kind)

    def with_gang(self, pod: ObservedPod) -> ObservedPod | None:
        """Return the pod with its gang or with an error; None: the gang is not known yet.

        A pod without a group, and one with an invalid request, is returned unchanged.
        """
        group = pod.group
        if group is None or pod.request is None:
            return pod
        if group.kind is None:
            return self._in_gang(pod, group.name, group.min_member)
        if group.kind not in self._listed:
            return None
        unreadable = self._unreadable.get(group.kind)
        if unreadable is not None:
            return _with_error(pod, unreadable) if unreadable else pod
        size = self._sizes[group.kind].get(group.name)
        if size is None:
            namespace, _, name = group.name.partition("/")
            return _with_error(
                pod,
                f"the pod belongs to PodGroup {name} ({group.kind}), which does not exist in "
                f"namespace {namespace}: create the PodGroup, or remove its name from the pod",
            )
        return self._in_gang(pod, group.name, size)

    def _in_gang(self, pod: ObservedPod, name: str, size: int) -> ObservedPod:
        elsewhere = self._placed_elsewhere.get(name, 0)
        gang = Gang(name=name, min_member=max(size - elsewhere, 1), placed_elsewhere=elsewhere)
        return _with(pod, gang)


def unreadable_groups(kind: PodGroupKind, reason: str) -> PodGroupChanges:
    """Return changes after which PodGroups of the kind exist and cannot be read."""
    text = f"the pod belongs to a PodGroup, and {PATHS[kind]} cannot be read: {reason}"
    return PodGroupChanges(kind=kind, unreadable=text)


def _with(pod: ObservedPod, gang: Gang) -> ObservedPod:
    try:
        check_bounds(gang, f"pod group {gang.name}")
    except RequestError as error:
        return _with_error(pod, str(error))
    return structs.replace(pod, request=pod.request and structs.replace(pod.request, gang=gang))


def _with_error(pod: ObservedPod, error: str) -> ObservedPod:
    return structs.replace(pod, request=None, request_error=error)

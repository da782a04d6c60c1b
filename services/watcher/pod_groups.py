"""What is known of PodGroups, and what it makes of the pods that name one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.watcher.observed_pod import PodSeen
from shared.dialects.pod_groups import PATHS, PodGroupKind
from shared.model.request import Gang


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNews:
    """News of one kind of PodGroup."""

    kind: PodGroupKind
    sizes: tuple[tuple[str, int | None], ...] = ()
    """`namespace/name` and minMember of what is new or changed; None: it is gone."""
    listed: bool = False
    """Whatever exists and is not among `sizes` has been told before."""
    absent: bool = False
    """The API server does not know the kind: such a group's name is a mere name."""
    unreadable: str = ""
    """Why PodGroups cannot be read."""


class Groups:
    """PodGroups by kind, each with how many of its pods run together.

    A group whose PodGroup is missing is waited for, as with the schedulers that these PodGroups
    come from, and the pod says so. Where the kind itself is missing, no such scheduler was ever
    installed, nobody can make a PodGroup, and pods are placed one by one.
    """

    def __init__(self) -> None:
        self._sizes: dict[PodGroupKind, dict[str, int]] = {}
        self._unreadable: dict[PodGroupKind, str] = {}
        self._listed: set[PodGroupKind] = set()

    def hear(self, news: GroupNews) -> set[str] | None:
        """Take in news; return the names of the groups it may concern, None: all of the kind."""
        kind, known = news.kind, self._sizes.setdefault(news.kind, {})
        if news.absent or news.unreadable:
            self._unreadable[kind] = news.unreadable
            known.clear()
            self._listed.add(kind)
            return None
        changed = {name for name, size in news.sizes if known.get(name) != size}
        for name, size in news.sizes:
            if size is None:
                known.pop(name, None)
            else:
                known[name] = size
        if not news.listed:
            return changed
        self._unreadable.pop(kind, None)
        self._listed.add(kind)
        return None

    def absent(self, pods: Iterable[PodSeen | None]) -> frozenset[PodGroupKind]:
        """Return the kinds that waiting pods among these name and that are not installed."""
        return frozenset(
            pod.group.kind
            for pod in pods
            if pod and pod.waits and pod.group and pod.group.kind
            if self._unreadable.get(pod.group.kind) == ""
        )

    def expect(self, kind: PodGroupKind) -> None:
        """Make pods that name groups of this kind wait for news of it: it is there after all."""
        self._listed.discard(kind)

    def joined(self, pod: PodSeen) -> PodSeen | None:
        """Return the pod with its gang, or with the fault that there is none; None: not known yet.

        A pod of no gang, and one whose request cannot be read, is returned as it is.
        """
        named = pod.group
        if named is None or pod.request is None:
            return pod
        if named.kind is None:
            return _with(pod, Gang(name=named.name, min_member=named.min_member))
        if named.kind not in self._listed:
            return None
        unreadable = self._unreadable.get(named.kind)
        if unreadable is not None:
            return _at_fault(pod, unreadable) if unreadable else pod
        size = self._sizes[named.kind].get(named.name)
        if size is None:
            namespace, _, name = named.name.partition("/")
            return _at_fault(
                pod,
                f"the pod belongs to PodGroup {name} ({named.kind}), and there is none of that "
                f"name in namespace {namespace}: it is placed as soon as the PodGroup is there; "
                "without the group's name on the pod it is placed by itself",
            )
        return _with(pod, Gang(name=named.name, min_member=max(size, 1)))


def cannot_read(kind: PodGroupKind, why: str) -> GroupNews:
    """Say that PodGroups exist and cannot be read."""
    text = f"the pod belongs to a PodGroup, and {PATHS[kind]} cannot be read: {why}"
    return GroupNews(kind=kind, unreadable=text)


def _with(pod: PodSeen, gang: Gang) -> PodSeen:
    return replace(pod, request=pod.request and replace(pod.request, gang=gang))


def _at_fault(pod: PodSeen, fault: str) -> PodSeen:
    return replace(pod, request=None, fault=fault)

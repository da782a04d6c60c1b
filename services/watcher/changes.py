"""What is worth saying about pods and nodes, given what was known and what is seen now."""

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from services.watcher.observed_pod import PodSeen
from services.watcher.pod_groups import GroupNews, Groups
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import (
    NodeChanged,
    PodGated,
    PodQueued,
    PodRejected,
    PodTerminated,
)
from shared.model.names import NodeName, PodUid
from shared.model.node import NodeFacts

PodEvent = PodQueued | PodRejected | PodGated | PodTerminated
TURNS = 24
"""Explained pods are told of again in so many turns."""


class Pods:
    """Decides what to say of pods, and keeps what nodes carry besides leases."""

    def __init__(self) -> None:
        self.waiting: dict[PodUid, PodSeen] = {}
        self.held: dict[PodUid, PodSeen] = {}
        """Pods that wait at our scheduling gate."""
        self.groups = Groups()
        self._grouped: dict[PodUid, PodSeen] = {}
        """Waiting pods that name a group, as they were seen: without its gang."""
        self.occupied: dict[NodeName, Counter[str]] = {}
        self.ports: dict[NodeName, Counter[str]] = {}
        self.dirty: set[NodeName] = set()
        """Nodes whose occupation changed since somebody last looked."""

    def see(self, now: PodSeen, before: PodSeen | None) -> list[PodEvent]:
        """Take in a new state of a pod; return what is new about it."""
        self._count(before, -1)
        self._count(now, +1)
        known = self.held.pop(now.pod, None) is not None
        if now.waits:
            return self._see_waiting(now)
        self._forget(now.pod)
        if now.held and not (now.node or now.over or now.deleting):
            self.held[now.pod] = now
            return [] if known else [_gated(now)]
        if now.ours and now.over and not (before is not None and before.over):
            return [_gone(now)]
        return []

    def miss(self, last: PodSeen) -> list[PodEvent]:
        """Take in that a pod no longer exists; return what is new about that."""
        self._count(last, -1)
        self._forget(last.pod)
        return [_gone(last)] if last.ours and not last.over else []

    def hear_groups(self, news: GroupNews, number: int) -> list[PodEvent]:
        """Take in news of PodGroups; return what is new about waiting pods that name them.

        It is said as telling `number`: the pods themselves have not changed.
        """
        names = self.groups.hear(news)
        return [
            event
            for pod in list(self._grouped.values())
            if pod.group and pod.group.kind is news.kind
            if names is None or pod.group.name in names
            for event in self._see_waiting(pod, offer=-number)
        ]

    def again(self, number: int, *, unexplained_before: float | None = None) -> list[PodEvent]:
        """Tell of waiting pods once more, as telling `number`.

        With `unexplained_before`, only of those created before that time that nobody has explained
        yet: the news of them may have been lost.
        """
        held = self.held.values() if unexplained_before is None else ()
        return [
            *(_gated(pod, offer=-number) for pod in held),
            *(
                announcement(pod, offer=-number)
                for pod in self.waiting.values()
                if unexplained_before is None
                or (not pod.explained and pod.created_at < unexplained_before)
            ),
        ]

    def tell(self, pods: Iterable[PodUid], number: int) -> list[PodQueued | PodRejected]:
        """Tell of those of `pods` that still wait, as telling `number`."""
        waiting = [self.waiting[pod] for pod in pods if pod in self.waiting]
        return [announcement(pod, offer=-number) for pod in waiting]

    def take_turn(self, number: int, turn: int) -> list[PodEvent]:
        """Tell of those waiting and explained pods whose turn it is, as telling `number`."""
        held = (pod for pod in self.held.values() if _has_turn(pod, turn))
        explained = (pod for pod in self.waiting.values() if pod.explained)
        return [
            *(_gated(pod, offer=-number) for pod in held),
            *(announcement(pod, offer=-number) for pod in explained if _has_turn(pod, turn)),
        ]

    def carried(self, node: NodeFacts) -> NodeFacts:
        """Complete a node's facts with what its pods take."""
        return replace(
            node,
            used_by_others={key: n for key, n in self.occupied.get(node.name, {}).items() if n},
            host_ports=tuple(sorted(key for key, n in self.ports.get(node.name, {}).items() if n)),
        )

    def _see_waiting(self, seen: PodSeen, *, offer: int = 0) -> list[PodEvent]:
        if seen.group is not None:
            self._grouped[seen.pod] = seen
        now = self.groups.joined(seen)
        if now is None:
            return []
        known = self.waiting.get(now.pod)
        self.waiting[now.pod] = now
        told_already = known is not None and (known.request, known.fault) == (
            now.request,
            now.fault,
        )
        return [] if told_already else [announcement(now, offer=offer)]

    def _forget(self, pod: PodUid) -> None:
        self.waiting.pop(pod, None)
        self.held.pop(pod, None)
        self._grouped.pop(pod, None)

    def _count(self, pod: PodSeen | None, sign: int) -> None:
        if pod is None or pod.node is None or pod.over:
            return
        if pod.host_ports:
            _add(self.ports.setdefault(pod.node, Counter()), dict.fromkeys(pod.host_ports, sign))
            self.dirty.add(pod.node)
        if pod.occupies:
            taken = {key: sign * amount for key, amount in pod.resources.items()}
            _add(self.occupied.setdefault(pod.node, Counter()), taken)
            self.dirty.add(pod.node)


class Nodes:
    """Decides what to say of nodes."""

    def __init__(self, pods: Pods) -> None:
        self.pods = pods
        self.seen: dict[NodeName, NodeFacts] = {}
        self.told: dict[NodeName, NodeFacts] = {}

    def see(self, node: NodeFacts, *, now_s: float) -> list[NodeChanged]:
        """Take in a node's state; return it as an event if it differs from what was told."""
        self.seen[node.name] = node
        return self._tell([node.name], now_s)

    def miss(self, name: NodeName, *, now_s: float) -> list[NodeChanged]:
        """Take in that a node no longer exists."""
        self.seen.pop(name, None)
        last = self.told.pop(name, None)
        if last is None:
            return []
        return [NodeChanged(node=last, deleted=True, observed_at=now_s)]

    def occupied(self, *, now_s: float) -> list[NodeChanged]:
        """Tell of the nodes whose pods changed what they take."""
        dirty = [name for name in self.pods.dirty if name in self.seen]
        self.pods.dirty.clear()
        return self._tell(dirty, now_s)

    def all(self, *, now_s: float) -> list[NodeChanged]:
        """Tell of every node again."""
        self.told.clear()
        return self._tell(list(self.seen), now_s)

    def _tell(self, names: Iterable[NodeName], now_s: float) -> list[NodeChanged]:
        changes = []
        for name in names:
            facts = self.pods.carried(self.seen[name])
            if self.told.get(name) != facts:
                self.told[name] = facts
                changes.append(NodeChanged(node=facts, observed_at=now_s))
        return changes


class ForeignDevices:
    """Decides what to say of devices that another device plugin registered."""

    def __init__(self) -> None:
        self.told: dict[NodeName, DeviceReported] = {}
        self._left: set[NodeName] = set()
        """Nodes of which this had nothing to say when they were seen last."""

    def see(self, name: NodeName, report: DeviceReported | None) -> list[DeviceReported]:
        """Take in what a node shows; None: it is gone, or our agent speaks for it.

        A node that never had devices is not told of; one that lost them is, with none, and so is
        one that our agent spoke for before.
        """
        if report is None:
            self.told.pop(name, None)
            self._left.add(name)
            return []
        known = self.told.get(name)
        if name not in self._left and report.devices == (known.devices if known else ()):
            return []
        self._left.discard(name)
        self.told[name] = report
        return [report]

    def all(self, *, now_s: float) -> list[DeviceReported]:
        """Tell of all devices again."""
        return [replace(report, reported_at=now_s) for report in self.told.values()]


def announcement(pod: PodSeen, *, offer: int = 0) -> PodQueued | PodRejected:
    """Say that a pod waits, or that what it asks for cannot be read."""
    if pod.request is None:
        return PodRejected(
            pod=pod.pod,
            namespace=pod.namespace,
            name=pod.name,
            resource_version=f"{pod.resource_version}{offer or ''}",
            reason=pod.fault,
            admitted=pod.admitted,
        )
    return PodQueued(
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        resource_version=pod.resource_version,
        request=pod.request,
        created_at=pod.created_at,
        offer=offer,
        unexplained=bool(offer) and not pod.explained,
        admitted=pod.admitted,
    )


def _has_turn(pod: PodSeen, turn: int) -> bool:
    return zlib.crc32(pod.pod.encode()) % TURNS == turn % TURNS


def _gated(pod: PodSeen, *, offer: int = 0) -> PodGated:
    return PodGated(
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        resource_version=pod.resource_version,
        priority=pod.priority,
        created_at=pod.created_at,
        offer=offer,
    )


def _gone(pod: PodSeen) -> PodTerminated:
    return PodTerminated(
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        node=pod.node,
        phase=pod.phase if pod.over else "",
    )


def _add(total: Counter[str], amounts: Mapping[str, int]) -> None:
    for key, amount in amounts.items():
        total[key] += amount
        if not total[key]:
            del total[key]

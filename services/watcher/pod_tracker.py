"""Events that follow from the observed states of pods, and what pods take of nodes; pure."""

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from services.watcher.claimed_storage import ClaimedStorage, StorageChanges, StorageKind
from services.watcher.pod_groups import PodGroupChanges, PodGroupIndex
from services.watcher.selected_pods import SelectedPods
from shared.dialects.kai.managers import managing_pods, reserves_gpus
from shared.model.bounds import MOST, MOST_ENTRIES, cut
from shared.model.devices.node import NodeFacts
from shared.model.events.pod_events import (
    PodGated,
    PodHandedOver,
    PodQueued,
    PodRejected,
    PodTerminated,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.host_ports import ports_in_use
from shared.model.requests.request import PodRequest
from shared.pods.observed_pod import ObservedPod, queued
from shared.pods.pod_anti_affinity import PodAntiAffinity, resolve_all
from shared.pods.storage import ClaimKey

_Counted = TypeVar("_Counted", str, PodAntiAffinity)
_Key = TypeVar("_Key")
PodEvent = PodQueued | PodRejected | PodGated | PodHandedOver | PodTerminated
UNEXPLAINED_CALLS = 3
"""Calls of `resync_unexplained` after which a pod is published; then after twice as many, ..."""
MOST_UNEXPLAINED_CALLS = 8 * UNEXPLAINED_CALLS
"""... and in the end each time that so many have passed."""
RESYNC_SHARDS = 24


FIRST_PAUSE_S = 0.5
"""The delay before a pod is placed again after its binding failed; it doubles up to ..."""
MAX_PAUSE_S = 30.0
"""... this one ..."""
FORGET_S = 20.0
"""... and is the first again if the binding does not fail for so long after it."""


class BindingBackoff:
    """Pods whose bindings fail again and again: each attempt costs the API server requests."""

    def __init__(self) -> None:
        self._pauses: dict[PodUid, tuple[float, float]] = {}
        """Seconds of the last pause, and its end."""
        self._waiting: set[PodUid] = set()

    def add(self, pods: Iterable[PodUid], now: float) -> list[PodUid]:
        """Return pods that fail for the first time; `due` returns the others after their pauses.

        Of a pod whose Binding fails three times within seconds, `add` returns the first failure,
        and `due` the pod after 1 s and 2 s.
        """
        first: list[PodUid] = []
        for pod in pods:
            if pod in self._waiting:
                continue
            if pod not in self._pauses:
                pause_s = FIRST_PAUSE_S
                first.append(pod)
            else:
                pause_s = min(2 * self._pauses[pod][0], MAX_PAUSE_S)
                self._waiting.add(pod)
            self._pauses[pod] = pause_s, now + pause_s
        return first

    def due(self, now: float) -> list[PodUid]:
        ended = [pod for pod in self._waiting if self._pauses[pod][1] <= now]
        self._waiting.difference_update(ended)
        self._pauses = {
            pod: (pause_s, end)
            for pod, (pause_s, end) in self._pauses.items()
            if pod in self._waiting or now < end + FORGET_S
        }
        return ended


class EndedWaits:
    """Repeats that a pod waits no longer, since an earlier event that it waits may arrive later."""

    def __init__(self) -> None:
        self._new: dict[PodUid, PodHandedOver] = {}
        self._due: dict[PodUid, PodHandedOver] = {}

    def add(self, event: PodHandedOver) -> PodHandedOver:
        self._new[event.queued.pod] = event
        return event

    def discard(self, pod: PodUid) -> None:
        self._new.pop(pod, None)
        self._due.pop(pod, None)

    def take_due(self) -> list[PodHandedOver]:
        """Return the events that were added before the last call."""
        due = list(self._due.values())
        self._due = self._new
        self._new = {}
        return due


class PodTracker:
    def __init__(self) -> None:
        self.pending: dict[PodUid, ObservedPod] = {}
        self.budget_gated: dict[PodUid, ObservedPod] = {}
        self.handed_over: dict[PodUid, ObservedPod] = {}
        self.ended_waits = EndedWaits()
        self._unexplained: dict[PodUid, int] = {}
        """Calls of `resync_unexplained` in a row that saw no reason."""
        self.groups = PodGroupIndex()
        self._grouped: dict[PodUid, ObservedPod] = {}
        """As observed, without their gang."""
        self._members: dict[str, set[PodUid]] = {}
        self.changed_groups: set[str] = set()
        """Other schedulers have placed more or fewer of their pods."""
        self.storage = ClaimedStorage()
        self._claiming: dict[PodUid, ObservedPod] = {}
        """As observed, without what their PersistentVolumeClaims need."""
        self._sharers: dict[tuple[str, ClaimKey], set[PodUid]] = {}
        self.changed_claims: set[ClaimKey] | None = set()
        """Since `update_claiming`; None if it may be any."""
        self.usage: dict[NodeName, Counter[str]] = {}
        self.reservations: dict[NodeName, Counter[str]] = {}
        """Pods that reserve its GPUs for another scheduler, by namespace."""
        self.anti_affinity: dict[NodeName, Counter[PodAntiAffinity]] = {}
        self.repelling_pods: dict[NodeName, set[PodUid]] = {}
        """Pods with required anti-affinity that may have a lease."""
        self.namespaces: dict[Namespace, Mapping[str, str]] = {}
        self.observed: dict[PodUid, ObservedPod] = {}
        self.selected = SelectedPods()
        self.changed_nodes: set[NodeName] = set()
        """Since `NodeTracker.update_usage`."""
        self.limits_have_changed = False
        self.has_urgent_changes = False
        self.revision = 0
        """Highest resource version, 0 if unknown."""

    def update(self, now: ObservedPod, before: ObservedPod | None) -> list[PodEvent]:
        self._count(before, -1)
        self._count(now, +1)
        self.observed[now.pod] = now
        self.changed_groups |= self.groups.count(now, before)
        if now.claims:
            self._count_users(now, before)
        is_published = self.budget_gated.pop(now.pod, None) is not None
        if now.is_pending:
            return [*self._update_pending(now), *self._update_first_sharers(now)]
        if now.awaits_kube_scheduler:
            return self._update_handed_over(now)
        waited = self.handed_over.get(now.pod)
        self._remove_pending(now.pod)
        if waited is not None and now.node and not _requests_gpus(waited):
            return [self.ended_waits.add(replace(handed_over_event(waited), bound=True))]
        if now.budget_gated and not (now.node or now.is_terminated or now.deleting):
            self.budget_gated[now.pod] = now
            return [] if is_published else [_gated_event(now)]
        if now.ours and now.has_ended and not (before is not None and before.has_ended):
            return [terminated_event(now)]
        return []

    def remove(self, last: ObservedPod) -> list[PodEvent]:
        self._count(last, -1)
        self.observed.pop(last.pod, None)
        self._remove_pending(last.pod)
        self.changed_groups |= self.groups.count(None, last)
        if last.claims:
            self._count_users(None, last)
        return [terminated_event(last)] if last.ours and not last.is_terminated else []

    def update_namespaces(self, changes: Mapping[Namespace, Mapping[str, str] | None]) -> None:
        before = dict(self.namespaces)
        for name, labels in changes.items():
            if labels is None:
                self.namespaces.pop(name, None)
            else:
                self.namespaces[name] = labels
        if self.namespaces != before:
            self.changed_nodes.update(
                node
                for node, terms in self.anti_affinity.items()
                if any(term.namespace_selector for term in terms)
            )
            self.selected.update_namespaces(self.namespaces, self.observed, self.pending)

    def update_groups(self, changes: PodGroupChanges, generation: int) -> list[PodEvent]:
        """Return events with `generation`, since the pods themselves have not changed."""
        names = self.groups.apply(changes)
        if names is None:
            pods = list(self._grouped.values())
        else:
            pods = [pod for name in sorted(names) for pod in self._pods_of_group(name)]
        return [
            event
            for pod in pods
            if pod.group and pod.group.kind is changes.kind
            for event in self._update_pending(pod, requeue_number=-generation)
        ]

    def _pods_of_group(self, name: str) -> list[ObservedPod]:
        return [self._grouped[pod] for pod in sorted(self._members.get(name, ()))]

    def update_members(self, generation: int) -> list[PodEvent]:
        names, self.changed_groups = self.changed_groups, set()
        return [
            event
            for name in names
            for pod in self._pods_of_group(name)
            for event in self._update_pending(pod, requeue_number=-generation)
        ]

    def update_selected(self, generation: int) -> list[PodEvent]:
        changed = self.selected.changed
        self.selected.changed = set()
        return [
            event
            for pod in changed
            if pod in self.pending
            for event in self._update_pending(self.observed[pod], requeue_number=-generation)
        ]

    def update_storage(self, changes: StorageChanges) -> None:
        before = self.storage.limited
        self._note_claims(self.storage.apply(changes))
        is_relisted = changes.synced and bool(self.storage.limited)
        self.limits_have_changed |= is_relisted or self.storage.limited != before
        if changes.kind is StorageKind.CSI_NODE:
            self.changed_nodes.update(NodeName(name) for (_, name), _ in changes.changed)

    @property
    def claiming_pods(self) -> int:
        return len(self._claiming)

    def update_claiming(self, generation: int) -> list[PodEvent]:
        changed = self.changed_claims
        self.changed_claims = set()
        return [
            event
            for pod in list(self._claiming.values())
            if changed is None or not changed.isdisjoint(pod.claim_keys)
            for event in self._update_pending(pod, requeue_number=-generation)
        ]

    def _count_users(self, now: ObservedPod | None, before: ObservedPod | None) -> None:
        self._note_claims(self.storage.count(now, before))
        if self.storage.limited:
            self.changed_nodes.update(pod.node for pod in (now, before) if pod and pod.node)

    def _note_claims(self, changed: set[ClaimKey] | None) -> None:
        if changed is None or self.changed_claims is None:
            self.changed_claims = None
        else:
            self.changed_claims |= changed

    def resync(self, generation: int) -> list[PodEvent]:
        return [
            *(_gated_event(pod, requeue_number=-generation) for pod in self.budget_gated.values()),
            *(pending_event(pod, requeue_number=-generation) for pod in self.pending.values()),
            *(handed_over_event(pod) for pod in self.handed_over.values()),
        ]

    def resync_unexplained(self, generation: int) -> list[PodEvent]:
        """Publish pods without a reason to wait in their status: their event may have been lost.

        The API server's clock may differ from ours, so calls are counted. The pauses double, so
        that thousands of pods in a queue delay each other little.
        """
        self._unexplained = {
            pod.pod: self._unexplained.get(pod.pod, 0) + 1
            for pod in self.pending.values()
            if not pod.shown
        }
        return [
            pending_event(self.pending[pod], requeue_number=-generation)
            for pod, calls in self._unexplained.items()
            if _is_due(calls)
        ]

    def requeue(
        self, pods: Iterable[PodUid], generation: int
    ) -> list[PodQueued | PodRejected | PodHandedOver]:
        uids = list(pods)
        return [
            *(
                pending_event(self.pending[pod], requeue_number=-generation)
                for pod in uids
                if pod in self.pending
            ),
            *(handed_over_event(self.handed_over[pod]) for pod in uids if pod in self.handed_over),
        ]

    def resync_shard(self, generation: int, shard: int) -> list[PodEvent]:
        gated = (pod for pod in self.budget_gated.values() if is_in_shard(pod, shard))
        pending = (pod for pod in self.pending.values() if is_in_shard(pod, shard))
        handed_over = (pod for pod in self.handed_over.values() if is_in_shard(pod, shard))
        return [
            *map(handed_over_event, handed_over),
            *(_gated_event(pod, requeue_number=-generation) for pod in gated),
            *(pending_event(pod, requeue_number=-generation) for pod in pending if pod.shown),
        ]

    def with_usage(self, node: NodeFacts) -> NodeFacts:
        """Kubelets let pods use any amount of resources that the node does not have."""
        used: Mapping[str, int] = self.usage.get(node.name, {})
        allocatable = node.allocatable
        if self.storage.limited:
            allocatable = {**allocatable, **self.storage.attachable(node.name)}
            used = {**used, **self.storage.attached(node.name)}
        return replace(
            node,
            allocatable=allocatable,
            used_by_others={
                key: min(max(used[key], -MOST), MOST) for key in allocatable if used.get(key)
            }
            | ports_in_use(used)
            | dict(self.selected.on_node(node.name)),
            other_manager=node.other_manager or managing_pods(self.reservations.get(node.name, ())),
            anti_affinity=resolve_all(self.anti_affinity.get(node.name, ()), self.namespaces),
            repelling_pods=tuple(sorted(self.repelling_pods.get(node.name, ()))[:MOST_ENTRIES]),
        )

    def _update_pending(self, observed: ObservedPod, *, requeue_number: int = 0) -> list[PodEvent]:
        self._set_group(observed.pod, observed)
        now = self.groups.with_gang(observed)
        if observed.claims and now is not None:
            self._claiming[observed.pod] = observed
            now = self.storage.with_claims(now, self._shared_claims(observed))
        if now is None:
            return []
        now = self.selected.with_rules(now, self.observed, self.pending)
        before = self.pending.get(now.pod)
        self.pending[now.pod] = now
        unchanged = before is not None and (
            before.request,
            before.request_error,
            before.labels,
        ) == (
            now.request,
            now.request_error,
            now.labels,
        )
        return [] if unchanged else [pending_event(now, requeue_number=requeue_number)]

    def _update_handed_over(self, now: ObservedPod) -> list[PodEvent]:
        before = self.handed_over.get(now.pod)
        self.handed_over[now.pod] = now
        unchanged = before is not None and (before.request, before.reason) == (
            now.request,
            now.reason,
        )
        return [] if unchanged else [handed_over_event(now)]

    def _remove_pending(self, pod: PodUid) -> None:
        self.pending.pop(pod, None)
        self.handed_over.pop(pod, None)
        self.budget_gated.pop(pod, None)
        self._claiming.pop(pod, None)
        self.selected.release(pod)
        self._set_group(pod, None)

    def _set_group(self, pod: PodUid, observed: ObservedPod | None) -> None:
        former = self._grouped.pop(pod, None)
        if former is not None and former.group is not None:
            _discard(self._members, former.group.name, pod)
            for key in former.claim_keys:
                _discard(self._sharers, (former.group.name, key), pod)
        if observed is not None and observed.group is not None:
            self._grouped[pod] = observed
            self._members.setdefault(observed.group.name, set()).add(pod)
            for key in observed.claim_keys:
                self._sharers.setdefault((observed.group.name, key), set()).add(pod)

    def _update_first_sharers(self, second: ObservedPod) -> list[PodEvent]:
        if second.group is None or not second.claims:
            return []
        group = second.group.name
        sharers = [self._sharers[group, key] for key in second.claim_keys]
        firsts = {pod for pods in sharers if len(pods) == 2 for pod in pods} - {second.pod}
        return [event for pod in firsts for event in self._update_pending(self._grouped[pod])]

    def _shared_claims(self, pod: ObservedPod) -> list[ClaimKey]:
        if pod.group is None:
            return []
        group = pod.group.name
        return [key for key in pod.claim_keys if len(self._sharers[group, key]) > 1]

    def _count(self, pod: ObservedPod | None, sign: int) -> None:
        if pod is None or pod.node is None or pod.is_terminated:
            return
        self.selected.count(pod, sign)
        if reserves_gpus(pod.namespace):
            _add(self.reservations, pod.node, {str(pod.namespace): sign})
        if pod.repels:
            _add(self.anti_affinity, pod.node, dict.fromkeys(pod.repels, sign))
            if pod.ours:
                pods = self.repelling_pods.setdefault(pod.node, set())
                (pods.add if sign > 0 else pods.discard)(pod.pod)
                if not pods:
                    del self.repelling_pods[pod.node]
            self.changed_nodes.add(pod.node)
            self.has_urgent_changes = True
        if pod.unleased_resources:
            used = {key: sign * amount for key, amount in pod.unleased_resources.items()}
            _add(self.usage, pod.node, used)
            self.changed_nodes.add(pod.node)


def pending_event(pod: ObservedPod, *, requeue_number: int = 0) -> PodQueued | PodRejected:
    if pod.request is None:
        return rejected_event(pod, pod.request_error, requeue_number=requeue_number)
    return queued(pod, pod.request, requeue_number=requeue_number)


def _requests_gpus(pod: ObservedPod) -> bool:
    """A lease ends the pod's wait."""
    return pod.request is not None and bool(pod.request.containers)


def handed_over_event(pod: ObservedPod) -> PodHandedOver:
    """With an invalid request it has no GPUs and no ResourceClaims: no pod is evicted for it."""
    if pod.request is None:
        event = replace(queued(pod, PodRequest(priority=pod.priority)), handed_over="")
    else:
        event = queued(pod, pod.request)
    return PodHandedOver(queued=event, reason=pod.reason)


def rejected_event(
    pod: ObservedPod, reason: str, *, requeue_number: int = 0, foreign: bool = False
) -> PodRejected:
    return PodRejected(
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        resource_version=f"{pod.resource_version}{requeue_number or ''}",
        reason=cut(reason),
        foreign=foreign,
    )


def _is_due(calls: int) -> bool:
    if calls >= MOST_UNEXPLAINED_CALLS:
        return calls % MOST_UNEXPLAINED_CALLS == 0
    rounds, rest = divmod(calls, UNEXPLAINED_CALLS)
    return not rest and rounds.bit_count() == 1


def is_in_shard(pod: ObservedPod, shard: int) -> bool:
    return zlib.crc32(pod.pod.encode()) % RESYNC_SHARDS == shard % RESYNC_SHARDS


def _gated_event(pod: ObservedPod, *, requeue_number: int = 0) -> PodGated:
    return PodGated(
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        resource_version=pod.resource_version,
        priority=pod.priority,
        created_at=pod.created_at,
        requeue_number=requeue_number,
    )


def terminated_event(pod: ObservedPod) -> PodTerminated:
    return PodTerminated(
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        node=pod.node,
        phase=pod.phase if pod.is_terminated else "",
        rejection=pod.rejection,
    )


def _discard(index: dict[_Key, set[PodUid]], key: _Key, pod: PodUid) -> None:
    pods = index[key]
    pods.discard(pod)
    if not pods:
        del index[key]


def _add(
    totals: dict[NodeName, Counter[_Counted]], node: NodeName, amounts: Mapping[_Counted, int]
) -> None:
    total = totals.setdefault(node, Counter())
    for key, amount in amounts.items():
        total[key] += amount
        if not total[key]:
            del total[key]
    if not total:
        del totals[node]

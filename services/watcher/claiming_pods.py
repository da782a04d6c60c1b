"""Pods of other schedulers that wait for ResourceClaims of our DeviceClasses; pure.

A pod counts once its scheduler has a reason why it waits, or does not respond: a pod that gets a
node at once is not published.
"""

from collections.abc import Iterable, Iterator, Mapping
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from services.watcher.kept_objects import Room
from services.watcher.pod_tracker import EndedWaits, is_in_shard, terminated_event
from shared.kubernetes.resource_claims import ApiResourceClaim
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.pod_events import PodHandedOver, PodTerminated
from shared.model.names import Namespace, PodUid
from shared.model.requests.request import PodRequest
from shared.pods.observed_pod import ObservedPod, queued_elsewhere

MOST_OF_NAMESPACE = 500
"""Those of the highest priority, then the oldest, are published."""
MOST_CLASSES = 8
MOST_CLAIMS = 200_000
MOST_CLAIMS_OF_NAMESPACE = 50_000

ClaimingEvent = PodHandedOver | PodTerminated


class ClaimUpdate(NamedTuple):
    claim: PodUid
    namespace: Namespace
    name: str
    allocation: AllocatedClaim | None
    classes: frozenset[str] = frozenset()


class _Claim(NamedTuple):
    claim: PodUid
    classes: frozenset[str]
    has_ours: bool


def requested_classes(claim: ApiResourceClaim) -> frozenset[str]:
    if claim.status.allocation is not None:
        return frozenset()
    classes = (device.device_class_name for _, device in claim.spec.devices)
    return frozenset(islice(classes, MOST_CLASSES))


class ClaimingPods:
    def __init__(self) -> None:
        self.changed: set[Namespace] = set()
        self.published: dict[PodUid, ObservedPod] = {}
        """As they were published last."""
        self.ended_waits = EndedWaits()
        self._waiting: dict[Namespace, dict[PodUid, ObservedPod]] = {}
        self._by_namespace: dict[Namespace, set[PodUid]] = {}
        self._ended: dict[PodUid, ObservedPod] = {}
        """Their end is not published yet."""
        self._untried: set[PodUid] = set()
        """Pods without a reason at the last call of `note_untried` ..."""
        self._ignored: set[PodUid] = set()
        """... and at the call before it."""
        self._claims: dict[Namespace, dict[str, _Claim]] = {}
        self.room = Room(
            "ResourceClaims", most=MOST_CLAIMS, most_of_namespace=MOST_CLAIMS_OF_NAMESPACE
        )
        self._classes: set[str] = set()

    def observe(self, batch: Iterable[tuple[ObservedPod | None, ObservedPod | None]]) -> None:
        for now, before in batch:
            if now is not None and now.awaited is not None:
                self._waiting.setdefault(now.namespace, {})[now.pod] = now
                self._ended.pop(now.pod, None)
                self.changed.add(now.namespace)
            elif before is not None and before.awaited is not None:
                self._remove(before)
                if before.pod in self.published and (now is None or now.has_ended):
                    self._ended[before.pod] = now or before

    def update_claims(self, updates: Iterable[ClaimUpdate]) -> None:
        for update in updates:
            claims = self._claims.setdefault(update.namespace, {})
            before = claims.get(update.name)
            now = before
            has_ours = update.allocation is not None
            if update.classes or has_ours:
                now = _Claim(update.claim, update.classes, has_ours)
            elif before is not None and before.claim == update.claim:
                now = None
            if now != before:
                self._put_claim(update.namespace, update.name, now)
            if not claims:
                del self._claims[update.namespace]

    def _put_claim(self, namespace: Namespace, name: str, now: _Claim | None) -> None:
        claims = self._claims[namespace]
        before = claims.pop(name, None)
        if before is not None:
            self.room.release(namespace, before)
        if now is not None and self.room.admits(namespace, now):
            claims[name] = now
        if namespace in self._waiting:
            self.changed.add(namespace)

    def update_classes(self, changes: Mapping[str, bool]) -> None:
        before = frozenset(self._classes)
        self._classes.update(name for name, is_ours in changes.items() if is_ours)
        self._classes.difference_update(name for name, is_ours in changes.items() if not is_ours)
        if self._classes != before:
            self.changed.update(self._waiting)

    def note_untried(self) -> None:
        """Let pods count whose scheduler had no reason at the last call either."""
        untried = {
            pod.pod: pod.namespace
            for pods in self._waiting.values()
            for pod in pods.values()
            if not pod.reason
        }
        ignored = self._untried & untried.keys()
        self.changed.update(untried[pod] for pod in ignored - self._ignored)
        self._untried = set(untried)
        self._ignored = ignored

    def update(self) -> list[ClaimingEvent]:
        namespaces = self.changed
        self.changed = set()
        return [event for name in namespaces for event in self._update(name)]

    def resync(self) -> list[ClaimingEvent]:
        return [_event_of(pod) for pod in self.published.values()]

    def resync_shard(self, shard: int) -> list[ClaimingEvent]:
        return [_event_of(pod) for pod in self.published.values() if is_in_shard(pod, shard)]

    def _update(self, namespace: Namespace) -> Iterator[ClaimingEvent]:
        waiting = {pod.pod: pod for pod in self._first(namespace)}
        for uid in sorted(self._by_namespace.pop(namespace, set()) - waiting.keys()):
            last = self.published.pop(uid)
            ended = self._ended.pop(uid, None)
            yield (
                terminated_event(ended)
                if ended
                else self.ended_waits.add(_event_of(last, waits=False))
            )
        for uid, pod in waiting.items():
            before = self.published.get(uid)
            if before is None or _shown(before) != _shown(pod):
                self.published[uid] = pod
                self.ended_waits.discard(uid)
                yield _event_of(pod)
        if waiting:
            self._by_namespace[namespace] = set(waiting)

    def _first(self, namespace: Namespace) -> list[ObservedPod]:
        pods = self._waiting.get(namespace, {}).values()
        ours = {
            name
            for name, claim in self._claims.get(namespace, {}).items()
            if claim.has_ours or not self._classes.isdisjoint(claim.classes)
        }
        counting = [
            pod
            for pod in pods
            if pod.awaited and not ours.isdisjoint(pod.awaited.names)
            if pod.reason or pod.pod in self._ignored or pod.pod in self.published
        ]
        return nsmallest(MOST_OF_NAMESPACE, counting, key=_place)

    def _remove(self, pod: ObservedPod) -> None:
        pods = self._waiting.get(pod.namespace, {})
        pods.pop(pod.pod, None)
        if not pods:
            self._waiting.pop(pod.namespace, None)
        if pod.pod in self.published:
            self.changed.add(pod.namespace)


def _event_of(pod: ObservedPod, *, waits: bool = True) -> PodHandedOver:
    return PodHandedOver(queued=queued_elsewhere(pod), reason=pod.reason, bound=not waits)


def _place(pod: ObservedPod) -> tuple[int, float, PodUid]:
    return -pod.priority, pod.created_at, pod.pod


def _shown(pod: ObservedPod) -> tuple[PodRequest | None, str]:
    return pod.request, pod.reason

"""Pods that their rules about other pods refused; pure."""

from collections.abc import Hashable
from dataclasses import replace

from shared.model.events.pod_events import PodQueued
from shared.model.names import PodUid
from shared.placing.index.pod_counts import PodCounts
from shared.placing.index.threshold_column import store

MOST_PODS = 16_384
"""The oldest are dropped: a watcher publishes every waiting pod again within two minutes."""


class RefusedByRules:
    """The ledger offers freed capacity, but a pod that starts elsewhere frees none."""

    def __init__(self, counts: PodCounts) -> None:
        self._counts = counts
        self._pods: dict[PodUid, tuple[PodQueued, int]] = {}

    def add(self, event: PodQueued, decided_at: int) -> None:
        """`decided_at` is where the mirror's changes ended."""
        rules = event.request.pod_rules
        if rules is not None and rules.is_required:
            self._pods.pop(event.pod, None)
            store(self._pods, event.pod, (event, decided_at), MOST_PODS)

    def discard(self, pod: PodUid) -> None:
        self._pods.pop(pod, None)

    def take_changed(self, capacity: int) -> list[PodQueued]:
        """`capacity` is the ledger's number."""
        changed_at: dict[Hashable, int] = {}
        changed = []
        for event, decided_at in self._pods.values():
            rules = event.request.pod_rules
            if rules not in changed_at and rules is not None:
                changed_at[rules] = self._counts.changed_at(rules.counted)
            if changed_at[rules] > decided_at:
                changed.append(replace(event, requeue_number=max(capacity, 1)))
        for event in changed:
            del self._pods[event.pod]
        return changed

"""Refused pods: stored as waiting, with their refusals published."""

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from services.placer.metrics import count
from services.placer.rounds.decisions import DecisionContext, RefusedPod
from services.placer.rounds.refusal_texts import DEFERRED
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock
from shared.model.events.pod_events import PlacementRefused, PodQueued, message_digest
from shared.model.leases.ledger import RESERVED_FOR_OTHER, WaitingPod, WaitResult
from shared.model.names import PodUid
from shared.model.requests.placement import Refusal
from shared.placing.index.pod_counts import PodCounts
from shared.placing.index.threshold_column import store

CACHED_REASONS = 65_536
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


@dataclass(eq=False)
class RefusedPods:
    ledger: RedisLeases
    clock: Clock
    context: DecisionContext

    def __post_init__(self) -> None:
        self.by_rules = RefusedByRules(self.context.index.pod_counts)
        self.decided_at = 0
        """Where the mirror's changes ended before the last decisions."""
        self._reasons: dict[PodUid, str] = {}
        """The reason that this replica last published for each waiting pod."""

    async def write(
        self,
        refused: Sequence[RefusedPod],
        capacity: int,
        recipients: Collection[PodUid] | None = None,
        min_members: int = 0,
    ) -> tuple[WaitResult, list[PlacementRefused]]:
        """Store pods as waiting, unless capacity freed since may help them; return the events, too.

        Freed capacity is offered to the `recipients`, all by default. With `min_members`, pods are
        not stored if that many of their gang exist by now.
        """
        if not refused:
            return WaitResult(), []
        quotas = self.context.quotas
        for pod, _ in refused:
            self.by_rules.add(pod, self.decided_at)
        result = await self.ledger.waiting_pods.enqueue(
            [
                self.waiting(
                    pod,
                    refusal,
                    quotas.decided_at(pod, capacity),
                    receives_offers=recipients is None or pod.pod in recipients,
                    min_members=min_members,
                )
                for pod, refusal in refused
            ]
        )
        quotas.forget(pod for pod, _ in refused if pod.pod in result.stale)
        self.drop_gone(result.gone)
        leased = {lease.pod for lease in result.already_leased}
        dropped = {*result.stale, *result.gone, *leased}
        changed = set(result.changed)
        count("stale", len(set(result.stale)))
        count("already_leased", len(leased))
        count("refused", len(refused) - len(dropped))
        events = [
            self._refusal_event(pod, refusal)
            for pod, refusal in refused
            if pod.pod not in dropped
            and (pod.pod in changed or not self.is_published(pod, refusal))
        ]
        return result, events

    def waiting(
        self,
        pod: PodQueued,
        refusal: Refusal,
        capacity: int,
        *,
        receives_offers: bool = True,
        min_members: int = 0,
    ) -> WaitingPod:
        return WaitingPod(
            queued=pod,
            refusal=refusal,
            capacity=capacity,
            waiting_since=self.clock.now(),
            receives_offers=receives_offers,
            min_members=min_members,
        )

    async def defer(self, deferred: Sequence[PodQueued]) -> list[PodQueued]:
        """Store pods as waiting until their capacity has been offered to others; return stale ones.

        No event is published: this takes a moment, and ends with a placement or a verdict.
        """
        if not deferred:
            return []
        result = await self.ledger.waiting_pods.enqueue(
            [self.waiting(pod, DEFERRED, RESERVED_FOR_OTHER) for pod in deferred]
        )
        self.drop_gone(result.gone)
        ready = {*result.stale, *(lease.pod for lease in result.already_leased)}
        return [pod for pod in deferred if pod.pod in ready]

    def drop_gone(self, pods: Collection[PodUid]) -> None:
        count("gone", len(pods))
        for pod in pods:
            self.forget(pod)

    def forget(self, pod: PodUid) -> None:
        self._reasons.pop(pod, None)
        self.by_rules.discard(pod)

    def forget_published(self, pods: Iterable[PodUid]) -> None:
        for pod in pods:
            self._reasons.pop(pod, None)

    def is_published(self, event: PodQueued, refusal: Refusal) -> bool:
        """Return whether this is the reason last published, and the one that a resync found."""
        is_resync = event.requeue_number < 0
        is_shown = not is_resync or event.shown == message_digest(refusal.text)
        return is_shown and self._reasons.get(event.pod) == refusal.reason

    def _refusal_event(self, pod: PodQueued, refusal: Refusal) -> PlacementRefused:
        self._reasons.pop(pod.pod, None)
        store(self._reasons, pod.pod, refusal.reason, CACHED_REASONS)
        return PlacementRefused(
            pod=pod.pod,
            namespace=pod.namespace,
            name=pod.name,
            refusal=refusal,
            trace=pod.trace,
        )

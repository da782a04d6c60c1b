"""The steps of open preemptions: announcement, evictions, the reservation of the pending pod.

Every step is saved with the version that it is based on, and every external call may be repeated:
the next leader continues from the saved state.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from services.binder.metrics import PrometheusMetrics
from services.binder.preempt import announcements
from services.binder.preempt.eviction_client import EvictionClient
from services.binder.preempt.rules import HOUR_S, PreemptionRules, over_limit
from services.binder.preempt.steps import ObservedPreemption, Step, expiry, next_step
from services.binder.report.event_writer import EventRecorder
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.clock import Clock
from shared.model.events.pod_events import PlacementChosen, PodQueued
from shared.model.lease import Lease
from shared.model.ledger import AlreadyLeased, LedgerSnapshot, Reservation, Reserved
from shared.model.names import NodeName, PodUid
from shared.model.preemption import (
    EvictionOutcome,
    Preemption,
    PreemptionStage,
    PreemptionState,
    StoredPreemption,
    Victim,
)
from shared.placing.anti_affinity import repelled_request
from shared.placing.node_filters import check_anti_affinity

RESERVATION_S = 30.0
OFFER_S = 2.0
"""Interval of offers to a pod whose node kube-scheduler chooses."""
BLOCKED_S = 10.0
"""Pause before an eviction that a PodDisruptionBudget blocks is tried again."""

Offer = Callable[[str, str, PodUid, NodeName], Awaitable[None]]
"""Offers a pod, by namespace, name and uid, the devices that were claimed for it on a node."""


class PreemptionExecutor:
    """Advances open preemptions; used by the leader only."""

    def __init__(
        self,
        *,
        ledger: RedisLeases,
        store: Preemptions,
        evictions: EvictionClient,
        events: EventRecorder,
        metrics: PrometheusMetrics,
        clock: Clock,
        rules: PreemptionRules,
        offer: Offer,
    ) -> None:
        self.ledger = ledger
        self.store = store
        self.evictions = evictions
        self.events = events
        self.metrics = metrics
        self.clock = clock
        self.rules = rules
        self.offer = offer
        self._blocked_until: dict[str, float] = {}
        self._offer_at: dict[PodUid, float] = {}

    async def advance(
        self, read: StoredPreemption, state: PreemptionState
    ) -> list[PlacementChosen]:
        """Take the next step of a preemption; return the placement of its pending pod, if any."""
        observed = await self._observe(read.preemption)
        step, reason = next_step(read, observed, state, self.clock.now())
        match step:
            case Step.ANNOUNCE:
                await self._announce_within_limits(read)
            case Step.EVICT:
                if self.clock.now() >= self._blocked_until.get(read.preemption.id, 0.0):
                    await self._evict(read)
            case Step.RESERVE:
                return await self._reserve(read)
            case Step.BIND:
                return _placements(observed.lease)
            case Step.CLOSE:
                await self.store.close(read)
            case Step.CANCEL:
                await self._cancel(read, reason)
            case Step.WAIT:
                pass
        return []

    async def _observe(self, preemption: Preemption) -> ObservedPreemption:
        victims = [victim.pod for victim in preemption.victims]
        if preemption.wanted is None:
            return ObservedPreemption(waiting=False, lease=None, leased_victims=frozenset())
        # In this order, so that a pod that got a lease meanwhile is never observed without either.
        waiting = await self.ledger.waiting_pods.load([preemption.wanted.pod])
        own, *theirs = await self.ledger.load([preemption.wanted.pod, *victims])
        return ObservedPreemption(
            waiting=bool(waiting),
            lease=own,
            leased_victims={lease.pod for lease in theirs if lease},
        )

    async def _announce_within_limits(self, read: StoredPreemption) -> None:
        if read.preemption.reason:
            now = self.clock.now()
            past = await self.store.state(now=now, past_s=HOUR_S)
            reason = over_limit(read.preemption, past, self.rules, now)
            if reason:
                await self._cancel(read, reason)
                return
        await self.announce(read)

    async def announce(self, read: StoredPreemption) -> bool:
        """Announce the evictions, if a dry run allows all; False: cancelled, since one may not."""
        preemption = read.preemption
        for victim in preemption.victims:
            outcome, reason = await self.evictions.evict(victim, dry_run=True)
            if outcome is EvictionOutcome.BLOCKED:
                await self._cancel(read, f"{victim.namespace}/{victim.name}: {reason}")
                return False
        at = self.clock.now() + self.rules.notice_s
        for victim in preemption.victims:
            await self.evictions.announce(victim, at)
            self.events.record(announcements.announced_event(victim, preemption, at))
        # No pod is evicted before the last one has had its notice.
        evict_at = self.clock.now() + self.rules.notice_s
        announced = replace(
            preemption.stepped(PreemptionStage.ANNOUNCED),
            evict_at=evict_at,
            expires_at=expiry(preemption.victims, self.rules.notice_s, self.clock.now()),
        )
        if await self.store.save(read, announced) and announced.wanted is not None:
            self.events.record(announcements.beneficiary_event(announced))
        return True

    async def _evict(self, read: StoredPreemption) -> None:
        """Evict the remaining victims; one that a PodDisruptionBudget now blocks is retried."""
        current: StoredPreemption | None = read
        if read.preemption.stage is PreemptionStage.ANNOUNCED:
            current = await self.store.save(read, read.preemption.stepped(PreemptionStage.EVICTING))
        for victim in read.preemption.left:
            if current is None:
                return
            outcome, reason = await self.evictions.evict(victim)
            if outcome is not EvictionOutcome.BLOCKED:
                current = await self._record_eviction(current, victim, outcome)
            elif _any_evicted(current.preemption):
                self._blocked_until[read.preemption.id] = self.clock.now() + BLOCKED_S
            else:
                await self._cancel(current, f"{victim.namespace}/{victim.name}: {reason}")
                return

    async def _record_eviction(
        self, read: StoredPreemption, victim: Victim, outcome: EvictionOutcome
    ) -> StoredPreemption | None:
        preemption = read.preemption
        event = announcements.evicted_event(victim, preemption)
        record = announcements.eviction_record(victim, preemption, outcome, event, self.clock.now())
        saved = await self.store.save(read, preemption.after(victim, outcome), [record])
        if saved is not None and outcome is EvictionOutcome.EVICTED:
            self.events.record(event, once=True)
            self.metrics.count_eviction(victim, record.for_namespace)
        return saved

    async def _reserve(self, read: StoredPreemption) -> list[PlacementChosen]:
        wanted = read.preemption.wanted
        if wanted is None:
            return []
        if read.preemption.by_kube_scheduler:
            await self._offer(wanted)
            return []
        waiting = await self.ledger.waiting_pods.load([wanted.pod])
        cluster = await self.ledger.snapshot()
        node = wanted.candidates[0].node
        if any(_is_repelled(each.queued, node, cluster) for each in waiting):
            await self._cancel(read, f"the anti-affinity of another pod keeps it off node {node}")
            return []
        wanted = replace(wanted, read_version=cluster.version)
        [outcome] = await self.ledger.reserve([wanted], now=self.clock.now(), ttl_s=RESERVATION_S)
        if not isinstance(outcome, Reserved | AlreadyLeased):
            return []  # tried again until the preemption expires
        await self.store.save(read, read.preemption.stepped(PreemptionStage.HANDED))
        return _placements(outcome.lease)

    async def _offer(self, wanted: Reservation) -> None:
        """Let kube-scheduler try the pod; a binder reserves when that chooses the node."""
        now = self.clock.ticks()
        if now >= self._offer_at.get(wanted.pod, 0.0):
            self._offer_at = {pod: at for pod, at in self._offer_at.items() if at > now}
            self._offer_at[wanted.pod] = now + OFFER_S
            node = wanted.candidates[0].node
            await self.offer(wanted.namespace, wanted.name, wanted.pod, node)

    async def _cancel(self, read: StoredPreemption, reason: str) -> None:
        for victim in read.preemption.left:
            await self.evictions.withdraw(victim)
        if await self.store.close(read):
            for event in announcements.cancelled_events(read.preemption, reason):
                self.events.record(event)


def _is_repelled(pod: PodQueued, name: NodeName, cluster: LedgerSnapshot) -> bool:
    """Return whether required anti-affinity came to the node after the preemption was planned."""
    needs = repelled_request(pod, (node.facts for node in cluster.nodes)).node_requirements
    found = (node.facts for node in cluster.nodes if node.facts.name == name)
    return any(check_anti_affinity(needs, facts) for facts in found)


def _any_evicted(preemption: Preemption) -> bool:
    return any(victim.outcome is EvictionOutcome.EVICTED for victim in preemption.victims)


def _placements(lease: Lease | None) -> list[PlacementChosen]:
    return [PlacementChosen(lease=lease, trace=lease.trace)] if lease else []

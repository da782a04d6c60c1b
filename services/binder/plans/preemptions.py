"""Planned preemptions, carried out: notice, evictions, and the freed devices handed over."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from services.binder.clients import NodeAgentClient, PodClient
from services.binder.ledger_sync.sweep import SchedulerOffers
from services.binder.metrics import count_eviction
from services.binder.plans.claimed_devices import placement_of, placements_among, reserve_claimed
from services.binder.plans.starts import PlannedStarts
from services.binder.plans.steps import (
    ObservedPreemption,
    Step,
    beneficiary_events,
    cancelled_events,
    eviction_record,
    next_step,
    victim_event,
)
from services.binder.report.event_writer import EventRecorder
from services.binder.report.explanations import KubernetesEvent
from shared.ledger.connection import in_batches
from shared.ledger.leases import RedisLeases
from shared.ledger.ledger_inventory import MAX_AGE_S
from shared.ledger.preemptions import Preemptions
from shared.model.clock import Clock, until_tick, wait_for_event
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.events.plan_events import PlansChanged
from shared.model.events.pod_events import PlacementChosen
from shared.model.leases.lease import LeaseState
from shared.model.leases.ledger import Reservation, WaitingPod
from shared.model.leases.preemption import (
    EvictionOutcome,
    Preemption,
    PreemptionStage,
    PreemptionState,
    StoredPreemption,
    Victim,
)
from shared.model.names import PodUid
from shared.placing.preemption_rules import expiry
from shared.runtime.leadership import Leadership
from shared.runtime.service import loops, observes
from shared.runtime.span_attributes import (
    NAMESPACE,
    NODE,
    POD_NAME,
    POD_UID,
    REASON,
    REASON_CODE,
)
from shared.runtime.telemetry import Tracing

logger = logging.getLogger(__name__)

T = TypeVar("T")

OFFER_S = 2.0
"""Interval of offers to a pod whose node kube-scheduler chooses."""
SLICES_S = 5.0
"""The same for a ResourceClaim's pod: each makes kube-scheduler try all such pods."""
BLOCKED_S = 10.0
"""Pause before an eviction that a PodDisruptionBudget blocks is tried again."""
STEP_S = 0.5
"""Interval of steps of preemptions that are in progress."""
LOOK_S = 1.0
"""Interval of looks at the ledger while nothing is planned."""
NEXT_S = 0.02
"""Pause after steps were taken: the next ones may be due."""
AT_ONCE = 8
"""A Binding waits for its turn among their requests to the API server."""
VICTIMS_AT_ONCE = 16
"""Each batch of evictions is one write to Redis."""
MOST_STEPS = 64
OBSERVED_AT_ONCE = 64
"""Nothing is bound while the reply is decoded."""
MAX_PAUSE_S = 5.0
"""A pause as long as the round before it, up to this, leaves half of the time to Bindings."""
GIVE_WAY_S = 1.0
"""For so long at most, a step waits while Bindings do: plans proceed under any load."""
GIVE_WAY_PAUSE_S = 0.02
"""Interval of looks at whether they still do."""


async def side_by_side(actions: Iterable[Awaitable[T]]) -> list[T]:
    """Raises the first error, once all actions have ended."""
    results = await asyncio.gather(*actions, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


@dataclass(eq=False, kw_only=True)
class PlannedPreemptions:
    """Takes the steps of plans while this binder leads.

    Every external call may be repeated: the next leader continues from the saved state.
    """

    ledger: RedisLeases
    store: Preemptions
    pods: PodClient
    events: EventRecorder
    clock: Clock
    offers: SchedulerOffers
    agents: NodeAgentClient
    starts: PlannedStarts
    leadership: Leadership
    is_busy: Callable[[], bool] = lambda: False
    """Bindings that wait to be sent come first."""
    step_s: float = LOOK_S
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        self._blocked_until: dict[str, float] = {}
        self._offer_at: dict[PodUid, float] = {}
        self._acting = asyncio.Semaphore(AT_ONCE)
        self._changed = asyncio.Event()
        self._awaited = frozenset[PodUid]()
        """Pods whose leases end for plans."""
        self._has_acted = False
        self._failures = list[LeaseholdError]()
        """Of steps since the last look at all plans: they hold up no other plan."""
        self._last = ""
        """ID of the preemption that stepped last."""

    async def claimed_for(self, pod: PodUid) -> Reservation | None:
        state = await self.store.state(now=self.clock.now(), past_s=0)
        own = state.preemption_for(pod)
        return next((wanted for wanted in own.wanted if wanted.pod == pod), None) if own else None

    @observes
    async def note_changes(self, events: Sequence[PlansChanged]) -> None:
        self._changed.set()

    def note_ended(self, pods: Iterable[PodUid]) -> None:
        if not self._awaited.isdisjoint(pods):
            self._changed.set()

    async def wait(self) -> None:
        await wait_for_event(self._changed, until_tick(self.step_s))

    @loops(wait=lambda preemptions: preemptions.wait())
    async def carry_out(self) -> list[PlacementChosen]:
        max_age_s = 0.0 if self._changed.is_set() or self._has_acted else MAX_AGE_S
        self._changed.clear()
        status = await self.ledger.status(now=self.clock.ticks(), max_age_s=max_age_s)
        if status is None:
            return []
        is_due = bool(status.preemptions or status.waiting)
        self.step_s = STEP_S if is_due else LOOK_S
        if not is_due or not await self.leadership.holds():
            self._has_acted = False
            self._awaited = frozenset()
            return []
        began = self.clock.ticks()
        state = await self.store.state(now=self.clock.now(), past_s=0)
        self._awaited = state.victims()
        self._failures.clear()
        placements = await self._advance(state)
        placements += await self.starts.advance(state.starts)
        least_s = NEXT_S if self._has_acted else STEP_S
        self.step_s = max(least_s, min(self.clock.ticks() - began, MAX_PAUSE_S))
        if self._failures and not placements:
            raise self._failures[0]
        return placements

    async def _all(self, actions: Iterable[Awaitable[None]]) -> None:
        async def act(action: Awaitable[None]) -> None:
            async with self._acting:
                await self._give_way()
                try:
                    await action
                except LeaseholdError as error:
                    self._failures.append(error)

        await side_by_side(map(act, actions))

    async def _give_way(self) -> None:
        latest = self.clock.ticks() + GIVE_WAY_S
        while self.is_busy() and self.clock.ticks() < latest:
            await self.clock.sleep(GIVE_WAY_PAUSE_S)

    def _in_turn(self, preemptions: Iterable[StoredPreemption]) -> list[StoredPreemption]:
        """Return first those after the one that stepped last."""

        def place(read: StoredPreemption) -> tuple[bool, str]:
            id_ = read.preemption.id
            return id_ <= self._last, id_

        return sorted(preemptions, key=place)

    async def _advance(self, state: PreemptionState) -> list[PlacementChosen]:
        """Return the placements of pending pods."""
        placements = list[PlacementChosen]()
        freed = list[tuple[StoredPreemption, Sequence[WaitingPod]]]()
        left = MOST_STEPS
        self._has_acted = False
        for batch in in_batches(self._in_turn(state.open), OBSERVED_AT_ONCE):
            observed = await self._observe([read.preemption for read in batch])
            now = self.clock.now()
            steps = [
                (read, seen, *next_step(read, seen, state, now))
                for read, seen in zip(batch, observed, strict=True)
            ]
            due = [
                (step, read, reason) for read, _, step, reason in steps if self._acts(step, read)
            ]
            taken = due[:left]
            left -= len(taken)
            if taken:
                self._last = taken[-1][1].preemption.id
                self._has_acted |= any(step is not Step.OFFER for step, _, _ in taken)
            await self._all(self._take(*acting) for acting in taken)
            for read, seen, step, _ in steps:
                if step is Step.BIND:
                    reserved = LeaseState.RESERVED
                    leases = [lease for lease in seen.leases if lease.state is reserved]
                    placements += map(placement_of, leases)
                elif step is Step.RESERVE:
                    freed.append((read, seen.waiting))
        return placements + await self._reserve(freed)

    def _acts(self, step: Step, read: StoredPreemption) -> bool:
        if step is Step.EVICT:
            return self.clock.now() >= self._blocked_until.get(read.preemption.id, 0.0)
        return step not in {Step.WAIT, Step.RESERVE, Step.BIND}

    async def _take(self, step: Step, read: StoredPreemption, reason: str) -> None:
        match step:
            case Step.ANNOUNCE:
                await self._announce(read)
            case Step.EVICT:
                await self._evict(read)
            case Step.OFFER:
                await self._offer(read)
            case Step.CLOSE:
                await self.store.close(read)
            case Step.CANCEL:
                await self._cancel(read, reason)

    async def _observe(self, preemptions: Sequence[Preemption]) -> list[ObservedPreemption]:
        wanting = [preemption for preemption in preemptions if preemption.wanted]
        pending = [pod for preemption in wanting for pod in preemption.pods]
        victims = [
            holder
            for preemption in wanting
            if not preemption.left
            for victim in preemption.victims
            for holder in victim.leases
        ]
        holders = [holder for preemption in wanting for holder in preemption.holders]
        # In this order, so that a pod that got a lease meanwhile is never observed without either.
        waiting = {pod.queued.pod: pod for pod in await self.ledger.waiting_pods.load(pending)}
        loaded = await self.ledger.load([*holders, *victims])
        leases = {lease.pod: lease for lease in loaded if lease}
        missing = [pod for pod in pending if pod not in waiting and pod not in leases]
        gone = await self.ledger.waiting_pods.list_gone(missing) if missing else set[PodUid]()
        return [
            ObservedPreemption(
                waiting=[waiting[pod] for pod in preemption.pods if pod in waiting],
                leases=[leases[holder] for holder in preemption.holders if holder in leases],
                gone=gone.intersection(preemption.pods),
                leased_victims=leases.keys()
                & {holder for victim in preemption.victims for holder in victim.leases},
            )
            for preemption in preemptions
        ]

    async def _announce(self, read: StoredPreemption) -> None:
        """Without notice, evict at once."""
        preemption = read.preemption
        if await self._cancel_if_blocked(read):
            return
        at = self.clock.now() + preemption.notice_s
        victims_with_notice = preemption.victims if preemption.notice_s > 0 else ()
        async for victims in self._batches(victims_with_notice):
            await side_by_side(self.pods.announce(victim, at) for victim in victims)
            for victim in victims:
                self.events.record(victim_event(victim, preemption, at))
        # No pod is evicted before the last one has had its notice.
        now = self.clock.now()
        announced = replace(
            preemption.stepped(PreemptionStage.ANNOUNCED),
            evict_at=now + preemption.notice_s,
            expires_at=expiry(preemption.victims, preemption.notice_s, now),
        )
        saved = await self.store.save(read, announced)
        if saved is None:
            return
        for event in beneficiary_events(announced):
            self.events.record(event)
        if preemption.notice_s == 0:
            await self._evict(saved)

    async def _batches(self, victims: Sequence[Victim]) -> AsyncIterator[Sequence[Victim]]:
        """Raises UnavailableError once another binder leads, which continues from what is saved."""
        for number, batch in enumerate(in_batches(victims, VICTIMS_AT_ONCE)):
            if number and not await self.leadership.holds():
                raise UnavailableError("another binder leads")
            yield batch

    async def _cancel_if_blocked(self, read: StoredPreemption) -> bool:
        async for victims in self._batches(read.preemption.left):
            for victim, outcome, reason in await self._evict_all(victims, dry_run=True):
                if outcome is EvictionOutcome.BLOCKED:
                    await self._cancel(read, reason, victim)
                    return True
        return False

    async def _evict(self, read: StoredPreemption) -> None:
        """Evict the remaining victims; one that a PodDisruptionBudget now blocks is retried.

        If one is blocked before the first is evicted, none is: a gang ends as a whole.
        """
        current: StoredPreemption | None = read
        if read.preemption.stage is PreemptionStage.ANNOUNCED:
            if read.preemption.notice_s > 0 and await self._cancel_if_blocked(read):
                return
            begun = read.preemption.stepped(PreemptionStage.EVICTING)
            expires_at = expiry(begun.victims, 0.0, self.clock.now())
            current = await self.store.save(read, replace(begun, expires_at=expires_at))
        async for victims in self._batches(read.preemption.left):
            if current is None:
                return
            results = await self._evict_all(victims)
            blocked = [result for result in results if result[1] is EvictionOutcome.BLOCKED]
            if len(blocked) < len(results):
                current = await self._record_evictions(current, results)
            if current is None or not blocked:
                continue
            if any(
                victim.outcome is EvictionOutcome.EVICTED for victim in current.preemption.victims
            ):
                now = self.clock.now()
                self._blocked_until = {
                    id_: at for id_, at in self._blocked_until.items() if at > now
                }
                self._blocked_until[read.preemption.id] = now + BLOCKED_S
            else:
                victim, _, reason = blocked[0]
                await self._cancel(current, reason, victim)
                return

    async def _evict_all(
        self, victims: Sequence[Victim], *, dry_run: bool = False
    ) -> list[tuple[Victim, EvictionOutcome, str]]:
        replies = await side_by_side(self.pods.evict(victim, dry_run=dry_run) for victim in victims)
        return [(victim, *reply) for victim, reply in zip(victims, replies, strict=True)]

    async def _record_evictions(
        self, read: StoredPreemption, results: Sequence[tuple[Victim, EvictionOutcome, str]]
    ) -> StoredPreemption | None:
        preemption = read.preemption
        now = self.clock.now()
        records = []
        events = list[tuple[Victim, KubernetesEvent]]()
        for victim, outcome, _ in results:
            event = None
            if outcome is EvictionOutcome.BLOCKED:
                continue
            if outcome is EvictionOutcome.EVICTED:
                event = victim_event(victim, preemption)
                events.append((victim, event))
            records.append(eviction_record(victim, preemption, outcome, now, event=event))
            preemption = preemption.after(victim, outcome)
        saved = await self.store.save(read, preemption, records)
        for victim, event in events if saved is not None else ():
            self.events.record(event, once=True)
            count_eviction(victim.namespace, victim.cause)
            self._trace_eviction(victim, preemption, event.message)
        return saved

    def _trace_eviction(self, victim: Victim, preemption: Preemption, reason: str) -> None:
        if self.tracing is None:
            return
        facts = {
            POD_UID: victim.pod,
            POD_NAME: victim.name,
            NAMESPACE: victim.namespace,
            NODE: victim.node,
            REASON: reason,
            REASON_CODE: str(victim.cause),
        }
        self.tracing.record_after_start("evict pod", facts, preemption.pods)

    async def _reserve(
        self, freed: Sequence[tuple[StoredPreemption, Sequence[WaitingPod]]]
    ) -> list[PlacementChosen]:
        """Single pods are reserved for together, each gang on its own."""
        results = dict[PodUid, PlacementChosen | str]()
        pods = [entry for entry in freed if entry[0].preemption.gang is None]
        gangs = [[entry] for entry in freed if entry[0].preemption.gang is not None]
        for group in filter(None, (pods, *gangs)):
            results |= await reserve_claimed(
                self.ledger,
                [wanted for read, _ in group for wanted in read.preemption.wanted],
                [pod for _, waiting in group for pod in waiting],
                gang=group[0][0].preemption.gang,
                now=self.clock.now(),
            )
        await self._all(self._hand(read, results) for read, _ in freed)
        return placements_among(results)

    async def _hand(
        self, read: StoredPreemption, results: Mapping[PodUid, PlacementChosen | str]
    ) -> None:
        own = [results[pod] for pod in read.preemption.pods if pod in results]
        reason = next((result for result in own if isinstance(result, str)), "")
        if reason:
            await self._cancel(read, reason)
        elif len(own) == len(read.preemption.pods):
            await self.store.save(read, read.preemption.stepped(PreemptionStage.HANDED))
        # Else it is tried again until the preemption expires.

    async def _offer(self, read: StoredPreemption) -> None:
        """A binder reserves when kube-scheduler chooses the node.

        It tries a pod that waits for a ResourceClaim when slices change.
        """
        now = self.clock.ticks()
        [wanted] = read.preemption.wanted  # no gang: kube-scheduler binds pods one by one
        if now < self._offer_at.get(wanted.pod, 0.0):
            return
        self._offer_at = {pod: at for pod, at in self._offer_at.items() if at > now}
        node = wanted.candidates[0].node
        if read.preemption.claiming is None:
            self._offer_at[wanted.pod] = now + OFFER_S
            await self.offers.offer(wanted.namespace, wanted.name, wanted.pod, node)
            return
        self._offer_at[wanted.pod] = now + SLICES_S
        if late := await self.agents.renew_slices(node):
            logger.info("the ResourceSlices of node %s are not renewed: %s", node, late)

    async def _cancel(
        self, read: StoredPreemption, reason: str, blocked: Victim | None = None
    ) -> None:
        """The journal tells the planner of a blocked eviction."""
        for victim in read.preemption.left:
            await self.pods.withdraw(victim)
        current: StoredPreemption | None = read
        if blocked is not None:
            outcome = EvictionOutcome.BLOCKED
            record = eviction_record(blocked, read.preemption, outcome, self.clock.now())
            current = await self.store.save(read, read.preemption, [record])
        if current is not None and await self.store.close(current):
            for event in cancelled_events(read.preemption, reason, blocked):
                self.events.record(event)

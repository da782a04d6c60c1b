"""Preemption of leases of namespaces over budget, or of lower priority, after a notice period.

One binder leads at a time, and begins preemptions; it also plans starts (`planned_starts`). The
devices for a pending pod are claimed before any victim is notified (`shared.ledger.preemptions`),
so that no other pod gets what becomes free.
"""

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar
from uuid import uuid4

from services.binder.clients import PodClient
from services.binder.ledger_sync.sweep import SchedulerOffers
from services.binder.metrics import count_eviction
from services.binder.report.event_writer import EventRecorder
from services.planner.plan import ClusterSnapshot, PlanRound, pending_pods
from services.planner.planned_starts import (
    StartPlanner,
    chosen,
    placements_of,
    reserve_claimed,
)
from services.planner.rules import (
    HOUR_S,
    VIOLATION_ID,
    ObservedPreemption,
    PendingPod,
    PreemptionRules,
    Step,
    allowance,
    beneficiary_event,
    cancelled_events,
    ends_by_policy,
    eviction_record,
    expiry,
    is_evictable,
    is_leaving,
    next_step,
    over_limit,
    preempted,
    victim_event,
    victim_of,
)
from shared.ledger.connection import in_batches
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.clock import Clock
from shared.model.events.node_events import ViolationFound
from shared.model.events.pod_events import BudgetChanged, PlacementChosen
from shared.model.leases.ledger import (
    LedgerStatus,
    Reservation,
    WaitingPod,
    reservation_for,
)
from shared.model.leases.preemption import (
    EvictionOutcome,
    Preemption,
    PreemptionCause,
    PreemptionStage,
    PreemptionState,
    StoredPreemption,
    Victim,
)
from shared.model.names import PodUid
from shared.runtime.service import loops

T = TypeVar("T")

OFFER_S = 2.0
"""Interval of offers to a pod whose node kube-scheduler chooses."""
BLOCKED_S = 10.0
"""Pause before an eviction that a PodDisruptionBudget blocks is tried again."""
LEADERSHIP_S = 5.0
STEP_S = 0.5
LOOK_S = 1.0
"""Interval of looks at the ledger while no pod waits and no preemption is in progress."""
IDLE_S = 5.0
"""And of steps: policies of budgets may demand some."""
PLAN_S = 2.0
PLAN_S_PER_POD = 0.001
"""Additional pause before the next plans for each waiting pod."""
MAX_PLAN_S = 15.0
"""Plans without a result double the pause before the next ones up to this."""
PLANNING_S = 1.0
"""Plans are made for so long, or as long as it took until the first was made, with reading the
cluster; then steps are taken, and plans for the pods that are left follow."""
AT_ONCE = 16
"""Preemptions whose steps are taken side by side: most of a step is waiting for the API server."""
MAX_PLANS = 5
"""Plans for one pending pod, where the API server refuses the evictions of earlier ones."""


@dataclass(eq=False, kw_only=True)
class PreemptionController:
    """Acts while it leads; holds no state that matters between two steps.

    Every step of a preemption is saved with the version that it is based on, and every external
    call may be repeated: the next leader continues from the saved state.
    """

    ledger: RedisLeases
    store: Preemptions
    pods: PodClient
    events: EventRecorder
    clock: Clock
    rules: PreemptionRules
    offers: SchedulerOffers
    starts: StartPlanner
    step_s: float = LOOK_S
    """Interval until the next step."""

    def __post_init__(self) -> None:
        self.name = uuid4().hex
        self._blocked_until: dict[str, float] = {}
        self._offer_at: dict[PodUid, float] = {}
        self._idle_until = 0.0
        self._check_at = 0.0
        self._plan_at = 0.0
        self._pause_s = PLAN_S
        self._planned_for: object = None
        self._acting = asyncio.Semaphore(AT_ONCE)
        self._limiting = asyncio.Lock()
        self._put_off = False
        """Whether the last step began nothing, so that placements were published first."""

    async def evict_violators(self, events: Sequence[ViolationFound]) -> None:
        """Begin the evictions that the rules demand for violations; the leader completes them.

        A report about a pod that does not run on the agent's own node is ignored. A repeat changes
        nothing.
        """
        now = self.clock.now()
        for event in events:
            if not is_evictable(event, self.rules, now):
                continue
            pod = await self.pods.get(event.namespace, event.name)
            if pod is None or pod.pod != event.pod or pod.node != event.node or pod.deleting:
                continue
            victim = victim_of(pod, event.node, PreemptionCause.VIOLATION)
            reason = f"{event.reason}: {event.message}"
            id_ = f"{VIOLATION_ID}{pod.pod}"
            await self._open(Preemption(id=id_, victims=(victim,), reason=reason))

    async def _open(self, preemption: Preemption) -> StoredPreemption | None:
        """Open a preemption, unless it is open already or the devices are not free for it."""
        now = self.clock.now()
        expires_at = expiry(preemption.victims, self.rules.preemption_notice_s, now)
        opened = replace(preemption, opened_at=now, expires_at=expires_at)
        if not await self.store.open(opened):
            return None
        return StoredPreemption(preemption=opened, version=1, claimed=opened.wanted is not None)

    async def claimed_for(self, pod: PodUid) -> Reservation | None:
        """Return what an open preemption has claimed for the pod."""
        state = await self.store.state(now=self.clock.now(), past_s=0)
        found = (each.preemption for each in state.open if each.preemption.id == pod)
        preemption = next(found, None)
        return preemption.wanted if preemption else None

    @loops(every_s=lambda controller: controller.step_s)
    async def preempt(self) -> list[PlacementChosen]:
        """Advance open preemptions, and begin those that are due; nothing unless this one leads."""
        status = await self.ledger.status(now=self.clock.ticks())
        if status is None or not self._is_due(status):
            return []
        if not await self.leads():
            return []
        state = await self.store.state(now=self.clock.now(), past_s=0)
        placements = await self._advance(state)
        placements += await self.starts.advance(state.starts)
        self._put_off = bool(placements) and not self._put_off
        if not self._put_off:
            await self._begin_due()
        return placements

    async def leads(self) -> bool:
        """Return whether this binder is the one that leads now."""
        return await self.store.acquire_leadership(self.name, ttl_s=LEADERSHIP_S)

    async def _all(self, actions: Iterable[Awaitable[T]]) -> list[T]:
        """Return the results of all, `AT_ONCE` at a time; raises the first error once all ended."""

        async def act(action: Awaitable[T]) -> T:
            async with self._acting:
                return await action

        found = await asyncio.gather(*map(act, actions), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return [each for each in found if not isinstance(each, BaseException)]

    def _is_due(self, status: LedgerStatus) -> bool:
        """Return whether something may have to be done; policies of budgets are checked rarely."""
        now = self.clock.ticks()
        is_due = bool(status.preemptions or status.waiting)
        self.step_s = STEP_S if is_due else LOOK_S
        is_due |= status.budgets > 0 and now >= self._idle_until
        if is_due:
            self._idle_until = now + IDLE_S
        return is_due

    async def _advance(self, state: PreemptionState) -> list[PlacementChosen]:
        """Take the next step of each preemption; return the placements of pending pods."""
        placements = list[PlacementChosen]()
        freed = list[StoredPreemption]()
        waiting = list[WaitingPod]()
        for batch in in_batches(state.open):
            observed = await self._observe([read.preemption for read in batch])
            now = self.clock.now()
            steps = [
                (read, seen, *next_step(read, seen, state, now))
                for read, seen in zip(batch, observed, strict=True)
            ]
            await self._all(self._take(step, read, reason) for read, _, step, reason in steps)
            for read, seen, step, _ in steps:
                if step is Step.BIND and seen.lease:
                    placements.append(chosen(seen.lease))
                elif step is Step.RESERVE and seen.waiting:
                    freed.append(read)
                    waiting.append(seen.waiting)
        return placements + (await self._reserve(freed, waiting) if freed else [])

    async def _take(self, step: Step, read: StoredPreemption, reason: str) -> None:
        """Take the next step of a preemption, unless that is to reserve or to bind."""
        match step:
            case Step.ANNOUNCE:
                async with self._limiting:
                    await self._announce_within_limits(read)
            case Step.EVICT:
                if self.clock.now() >= self._blocked_until.get(read.preemption.id, 0.0):
                    await self._evict(read)
            case Step.OFFER:
                await self._offer(read)
            case Step.CLOSE:
                await self.store.close(read)
            case Step.CANCEL:
                await self._cancel(read, reason)

    async def _observe(self, preemptions: Sequence[Preemption]) -> list[ObservedPreemption]:
        pending = [each.wanted.pod for each in preemptions if each.wanted]
        victims = [victim.pod for each in preemptions if each.wanted for victim in each.victims]
        # In this order, so that a pod that got a lease meanwhile is never observed without either.
        waiting = {each.queued.pod: each for each in await self.ledger.waiting_pods.load(pending)}
        leases = {each.pod: each for each in await self.ledger.load([*pending, *victims]) if each}
        return [
            ObservedPreemption(
                waiting=waiting.get(PodUid(each.id)),
                lease=leases.get(PodUid(each.id)),
                leased_victims=leases.keys() & {victim.pod for victim in each.victims},
            )
            for each in preemptions
        ]

    async def _announce_within_limits(self, read: StoredPreemption) -> None:
        if read.preemption.reason:
            now = self.clock.now()
            past = await self.store.state(now=now, past_s=HOUR_S)
            reason = over_limit(read.preemption, past, self.rules, now)
            if reason:
                await self._cancel(read, reason)
                return
        await self._announce(read)

    async def _announce(self, read: StoredPreemption) -> bool:
        """Announce the evictions, or cancel them; return whether a dry run allows them all."""
        preemption = read.preemption
        for victim in preemption.victims:
            outcome, reason = await self.pods.evict(victim, dry_run=True)
            if outcome is EvictionOutcome.BLOCKED:
                await self._cancel(read, reason, victim)
                return False
        at = self.clock.now() + self.rules.preemption_notice_s
        for victim in preemption.victims:
            await self.pods.announce(victim, at)
            self.events.record(victim_event(victim, preemption, at))
        # No pod is evicted before the last one has had its notice.
        evict_at = self.clock.now() + self.rules.preemption_notice_s
        announced = replace(
            preemption.stepped(PreemptionStage.ANNOUNCED),
            evict_at=evict_at,
            expires_at=expiry(preemption.victims, self.rules.preemption_notice_s, self.clock.now()),
        )
        if await self.store.save(read, announced) and announced.wanted is not None:
            self.events.record(beneficiary_event(announced))
        return True

    async def _evict(self, read: StoredPreemption) -> None:
        """Evict the remaining victims; one that a PodDisruptionBudget now blocks is retried."""
        current: StoredPreemption | None = read
        if read.preemption.stage is PreemptionStage.ANNOUNCED:
            begun = read.preemption.stepped(PreemptionStage.EVICTING)
            expires_at = expiry(begun.victims, 0.0, self.clock.now())
            current = await self.store.save(read, replace(begun, expires_at=expires_at))
        for victim in read.preemption.left:
            if current is None:
                return
            outcome, reason = await self.pods.evict(victim)
            if outcome is not EvictionOutcome.BLOCKED:
                current = await self._record_eviction(current, victim, outcome)
            elif any(
                each.outcome is EvictionOutcome.EVICTED for each in current.preemption.victims
            ):
                now = self.clock.now()
                self._blocked_until = {
                    id_: at for id_, at in self._blocked_until.items() if at > now
                }
                self._blocked_until[read.preemption.id] = now + BLOCKED_S
            else:
                await self._cancel(current, reason, victim)
                return

    async def _record_eviction(
        self, read: StoredPreemption, victim: Victim, outcome: EvictionOutcome
    ) -> StoredPreemption | None:
        preemption = read.preemption
        event = victim_event(victim, preemption)
        record = eviction_record(victim, preemption, outcome, event, self.clock.now())
        saved = await self.store.save(read, preemption.after(victim, outcome), [record])
        if saved is not None and outcome is EvictionOutcome.EVICTED:
            self.events.record(event, once=True)
            count_eviction(victim.namespace, victim.cause)
        return saved

    async def _reserve(
        self, freed: Sequence[StoredPreemption], waiting: Sequence[WaitingPod]
    ) -> list[PlacementChosen]:
        wanted = [read.preemption.wanted for read in freed if read.preemption.wanted]
        found = await reserve_claimed(self.ledger, wanted, waiting, now=self.clock.now())
        await self._all(self._hand(read, found.get(PodUid(read.preemption.id))) for read in freed)
        return placements_of(found)

    async def _hand(self, read: StoredPreemption, result: PlacementChosen | str | None) -> None:
        """Record that the pending pod has its lease, or cancel because it cannot get one."""
        if isinstance(result, str):
            await self._cancel(read, result)
        elif result is not None:  # else it is tried again until the preemption expires
            await self.store.save(read, read.preemption.stepped(PreemptionStage.HANDED))

    async def _offer(self, read: StoredPreemption) -> None:
        """Let kube-scheduler try the pod; a binder reserves when that chooses the node."""
        now = self.clock.ticks()
        wanted = read.preemption.wanted
        if wanted is not None and now >= self._offer_at.get(wanted.pod, 0.0):
            self._offer_at = {pod: at for pod, at in self._offer_at.items() if at > now}
            self._offer_at[wanted.pod] = now + OFFER_S
            node = wanted.candidates[0].node
            await self.offers.offer(wanted.namespace, wanted.name, wanted.pod, node)

    async def _cancel(
        self, read: StoredPreemption, reason: str, blocked: Victim | None = None
    ) -> None:
        for victim in read.preemption.left:
            await self.pods.withdraw(victim)
        if await self.store.close(read):
            for event in cancelled_events(read.preemption, reason, blocked):
                self.events.record(event)

    # New preemptions

    async def _begin_due(self) -> None:
        """Begin preemptions for pending pods, and those that budgets' own policies demand."""
        now = self.clock.now()
        if now < self._check_at:
            return
        state = await self.store.state(now=now)
        waiting = await self.ledger.waiting_pods.load()
        self._check_at = now + PLAN_S + len(waiting) * PLAN_S_PER_POD
        if self.rules.preemption and await self._begin_preemptions(waiting, state, now):
            self._check_at = 0.0
            self._plan_at = 0.0
        await self.starts.plan(waiting, await self.store.state(now=now, past_s=0))

    async def _begin_preemptions(
        self, waiting: Sequence[WaitingPod], state: PreemptionState, now: float
    ) -> bool:
        """Begin what is due; return whether more is to be begun, for which there was no time."""
        pending = pending_pods(waiting, state, now)
        budgets = (state.budgets or {}).values()
        policies = [budget for budget in budgets if ends_by_policy(budget, now)]
        self._plan_at_once_if_new(pending, budgets)
        if not (pending or policies) or now < self._plan_at:
            return False
        began = self.clock.ticks()
        cluster = await self.cluster()
        begun = False
        for budget in policies:
            begun |= await self._end_by_policy(budget, cluster)
        if policies:
            state = await self.store.state(now=now)
        plans = PlanRound(cluster, state, self.rules, now)
        results: list[bool | None] = [await self._preempt_for(each, plans) for each in pending[:1]]
        at = self.clock.ticks()
        until = at + max(PLANNING_S, at - began)

        async def begin(each: WaitingPod) -> bool | None:
            return await self._preempt_for(each, plans) if self.clock.ticks() < until else None

        results += await self._all(map(begin, pending[1:]))
        begun |= any(results)
        self._pause_s = PLAN_S if begun else min(2 * self._pause_s, MAX_PLAN_S)
        self._plan_at = self.clock.now() + self._pause_s
        return begun and None in results

    def _plan_at_once_if_new(
        self, pending: Sequence[WaitingPod], budgets: Collection[BudgetChanged]
    ) -> None:
        """Skip the pause if other pods are pending, or a lease class has changed."""
        planned_for = (
            frozenset(pod.queued.pod for pod in pending),
            frozenset((budget.namespace, budget.lease_class) for budget in budgets),
        )
        if planned_for != self._planned_for:
            self._planned_for = planned_for
            self._plan_at = 0.0
            self._pause_s = PLAN_S

    async def cluster(self) -> ClusterSnapshot:
        """Read the nodes, the pods and the PodDisruptionBudgets."""
        pods, disruption_budgets = await self.pods.list_pods()
        nodes = [node async for page in self.ledger.totals.pages() for node in page]
        return ClusterSnapshot(nodes, pods, disruption_budgets)

    async def _preempt_for(self, waiting: WaitingPod, plans: PlanRound) -> bool:
        """Plan, claim, announce; plan again without victims whose eviction is refused."""
        own = plans.cluster.pods.get(waiting.queued.pod)
        if own is None or own.deleting:
            return False
        pending = PendingPod(
            pod=own.pod,
            namespace=own.namespace,
            priority=waiting.queued.request.priority,
            preempts=own.preempts,
        )
        for _ in range(MAX_PLANS):
            found = plans.next_plan(waiting.queued, pending)
            if found is None:
                return False
            for start in plans.state.starts:
                if start.id == pending.pod:  # else its own claim is in the way
                    await self.starts.withdraw(start, "running pods are preempted for it")
            read = await self._open(
                Preemption(
                    id=waiting.queued.pod,
                    victims=tuple(each.victim for each in found.victims),
                    wanted=reservation_for(waiting.queued, (found.placement,)),
                    priority=pending.priority,
                    preempts=pending.preempts,
                    by_kube_scheduler=waiting.queued.by_kube_scheduler,
                )
            )
            if read is None:
                return False
            if await self._announce(read):
                return True
            plans.refuse(found)
        return False

    async def _end_by_policy(self, budget: BudgetChanged, cluster: ClusterSnapshot) -> bool:
        begun = False
        leases = [lease for node in cluster.nodes for lease in node.leases]
        for lease in sorted(leases, key=lambda lease: lease.pod):
            pod = cluster.pods.get(lease.pod)
            if lease.namespace != budget.namespace or pod is None:
                continue
            now = self.clock.now()
            state = await self.store.state(now=now)
            left = allowance(state, self.rules, now).of(lease.namespace)
            if not left or is_leaving(lease, pod, state.victims()):
                continue
            victim = preempted(lease, pod, PreemptionCause.POLICY, budget)
            opened = await self._open(Preemption(id=f"policy:{lease.pod}", victims=(victim,)))
            if opened is not None:
                begun |= await self._announce(opened)
        return begun

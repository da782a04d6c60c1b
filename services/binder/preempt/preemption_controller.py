"""Preemption of leases over budget, or in the way of a higher priority: with notice, and exactly.

One binder leads at a time. Every step is saved with the version it was decided on, and every call
to the outside may be repeated: the next leader continues from what is saved. The devices for a
pending pod are claimed before any victim is notified (`shared.ledger.preemptions`), so that no
other pod gets what becomes free.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from uuid import uuid4

from services.binder.ports.kubernetes import Evictions
from services.binder.ports.ledger import PreemptionLedger, PreemptionStore
from services.binder.ports.reports import BinderMetrics, EventRecorder
from services.binder.preempt import announcements
from services.binder.preempt.plan import Fit, NoPlan, PreemptionPlan, plan
from services.binder.preempt.plan_input import (
    ClusterSnapshot,
    pending_pods,
    plan_input,
    reservation_of,
)
from services.binder.preempt.rules import (
    HOUR_S,
    PendingPod,
    PreemptionRules,
    allowance,
    ends_by_policy,
    is_leaving,
    over_limit,
    victim_of,
)
from services.binder.preempt.steps import ObservedPreemption, Step, expiry, next_step
from services.binder.preempt.violators import evict_violators
from shared.model.clock import Clock
from shared.model.events.node_events import ViolationFound
from shared.model.events.pod_events import BudgetChanged, PlacementChosen
from shared.model.lease import Lease
from shared.model.ledger import AlreadyLeased, Reserved, WaitingPod
from shared.model.names import PodUid
from shared.model.preemption import (
    EvictionOutcome,
    Preemption,
    PreemptionCause,
    PreemptionStage,
    PreemptionState,
    StoredPreemption,
    Victim,
)

LEADERSHIP_S = 5.0
PLAN_S = 2.0
PLAN_S_PER_POD = 0.001
"""How much later the next plans are made for each waiting pod."""
MAX_PLAN_S = 15.0
"""Plans without a result double the pause before the next ones up to this."""
MAX_PENDING = 8
"""Pending pods for which plans are made at once."""
MAX_PLANS = 5
"""Plans for one pending pod, where the API server refuses the evictions of earlier ones."""
RESERVATION_S = 30.0
BLOCKED_S = 10.0
"""Pause before an eviction that a PodDisruptionBudget blocks is tried again."""


class PreemptionController:
    """Acts while it leads; holds no state that matters between two steps."""

    def __init__(
        self,
        *,
        ledger: PreemptionLedger,
        store: PreemptionStore,
        evictions: Evictions,
        events: EventRecorder,
        metrics: BinderMetrics,
        clock: Clock,
        fit: Fit,
        rules: PreemptionRules,
        enabled: bool = True,
    ) -> None:
        self.ledger = ledger
        self.store = store
        self.evictions = evictions
        self.events = events
        self.metrics = metrics
        self.clock = clock
        self.fit = fit
        self.rules = rules
        self.enabled = enabled
        self.name = uuid4().hex
        self._check_at = 0.0
        self._plan_at = 0.0
        self._pause_s = PLAN_S
        self._planned_for: object = None
        self._blocked_until: dict[str, float] = {}

    async def save_budgets(self, events: Sequence[BudgetChanged]) -> None:
        """Save the state of budgets."""
        for event in events:
            await self.store.save_budget(event)

    async def evict_violators(self, events: Sequence[ViolationFound]) -> None:
        """Begin the evictions that the rules demand for violations."""
        await evict_violators(
            events,
            store=self.store,
            evictions=self.evictions,
            rules=self.rules,
            now=self.clock.now(),
        )

    async def step(self) -> list[PlacementChosen]:
        """Advance open preemptions, and begin those that are due; nothing unless this one leads."""
        if await self.ledger.generation() is None:
            return []
        if not await self.store.acquire_leadership(self.name, ttl_s=LEADERSHIP_S):
            return []
        state = await self.store.state(now=self.clock.now(), past_s=0)
        placements: list[PlacementChosen] = []
        for read in state.open:
            placements += await self._advance(read, state)
        if self.enabled and not placements:
            await self._begin_due()
        return placements

    # Open preemptions

    async def _advance(
        self, read: StoredPreemption, state: PreemptionState
    ) -> list[PlacementChosen]:
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
        # In this order: a pod that stops waiting because it got a lease is observed with it.
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
        await self._announce(read)

    async def _announce(self, read: StoredPreemption) -> bool:
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
        [outcome] = await self.ledger.reserve([wanted], now=self.clock.now(), ttl_s=RESERVATION_S)
        if not isinstance(outcome, Reserved | AlreadyLeased):
            return []  # tried again until the preemption expires
        await self.store.save(read, read.preemption.stepped(PreemptionStage.HANDED))
        return _placements(outcome.lease)

    async def _cancel(self, read: StoredPreemption, reason: str) -> None:
        for victim in read.preemption.left:
            await self.evictions.withdraw(victim)
        if await self.store.close(read):
            for event in announcements.cancelled_events(read.preemption, reason):
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
        pending = pending_pods(waiting, state, self.rules, now)
        budgets = (state.budgets or {}).values()
        policies = [budget for budget in budgets if ends_by_policy(budget, now)]
        self._plan_at_once_if_new(pending, budgets)
        if not (pending or policies) or now < self._plan_at:
            return
        begun = await self._begin(pending[:MAX_PENDING], policies)
        self._pause_s = PLAN_S if begun else min(2 * self._pause_s, MAX_PLAN_S)
        self._plan_at = self.clock.now() + self._pause_s

    def _plan_at_once_if_new(
        self, pending: Sequence[WaitingPod], budgets: Collection[BudgetChanged]
    ) -> None:
        """Skip the pause if other pods are pending, or a lease class has changed."""
        planned_for = (
            frozenset(pod.queued.pod for pod in pending),
            frozenset((budget.namespace, budget.lease_class) for budget in budgets),
        )
        if planned_for != self._planned_for:
            self._planned_for, self._plan_at, self._pause_s = planned_for, 0.0, PLAN_S

    async def _begin(
        self, pending: Sequence[WaitingPod], policies: Sequence[BudgetChanged]
    ) -> bool:
        pods, disruption_budgets = await self.evictions.list_pods()
        nodes = [node async for page in self.ledger.totals.pages() for node in page]
        cluster = ClusterSnapshot(nodes=nodes, pods=pods, disruption_budgets=disruption_budgets)
        begun = False
        for budget in policies:
            begun |= await self._end_by_policy(budget, cluster)
        for waiting in pending:
            begun |= await self._preempt_for(waiting, cluster)
        return begun

    async def _preempt_for(self, waiting: WaitingPod, cluster: ClusterSnapshot) -> bool:
        """Plan, claim, announce; plan again without victims whose eviction is refused."""
        refused: set[PodUid] = set()
        own = cluster.pods.get(waiting.queued.pod)
        if own is None or own.deleting:
            return False
        pending = PendingPod(
            pod=own.pod,
            namespace=own.namespace,
            priority=waiting.queued.request.priority,
            preempts=own.preempts,
        )
        for _ in range(MAX_PLANS):
            now = self.clock.now()
            state = await self.store.state(now=now)
            given = plan_input(pending, cluster, state, self.rules, now=now, without=refused)
            found = plan(waiting.queued.request, given, self.fit)
            if isinstance(found, NoPlan):
                return False
            read = await self._open(waiting, pending, found)
            if read is None:
                return False
            if await self._announce(read):
                return True
            refused.update(each.lease.pod for each in found.victims)
        return False

    async def _open(
        self, waiting: WaitingPod, pending: PendingPod, found: PreemptionPlan
    ) -> StoredPreemption | None:
        now = self.clock.now()
        victims = tuple(each.victim for each in found.victims)
        preemption = Preemption(
            id=waiting.queued.pod,
            victims=victims,
            wanted=reservation_of(waiting.queued, found),
            priority=pending.priority,
            preempts=pending.preempts,
            opened_at=now,
            expires_at=expiry(victims, self.rules.notice_s, now),
        )
        if not await self.store.open(preemption):
            return None
        return StoredPreemption(preemption=preemption, version=1, claimed=True)

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
            if not left or is_leaving(lease, pod, state):
                continue
            victim = victim_of(lease, pod, PreemptionCause.POLICY, budget)
            preemption = Preemption(
                id=f"policy:{lease.pod}",
                victims=(victim,),
                opened_at=now,
                expires_at=expiry([victim], self.rules.notice_s, now),
            )
            if await self.store.open(preemption):
                begun |= await self._announce(
                    StoredPreemption(preemption=preemption, version=1, claimed=False)
                )
        return begun


def _any_evicted(preemption: Preemption) -> bool:
    return any(victim.outcome is EvictionOutcome.EVICTED for victim in preemption.victims)


def _placements(lease: Lease | None) -> list[PlacementChosen]:
    return [PlacementChosen(lease=lease, trace=lease.trace)] if lease else []

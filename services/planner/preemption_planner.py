"""Plans preemptions of leases of namespaces over budget, or of lower priority.

One planner leads at a time. It stores a plan together with the claim on its devices
(`shared.ledger.preemptions`); binders announce the evictions, evict and hand the devices over.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from services.planner.cluster_view import ClusterView
from services.planner.metrics import PLANNING, count_plan
from services.planner.plan import ClusterSnapshot, PlanRound, PreemptionPlan, pending_pods
from services.planner.rules import (
    VIOLATION_ID,
    PreemptionRules,
    allowance,
    is_evictable,
    is_leaving,
    over_limit,
    preempted,
    victim_of,
)
from services.planner.start_planner import StartPlanner
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.events.plan_events import ViolationConfirmed
from shared.model.events.pod_events import BudgetChanged
from shared.model.leases.ledger import LedgerStatus, WaitingPod, reservation_for
from shared.model.leases.preemption import Preemption, PreemptionCause, PreemptionState
from shared.model.names import PodUid
from shared.placing.preemption_rules import PendingPod, ends_by_policy, expiry
from shared.runtime.leadership import Leadership
from shared.runtime.service import handles, loops

LOOK_S = 1.0
"""Interval of looks at the ledger while no pod waits."""
STEP_S = 0.5
"""Interval of steps while plans are due."""
IDLE_S = 5.0
"""And of plans: policies of budgets may demand some."""
PLAN_S = 2.0
"""Interval of plans for pods that wait: shorter ones cost more, and evict sooner."""
PLAN_S_PER_POD = 0.001
"""Additional pause before the next plans for each waiting pod."""
MAX_PLAN_S = 15.0
"""Plans without a result double the pause before the next ones up to this."""
PLANNING_S = 1.0
"""Plans are made for so long, or as long as it took until the first was made, with reading the
cluster; then starts are planned, and plans for the pods that are left follow."""
AT_ONCE = 16
"""Plans that are stored side by side, as soon as so many are made."""
MOST_OPEN = 512
"""No plan for a pod is made while so many are open: binders read all of them twice a second, and
each has claims on devices that stay unused until it is carried out."""


@dataclass(eq=False, kw_only=True)
class PreemptionPlanner:
    ledger: RedisLeases
    store: Preemptions
    view: ClusterView
    clock: Clock
    rules: PreemptionRules
    starts: StartPlanner
    leadership: Leadership
    step_s: float = LOOK_S

    def __post_init__(self) -> None:
        self._idle_until = 0.0
        self._check_at = 0.0
        self._plan_at = 0.0
        self._pause_s = PLAN_S
        self._planned_for: object = None

    @handles
    async def evict_violators(self, events: Sequence[ViolationConfirmed]) -> None:
        """Plan the evictions that the rules demand for violations. A repeat changes nothing.

        Raises UnavailableError if another planner leads: only the leader knows what the limits
        leave.
        """
        now = self.clock.now()
        due = [event for event in events if is_evictable(event, self.rules, now)]
        if due and not await self.leadership.holds():
            raise UnavailableError("another planner leads")
        for event in due:
            pod = await self.view.pods.get(event.namespace, event.name)
            if pod is None or pod.pod != event.pod or pod.node != event.node or pod.deleting:
                continue
            state = await self.store.state(now=now)
            victim = victim_of(pod, event.node, PreemptionCause.VIOLATION)
            reason = f"{event.reason}: {event.message}"
            id_ = f"{VIOLATION_ID}{pod.pod}"
            limit = over_limit(event.namespace, state, self.rules, now)
            await self._open(Preemption(id=id_, victims=(victim,), reason=reason, cancelled=limit))

    async def _open(self, preemption: Preemption) -> bool:
        now = self.clock.now()
        notice_s = self.rules.preemption_notice_s
        opened = await self.store.open(
            replace(
                preemption,
                opened_at=now,
                expires_at=expiry(preemption.victims, notice_s, now),
                notice_s=notice_s,
            )
        )
        count_plan("stored" if opened else "outdated")
        return opened

    @loops(every_s=lambda planner: planner.step_s)
    async def plan(self) -> None:
        await self.starts.reports.publish()
        status = await self.ledger.status(now=self.clock.ticks())
        if status is not None and self._is_due(status) and await self.leadership.holds():
            await self._plan_due()
            await self.starts.reports.publish()

    def _is_due(self, status: LedgerStatus) -> bool:
        now = self.clock.ticks()
        is_due = status.waiting > 0 or self.starts.has_shown
        self.step_s = STEP_S if is_due else LOOK_S
        is_due |= status.budgets > 0 and now >= self._idle_until
        if is_due:
            self._idle_until = now + IDLE_S
        return is_due

    async def _plan_due(self) -> None:
        now = self.clock.now()
        if now < self._check_at:
            return
        state = await self.store.state(now=now)
        waiting = await self.ledger.waiting_pods.load()
        self._check_at = now + PLAN_S + len(waiting) * PLAN_S_PER_POD
        began = self.clock.ticks()
        if self.rules.preemption and await self._plan_preemptions(waiting, state, now):
            # A pause as long as the round leaves half of a core to others.
            self._check_at = self.clock.now() + (self.clock.ticks() - began)
            self._plan_at = 0.0
        await self.starts.plan(waiting, await self.store.state(now=now, past_s=0))

    async def _plan_preemptions(
        self, waiting: Sequence[WaitingPod], state: PreemptionState, now: float
    ) -> bool:
        """Return whether more is to be planned, for which there was no time or no room."""
        room = MOST_OPEN - len(state.open)
        if room <= 0:
            return False
        pending = pending_pods(waiting, state, now)
        budgets = (state.budgets or {}).values()
        policies = [budget for budget in budgets if ends_by_policy(budget, now)]
        self._plan_at_once_if_new(pending, budgets)
        if not (pending or policies) or now < self._plan_at:
            return False
        began = self.clock.ticks()
        with PLANNING.time():
            cluster = await self.view.snapshot()
            begun = False
            for budget in policies:
                begun |= await self._end_by_policy(budget, cluster)
            if policies:
                state = await self.store.state(now=now)
            plans = PlanRound(cluster, state, self.rules, now)
            stored = await self._plan_for(pending[:1], plans)
            at = self.clock.ticks()
            until = at + max(PLANNING_S, at - began)
            done = 1
            while done < len(pending) and stored < room and self.clock.ticks() < until:
                stored += await self._plan_for(pending[done : done + AT_ONCE], plans)
                done += AT_ONCE
        begun |= stored > 0
        self._pause_s = PLAN_S if begun else min(2 * self._pause_s, MAX_PLAN_S)
        self._plan_at = self.clock.now() + self._pause_s
        return begun and done < len(pending)

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

    async def _plan_for(self, waiting: Sequence[WaitingPod], plans: PlanRound) -> int:
        """Plan for these pods, and store the plans; return how many were stored.

        A thread plans, so that a process with several services goes on meanwhile.
        """
        made = await asyncio.to_thread(_plans_for, waiting, plans)
        stored = await asyncio.gather(
            *(self._store_plan(pod, pending, plan, plans.state) for pod, pending, plan in made)
        )
        return sum(stored)

    async def _store_plan(
        self, waiting: WaitingPod, pending: PendingPod, plan: PreemptionPlan, state: PreemptionState
    ) -> bool:
        for start in state.starts:
            if start.id == pending.pod:  # else its own claim is in the way
                await self.starts.withdraw(start, "running pods are preempted for it")
        return await self._open(
            Preemption(
                id=pending.pod,
                victims=tuple(candidate.victim for candidate in plan.victims),
                wanted=reservation_for(waiting.queued, (plan.placement,)),
                priority=pending.priority,
                preempts=pending.preempts,
                by_kube_scheduler=waiting.queued.by_kube_scheduler,
            )
        )

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
            begun |= await self._open(Preemption(id=f"policy:{lease.pod}", victims=(victim,)))
        return begun


def _plans_for(
    waiting: Sequence[WaitingPod], plans: PlanRound
) -> list[tuple[WaitingPod, PendingPod, PreemptionPlan]]:
    made = []
    for pod in waiting:
        pending = pending_pod(pod, plans.cluster)
        plan = plans.next_plan(pod.queued, pending) if pending else None
        if pending is not None and plan is not None:
            made.append((pod, pending, plan))
    return made


def pending_pod(waiting: WaitingPod, cluster: ClusterSnapshot) -> PendingPod | None:
    """Return None if the pod is gone or being deleted."""
    own = cluster.pods.get(PodUid(waiting.queued.pod))
    if own is None or own.deleting:
        return None
    return PendingPod(
        pod=own.pod,
        namespace=own.namespace,
        priority=waiting.queued.request.priority,
        preempts=own.preempts,
    )

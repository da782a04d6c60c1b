"""Plans preemptions of leases of namespaces over budget, or of lower priority.

The leader stores a plan together with the claim on its devices (`shared.ledger.preemptions`);
binders carry it out.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from msgspec import structs

from services.planner.cluster_view import ClusterView
from services.planner.metrics import PLANNING, count_plan
from services.planner.plan import (
    ClusterSnapshot,
    PlanRound,
    PreemptionPlan,
    pause_text,
    pending_units,
)
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
from shared.ledger.ledger_inventory import MAX_AGE_S
from shared.ledger.preemptions import Preemptions
from shared.model.clock import Clock, until_tick, wait_for_event
from shared.model.errors import UnavailableError
from shared.model.events.plan_events import PlansChanged, ViolationConfirmed
from shared.model.events.pod_events import BudgetChanged, PlacementRefused
from shared.model.leases.ledger import LedgerStatus, Reservation, WaitingPod, reservation_for
from shared.model.leases.preemption import (
    ClaimingPod,
    Preemption,
    PreemptionCause,
    PreemptionState,
)
from shared.model.requests.placement import Placement
from shared.placing.preemption_rules import PendingPod, ends_by_policy, expiry
from shared.placing.room import ClusterTrials
from shared.placing.starts import WaitingUnit
from shared.runtime.leadership import Leadership
from shared.runtime.service import Publish, handles, loops, observes

LOOK_S = 1.0
"""Interval of looks at the ledger while no pod waits."""
STEP_S = 0.5
"""Interval of steps while plans are due."""
IDLE_S = 5.0
"""Interval of plans while no pod waits: policies of budgets may demand some."""
PLAN_S = 2.0
"""Interval of plans for pods that wait: shorter ones cost more, and evict sooner."""
PLAN_S_PER_POD = 0.001
"""Additional pause before the next plans for each waiting pod."""
WAKE_S = 0.1
"""Pause before the plans for a pod that was refused meanwhile."""
WAKE_FACTOR = 10.0
"""The same, in multiples of the time that the last plans took."""
CHANGED_S = 0.05
"""Changes that plans wait for are published together for so long."""
MAX_PLAN_S = 15.0
"""Plans without a result double the pause before the next ones up to this."""
PLANNING_S = 1.0
"""Plans are made for so long, or as long as it took until the first was made; then starts are
planned, and plans for the pods that are left follow."""
AT_ONCE = 16
MOST_OPEN = 512
"""Binders read all open plans twice a second, and each claims devices that stay unused."""


@dataclass(eq=False, kw_only=True)
class PreemptionPlanner:
    ledger: RedisLeases
    store: Preemptions
    view: ClusterView
    clock: Clock
    rules: PreemptionRules
    starts: StartPlanner
    publish: Publish
    leadership: Leadership
    step_s: float = LOOK_S

    def __post_init__(self) -> None:
        self._idle_until = 0.0
        self._check_at = 0.0
        self._wake_at = 0.0
        """Plans are not made before, even if a pod is refused."""
        self._refused = asyncio.Event()
        self._plan_at = 0.0
        self._pause_s = PLAN_S
        self._planned_for: object = None
        self._trials = ClusterTrials()
        """Each round takes over what has changed since the one before."""
        self._left = set[str]()
        """What the plans before left out comes first."""

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

    async def _open(self, preemption: Preemption, gangs: Mapping[str, int] | None = None) -> bool:
        now = self.clock.now()
        notice_s = self.rules.preemption_notice_s
        opened = await self.store.open(
            replace(
                preemption,
                opened_at=now,
                expires_at=expiry(preemption.victims, notice_s, now),
                notice_s=notice_s,
            ),
            gangs,
        )
        count_plan("stored" if opened else "outdated")
        if opened:
            self.view.mirror.awaited |= {victim.node for victim in preemption.victims}
            with suppress(UnavailableError):  # binders look all the same
                await self.publish([PlansChanged()])
        return opened

    @observes
    async def note_refused(self, events: Sequence[PlacementRefused]) -> None:
        self._refused.set()

    async def wait(self) -> None:
        if await wait_for_event(self._refused, until_tick(self.step_s)):
            await self.clock.sleep(min(max(0.0, self._wake_at - self.clock.now()), self.step_s))

    async def wait_for_changes(self) -> None:
        await self.clock.sleep(CHANGED_S)
        await self.view.mirror.has_awaited_change.wait()

    @loops(wait=lambda planner: planner.wait_for_changes())
    async def publish_changes(self) -> list[PlansChanged]:
        is_set = self.view.mirror.has_awaited_change.is_set()
        self.view.mirror.has_awaited_change.clear()
        return [PlansChanged()] if is_set else []

    @loops(wait=lambda planner: planner.wait())
    async def plan(self) -> None:
        max_age_s = MAX_AGE_S
        if self._refused.is_set() and self.clock.now() >= self._wake_at:
            self._refused.clear()
            self._check_at = 0.0
            max_age_s = 0.0
        await self.starts.reports.publish()
        status = await self.ledger.status(now=self.clock.ticks(), max_age_s=max_age_s)
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
        began = self.clock.ticks()
        state = await self.store.state(now=now)
        self._await_ends_of(read.preemption for read in state.open)
        waiting = await self.ledger.waiting_pods.load()
        self._check_at = now + PLAN_S + len(waiting) * PLAN_S_PER_POD
        if self.rules.preemption and await self._plan_preemptions(waiting, state, now):
            # A pause as long as the round leaves half of a core to others.
            self._check_at = self.clock.now() + (self.clock.ticks() - began)
            self._plan_at = 0.0
        await self.starts.plan(waiting, await self.store.state(now=now, past_s=0))
        took_s = self.clock.ticks() - began
        self._wake_at = self.clock.now() + max(WAKE_S, WAKE_FACTOR * took_s)

    def _await_ends_of(self, preemptions: Iterable[Preemption]) -> None:
        self.view.mirror.awaited = frozenset(
            victim.node for preemption in preemptions for victim in preemption.victims
        )

    async def _plan_preemptions(
        self, waiting: Sequence[WaitingPod], state: PreemptionState, now: float
    ) -> bool:
        """Return whether there was no time or no room for some."""
        room = MOST_OPEN - len(state.open)
        if room <= 0:
            return False
        claims = await self.view.claim_demands(waiting)
        pending = [
            unit
            for unit in pending_units(waiting, state, now, claims)
            if not pause_text(unit, state, self.rules, now)
        ]
        pending.sort(key=lambda unit: unit.id not in self._left)
        budgets = (state.budgets or {}).values()
        policies = [budget for budget in budgets if ends_by_policy(budget, now)]
        self._plan_at_once_if_new(pending, budgets)
        if not (pending or policies) or now < self._plan_at:
            return False
        began = self.clock.ticks()
        with PLANNING.time():
            cluster = await self.view.snapshot(pod for unit in pending for pod in unit.pods)
            cluster = replace(cluster, earlier=self._trials)
            begun = False
            for budget in policies:
                begun |= await self._end_by_policy(budget, cluster)
            if policies:
                state = await self.store.state(now=now)
            plans = PlanRound(cluster, state, self.rules, now)
            stored = 0
            until = inf
            tried = set[str]()
            for units in _batches(pending):
                is_gang = units[0].gang is not None
                is_over = stored >= room or self.clock.ticks() >= until
                if is_over or (stored and is_gang):
                    break
                stored += await self._plan_for(units, plans)
                tried.update(unit.id for unit in units)
                if until == inf:
                    at = self.clock.ticks()
                    until = at + max(PLANNING_S, at - began)
                if stored and is_gang:  # the next plans are made without what it takes
                    break
        begun |= stored > 0
        self._left = (self._left or {unit.id for unit in pending}) - tried
        self._left &= {unit.id for unit in pending}
        self._pause_s = PLAN_S if begun else min(2 * self._pause_s, MAX_PLAN_S)
        self._plan_at = self.clock.now() + self._pause_s
        return bool(self._left)

    def _plan_at_once_if_new(
        self, pending: Sequence[WaitingUnit], budgets: Collection[BudgetChanged]
    ) -> None:
        """Skip the pause if pods, a lease class or a usable device are new."""
        planned_for = (
            frozenset(pod.queued.pod for unit in pending for pod in unit.pods),
            frozenset((budget.namespace, budget.lease_class) for budget in budgets),
            self.view.mirror.openings,
        )
        if planned_for != self._planned_for:
            self._planned_for = planned_for
            self._plan_at = 0.0
            self._pause_s = PLAN_S

    async def _plan_for(self, units: Sequence[WaitingUnit], plans: PlanRound) -> int:
        """Return how many plans were stored.

        A thread plans, so that a process with several services goes on meanwhile.
        """
        made = await asyncio.to_thread(_plans_for, units, plans)
        stored = await asyncio.gather(
            *(self._store_plan(unit, pending, plan, plans) for unit, pending, plan in made)
        )
        return sum(stored)

    async def _store_plan(
        self, unit: WaitingUnit, pending: PendingPod, plan: PreemptionPlan, plans: PlanRound
    ) -> bool:
        if unit.claim is not None and not await self.view.may_be_allocated(
            unit.claim, unit.pods[0].queued, plan.placed[0].node
        ):
            return False
        for start in plans.state.starts:
            if start.id == unit.id:  # else its own claim is in the way
                await self.starts.withdraw(start, "running pods are preempted for it")
        return await self._open(
            Preemption(
                id=unit.id,
                victims=plan.evicted,
                wanted=tuple(
                    reservation_of(unit, pod, placement)
                    for pod, placement in zip(unit.pods, plan.placements, strict=True)
                    if placement is not None
                ),
                claiming=claiming_pod(unit),
                gang=unit.gang,
                priority=pending.priority,
                preempts=pending.preempts,
                by_kube_scheduler=unit.pods[0].queued.by_kube_scheduler,
            ),
            plans.cluster.gang_sizes(plan.leases),
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


def _batches(units: Sequence[WaitingUnit]) -> Iterator[Sequence[WaitingUnit]]:
    """Yield the first alone, then single pods in batches, and each gang alone."""
    batch = list[WaitingUnit]()
    most = 1
    for unit in units:
        if batch and (len(batch) == most or unit.gang is not None or batch[0].gang is not None):
            yield batch
            batch = []
            most = AT_ONCE
        batch.append(unit)
    if batch:
        yield batch


def _plans_for(
    units: Sequence[WaitingUnit], plans: PlanRound
) -> list[tuple[WaitingUnit, PendingPod, PreemptionPlan]]:
    made = []
    for unit in units:
        pending = pending_pod(unit, plans.cluster)
        plan = plans.next_plan(unit, pending) if pending else None
        if pending is not None and plan is not None:
            made.append((unit, pending, plan))
    return made


def pending_pod(unit: WaitingUnit, cluster: ClusterSnapshot) -> PendingPod | None:
    """Return None if a pod is gone or deleted."""
    pods = [cluster.pods.get(pod.queued.pod) for pod in unit.pods]
    there = [pod for pod in pods if pod is not None and not pod.deleting]
    if len(there) < len(pods) or (unit.claim is not None and there[0].node):
        return None
    return PendingPod(
        pod=there[0].pod,
        namespace=there[0].namespace,
        priority=min(pod.queued.request.priority for pod in unit.pods),
        preempts=all(pod.preempts for pod in there),
    )


def claiming_pod(unit: WaitingUnit) -> ClaimingPod | None:
    if unit.claim is None:
        return None
    queued = unit.pods[0].queued
    return ClaimingPod(pod=queued.pod, namespace=queued.namespace, name=queued.name)


def reservation_of(unit: WaitingUnit, pod: WaitingPod, placement: Placement) -> Reservation:
    """The lease may be that of its claim."""
    reservation = reservation_for(pod.queued, (placement,))
    if unit.claim is None:
        return reservation
    return structs.replace(reservation, pod=unit.claim.claim, name=unit.claim.name)

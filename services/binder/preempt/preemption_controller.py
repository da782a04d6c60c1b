"""Preemption of leases of namespaces over budget, or of lower priority, after a notice period.

One binder leads at a time, and begins preemptions. The devices for a pending pod are claimed before
any victim is notified (`shared.ledger.preemptions`), so that no other pod gets what becomes free.
"""

from collections.abc import Collection, Sequence
from uuid import uuid4

from services.binder.metrics import PrometheusMetrics
from services.binder.observations import PodFacts
from services.binder.preempt.eviction_client import EvictionClient
from services.binder.preempt.plan import (
    ClusterSnapshot,
    NoPlan,
    PreemptionPlan,
    pending_pods,
    plan,
    plan_input,
)
from services.binder.preempt.preemption_executor import Offer, PreemptionExecutor
from services.binder.preempt.rules import (
    VIOLATION_ID,
    PendingPod,
    PreemptionRules,
    allowance,
    ends_by_policy,
    is_evictable,
    is_leaving,
    owner_key,
    victim_of,
)
from services.binder.preempt.steps import expiry
from services.binder.report.event_writer import EventRecorder
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.clock import Clock
from shared.model.events.node_events import ViolationFound
from shared.model.events.pod_events import BudgetChanged, PlacementChosen
from shared.model.ledger import LedgerStatus, Reservation, WaitingPod, reservation_for
from shared.model.names import NodeName, PodUid
from shared.model.placement import Placement
from shared.model.preemption import Preemption, PreemptionCause, StoredPreemption, Victim
from shared.placing.anti_affinity import repelled_request


async def evict_violators(
    events: Sequence[ViolationFound],
    *,
    store: Preemptions,
    evictions: EvictionClient,
    rules: PreemptionRules,
    now: float,
) -> None:
    """Begin the evictions that the rules demand; the leader completes them.

    A report about a pod that does not run on the agent's own node is ignored. A repeat changes
    nothing.
    """
    for event in events:
        if not is_evictable(event, rules, now):
            continue
        pod = await evictions.get_pod(event.namespace, event.name)
        if pod is None or pod.pod != event.pod or pod.node != event.node or pod.deleting:
            continue
        victim = victim_of_violation(pod, event.node)
        await store.open(
            Preemption(
                id=f"{VIOLATION_ID}{pod.pod}",
                victims=(victim,),
                opened_at=now,
                expires_at=expiry([victim], rules.notice_s, now),
                reason=f"{event.reason}: {event.message}",
            )
        )


def victim_of_violation(pod: PodFacts, node: NodeName) -> Victim:
    """Return a pod as the victim of its own violation; it may have no lease."""
    return Victim(
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        node=node,
        cause=PreemptionCause.VIOLATION,
        owner=owner_key(pod),
        budget="",
        grace_s=pod.grace_s,
        devices=(),
        priority=pod.priority,
    )


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
MAX_PENDING = 8
"""Pending pods for which plans are made at once."""
MAX_PLANS = 5
"""Plans for one pending pod, where the API server refuses the evictions of earlier ones."""


class PreemptionController:
    """Acts while it leads; holds no state that matters between two steps."""

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
        enabled: bool = True,
    ) -> None:
        self.ledger = ledger
        self.store = store
        self.evictions = evictions
        self.clock = clock
        self.rules = rules
        self.enabled = enabled
        self.executor = PreemptionExecutor(
            ledger=ledger,
            store=store,
            evictions=evictions,
            events=events,
            metrics=metrics,
            clock=clock,
            rules=rules,
            offer=offer,
        )
        self.name = uuid4().hex
        self.step_s = LOOK_S
        """Interval until the next step."""
        self._idle_until = 0.0
        self._check_at = 0.0
        self._plan_at = 0.0
        self._pause_s = PLAN_S
        self._planned_for: object = None

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

    async def claimed_for(self, pod: PodUid) -> Reservation | None:
        """Return what an open preemption has claimed for the pod."""
        state = await self.store.state(now=self.clock.now(), past_s=0)
        found = (each.preemption for each in state.open if each.preemption.id == pod)
        preemption = next(found, None)
        return preemption.wanted if preemption else None

    async def step(self) -> list[PlacementChosen]:
        """Advance open preemptions, and begin those that are due; nothing unless this one leads."""
        status = await self.ledger.status(now=self.clock.ticks())
        if status is None or not self._is_due(status):
            return []
        if not await self.store.acquire_leadership(self.name, ttl_s=LEADERSHIP_S):
            return []
        state = await self.store.state(now=self.clock.now(), past_s=0)
        placements: list[PlacementChosen] = []
        for read in state.open:
            placements += await self.executor.advance(read, state)
        if self.enabled and not placements:
            await self._begin_due()
        return placements

    def _is_due(self, status: LedgerStatus) -> bool:
        """Return whether something may have to be done; policies of budgets are checked rarely."""
        now = self.clock.ticks()
        is_due = bool(status.preemptions or status.waiting)
        self.step_s = STEP_S if is_due else LOOK_S
        is_due |= status.budgets > 0 and now >= self._idle_until
        if is_due:
            self._idle_until = now + IDLE_S
        return is_due

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
        cluster = ClusterSnapshot(nodes, pods, disruption_budgets)
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
            request = repelled_request(waiting.queued, (node.node.facts for node in cluster.nodes))
            found = plan(request, given)
            if isinstance(found, NoPlan):
                return False
            read = await self._open(waiting, pending, found)
            if read is None:
                return False
            if await self.executor.announce(read):
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
            wanted=reservation_for(
                waiting.queued, (Placement(node=found.node, shares=found.shares),)
            ),
            priority=pending.priority,
            preempts=pending.preempts,
            opened_at=now,
            expires_at=expiry(victims, self.rules.notice_s, now),
            by_kube_scheduler=waiting.queued.by_kube_scheduler,
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
                begun |= await self.executor.announce(
                    StoredPreemption(preemption=preemption, version=1, claimed=False)
                )
        return begun

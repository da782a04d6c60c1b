"""Preemption of leases over budget, or in the way of a higher priority: with notice, and exactly.

One binder leads at a time; every step is written down with the version it was decided on, and every
call outside may be made twice: whoever leads next goes on from what is written. For a pod in need
the devices are claimed before anybody is told (`shared.ledger.preemptions`), so that nothing else
gets what becomes free.
"""

from collections.abc import Sequence
from dataclasses import replace
from uuid import uuid4

from services.binder.ports.preemption import Counting, Ledger, Noting, Store, Victims
from services.binder.preempt import announcements as notes
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
from services.binder.preempt.steps import Seen, Step, expiry, next_step
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
)

LEAD_S = 5.0
LOOK_S = 2.0
LOOK_PER_POD_S = 0.001
"""How much later the next look at who waits is for each pod that does."""
PLAN_LATER_S = 15.0
"""Plans that come to nothing double the pause before the next ones up to this."""
NEEDS_MAX = 8
"""Pods in need for which a plan is made in one look."""
PLANS_MAX = 5
"""Plans for one pod in one look, where the API server refuses those before."""
RESERVED_S = 30.0

AGAIN_S = 10.0
"""After which an eviction is asked for again that a PodDisruptionBudget forbids."""


class PreemptionController:
    """Acts while it leads; keeps nothing that matters between two steps."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        store: Store,
        victims: Victims,
        events: Noting,
        counts: Counting,
        clock: Clock,
        fit: Fit,
        rules: PreemptionRules,
        enabled: bool = True,
    ) -> None:
        self.ledger = ledger
        self.store = store
        self.victims = victims
        self.events = events
        self.counts = counts
        self.clock = clock
        self.fit = fit
        self.rules = rules
        self.enabled = enabled
        self.name = uuid4().hex
        self._look_at = 0.0
        self._plan_at = 0.0
        self._pause_s = LOOK_S
        self._saw: object = None
        self._blocked: dict[str, float] = {}

    async def hear(self, events: Sequence[BudgetChanged]) -> None:
        """Remember how budgets stand."""
        for event in events:
            await self.store.save_budget(event)

    async def evict_violators(self, events: Sequence[ViolationFound]) -> None:
        """Begin to evict pods for what they did, if the rules have them evicted."""
        now = self.clock.now()
        await evict_violators(
            events, store=self.store, pods=self.victims, rules=self.rules, now=now
        )

    async def step(self) -> list[PlacementChosen]:
        """Move on whatever is under way, and begin what is due; nothing unless this one leads."""
        if await self.ledger.generation() is None:
            return []
        if not await self.store.acquire_leadership(self.name, ttl_s=LEAD_S):
            return []
        affairs = await self.store.state(now=self.clock.now(), past_s=0)
        said: list[PlacementChosen] = []
        for read in affairs.open:
            said += await self._advance(read, affairs)
        if self.enabled and not said:
            await self._look()
        return said

    # What is under way

    async def _advance(
        self, read: StoredPreemption, affairs: PreemptionState
    ) -> list[PlacementChosen]:
        seen = await self._see(read.preemption)
        step, why = next_step(read, seen, affairs, self.clock.now())
        match step:
            case Step.TELL if read.preemption.reason:
                now = self.clock.now()
                past = await self.store.state(now=now, past_s=HOUR_S)
                why = over_limit(read.preemption, past, self.rules, now)
                await (self._call_off(read, why) if why else self._tell(read))
            case Step.TELL:
                await self._tell(read)
            case Step.EVICT:
                if self.clock.now() >= self._blocked.get(read.preemption.id, 0.0):
                    await self._evict(read)
            case Step.HAND_OVER:
                return await self._hand_over(read)
            case Step.SAY:
                return _chosen(seen.lease)
            case Step.CLOSE:
                await self.store.close(read)
            case Step.CALL_OFF:
                await self._call_off(read, why)
            case Step.WAIT:
                pass
        return []

    async def _see(self, preemption: Preemption) -> Seen:
        victims = [victim.pod for victim in preemption.victims]
        if preemption.wanted is None:
            return Seen(waits=False, lease=None, leased=frozenset())
        # In this order: a pod that stops waiting because it was given a lease is seen with it.
        waiting = await self.ledger.waiting_pods.load([preemption.wanted.pod])
        own, *theirs = await self.ledger.load([preemption.wanted.pod, *victims])
        return Seen(waits=bool(waiting), lease=own, leased={lease.pod for lease in theirs if lease})

    async def _tell(self, read: StoredPreemption) -> bool:
        """Ask whether all may be evicted, then tell them; False, and called off, if one may not."""
        for victim in read.preemption.victims:
            outcome, why = await self.victims.evict(victim, dry_run=True)
            if outcome is EvictionOutcome.BLOCKED:
                await self._call_off(read, f"{victim.namespace}/{victim.name}: {why}")
                return False
        at = self.clock.now() + self.rules.notice_s
        for victim in read.preemption.victims:
            await self.victims.announce(victim, at)
            self.events.note(notes.announced(victim, read.preemption, at))
        # Nobody is evicted before the last one has had its notice.
        evict_at = self.clock.now() + self.rules.notice_s
        told = replace(
            read.preemption.stepped(PreemptionStage.ANNOUNCED),
            evict_at=evict_at,
            expires_at=expiry(read.preemption.victims, self.rules.notice_s, self.clock.now()),
        )
        if await self.store.save(read, told) and told.wanted is not None:
            self.events.note(notes.makes_room(told))
        return True

    async def _evict(self, read: StoredPreemption) -> None:
        """Evict who is left; one whom a PodDisruptionBudget now protects is tried again later."""
        now: StoredPreemption | None = read
        if read.preemption.stage is PreemptionStage.ANNOUNCED:
            now = await self.store.save(read, read.preemption.stepped(PreemptionStage.EVICTING))
        for victim in read.preemption.left:
            if now is None:
                return
            outcome, why = await self.victims.evict(victim)
            if outcome is EvictionOutcome.BLOCKED:
                if all(
                    each.outcome is not EvictionOutcome.EVICTED for each in now.preemption.victims
                ):
                    await self._call_off(now, f"{victim.namespace}/{victim.name}: {why}")
                    return
                self._blocked[read.preemption.id] = self.clock.now() + AGAIN_S
                continue
            note = notes.evicted(victim, now.preemption)
            line = notes.record_of(victim, now.preemption, outcome, note, self.clock.now())
            now = await self.store.save(now, now.preemption.after(victim, outcome), [line])
            if now is not None and outcome is EvictionOutcome.EVICTED:
                self.events.note(note, once=True)
                self.counts.evicted(victim, line.for_namespace)

    async def _hand_over(self, read: StoredPreemption) -> list[PlacementChosen]:
        wanted = read.preemption.wanted
        if wanted is None:
            return []
        [answer] = await self.ledger.reserve([wanted], now=self.clock.now(), ttl_s=RESERVED_S)
        if not isinstance(answer, Reserved | AlreadyLeased):
            return []  # tried again until the preemption expires
        await self.store.save(read, read.preemption.stepped(PreemptionStage.HANDED))
        return _chosen(answer.lease)

    async def _call_off(self, read: StoredPreemption, why: str) -> None:
        for victim in read.preemption.left:
            await self.victims.withdraw(victim)
        if await self.store.close(read):
            for note in notes.called_off(read.preemption, why):
                self.events.note(note)

    # What is to begin

    async def _look(self) -> None:
        """Begin preemptions for pods in need, and those that budgets' own policies demand."""
        now = self.clock.now()
        if now < self._look_at:
            return
        affairs = await self.store.state(now=now)
        waiting = await self.ledger.waiting_pods.load()
        self._look_at = now + LOOK_S + len(waiting) * LOOK_PER_POD_S
        needs = pending_pods(waiting, affairs, self.rules, now)
        policies = [s for s in (affairs.budgets or {}).values() if ends_by_policy(s, now)]
        saw = (
            frozenset(each.queued.pod for each in needs),
            frozenset((s.namespace, s.lease_class) for s in (affairs.budgets or {}).values()),
        )
        if saw != self._saw:
            self._saw, self._plan_at, self._pause_s = saw, 0.0, LOOK_S
        if not (needs or policies) or now < self._plan_at:
            return
        begun = await self._begin(needs[:NEEDS_MAX], policies, affairs)
        self._pause_s = LOOK_S if begun else min(2 * self._pause_s, PLAN_LATER_S)
        self._plan_at = self.clock.now() + self._pause_s

    async def _begin(
        self,
        needs: Sequence[WaitingPod],
        policies: Sequence[BudgetChanged],
        affairs: PreemptionState,
    ) -> bool:
        pods, disruptions = await self.victims.everybody()
        accounts = [account async for page in self.ledger.totals.pages() for account in page]
        cluster = ClusterSnapshot(accounts=accounts, pods=pods, disruptions=disruptions)
        begun = False
        for standing in policies:
            begun |= await self._end_by_policy(standing, cluster)
        for waiting in needs:
            begun |= await self._take_back_for(waiting, cluster)
        return begun

    async def _take_back_for(self, waiting: WaitingPod, cluster: ClusterSnapshot) -> bool:
        """Claim, ask, tell; what the API server refuses is planned anew without those."""
        refused: set[PodUid] = set()
        own = cluster.pods.get(waiting.queued.pod)
        if own is None or own.ending:
            return False
        for _ in range(PLANS_MAX):
            now = self.clock.now()
            affairs = await self.store.state(now=now)
            need = PendingPod(
                pod=own.pod,
                namespace=own.namespace,
                priority=waiting.queued.request.priority,
                preempts=own.preempts,
            )
            seen = plan_input(need, cluster, affairs, self.rules, now=now, without=refused)
            found = plan(waiting.queued.request, seen, self.fit)
            if isinstance(found, NoPlan):
                return False
            read = await self._opened(waiting, need, found)
            if read is None:
                return False
            if await self._tell(read):
                return True
            refused.update(each.lease.pod for each in found.victims)
        return False

    async def _opened(
        self, waiting: WaitingPod, need: PendingPod, found: PreemptionPlan
    ) -> StoredPreemption | None:
        now = self.clock.now()
        victims = tuple(each.victim for each in found.victims)
        preemption = Preemption(
            id=waiting.queued.pod,
            victims=victims,
            wanted=reservation_of(waiting.queued, found),
            priority=need.priority,
            preempts=need.preempts,
            opened_at=now,
            expires_at=expiry(victims, self.rules.notice_s, now),
        )
        if not await self.store.open(preemption):
            return None
        return StoredPreemption(preemption=preemption, version=1, claimed=True)

    async def _end_by_policy(self, standing: BudgetChanged, cluster: ClusterSnapshot) -> bool:
        begun = False
        leases = [lease for account in cluster.accounts for lease in account.leases]
        for lease in sorted(leases, key=lambda lease: lease.pod):
            now = self.clock.now()
            affairs = await self.store.state(now=now)
            pod = cluster.pods.get(lease.pod)
            if lease.namespace != standing.namespace or pod is None:
                continue
            left = allowance(affairs, self.rules, now).of(lease.namespace)
            if not left or is_leaving(lease, pod, affairs):
                continue
            victim = victim_of(lease, pod, PreemptionCause.POLICY, standing)
            preemption = Preemption(
                id=f"policy:{lease.pod}",
                victims=(victim,),
                opened_at=now,
                expires_at=expiry([victim], self.rules.notice_s, now),
            )
            if await self.store.open(preemption):
                begun |= await self._tell(
                    StoredPreemption(preemption=preemption, version=1, claimed=False)
                )
        return begun


def _chosen(lease: Lease | None) -> list[PlacementChosen]:
    return [PlacementChosen(lease=lease, trace=lease.trace)] if lease else []

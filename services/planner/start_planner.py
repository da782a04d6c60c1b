"""Plans starts of pods that wait: devices are claimed where a pod, or a gang, fits earliest.

No pod is evicted: until the leases on these devices end, only pods that end before the start are
let onto them.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from services.planner.cluster_view import LeaseMirror, usable_devices
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.bounds import cut
from shared.model.budgets.fair_share import FairShare, fair_queue
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.events.event import PodEvent
from shared.model.events.plan_events import StartDecision, StartReported
from shared.model.events.pod_events import PodQueued
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import NodeTotals, Reservation, WaitingPod, reservation_for
from shared.model.leases.preemption import (
    MOST_START_EVENTS,
    PreemptionState,
    PromiseOutcome,
    StoredStart,
    start_text,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.placing.starts import (
    AGAIN_S,
    EARLIER_S,
    MOST_TRIED,
    RESERVE_AFTER_S,
    LeaseEnd,
    PlannedStart,
    StartTrials,
    WaitingUnit,
    ending_lease,
    lease_end,
    no_end_text,
    plan_start,
    waiting_units,
    with_claims,
    with_some_end,
)
from shared.runtime.service import Publish

AGED_S = 3600.0
"""After so long, fair share no longer lets pods of other namespaces come first: none starves."""
NAMESPACE_STARTS = 2
PLAN_S = 2.0
"""Interval of plans while pods wait: shorter ones cost more, and find room for starts sooner."""
PAUSE_FACTOR = 20.0
"""In multiples of the time that plans took: planning takes at most a twentieth of a core."""
MAX_PLAN_S = 30.0
"""Plans without a result double the pause before the next ones up to this."""
MOST_PASS_S = 5.0
"""After this time, the others are left for the next plans, where they come first."""
MOST_REPORTS = 4096
"""The oldest are dropped first."""


def in_turn(units: Iterable[WaitingUnit], fair_share: FairShare, now: float) -> list[WaitingUnit]:
    """Within a rank, what has waited for `AGED_S` comes first, oldest first.

    A namespace's third gang comes after the first of every other.
    """

    def rank(unit: WaitingUnit) -> tuple[bool, int]:
        return not fair_share.entitlement_of(unit.namespace).has_budget, -unit.priority

    aged = sorted(units, key=lambda unit: (rank(unit), min(unit.since, now - AGED_S)))
    beyond = beyond_share(aged)
    return sorted(aged, key=lambda unit: (rank(unit), unit.id in beyond))


def beyond_share(ordered: Iterable[StoredStart | WaitingUnit]) -> set[str]:
    seen = Counter[Namespace]()
    beyond = set[str]()
    for start in ordered:
        seen[start.namespace] += 1
        if seen[start.namespace] > NAMESPACE_STARTS:
            beyond.add(start.id)
    return beyond


def giving_way(unit: WaitingUnit, starts: Iterable[StoredStart]) -> list[StoredStart]:
    """Return the starts that a unit comes before: of a lower priority, or one too many."""
    others = [start for start in starts if start.id != unit.id]
    ordered = sorted(others, key=lambda start: (-start.priority, start.opened_at))
    has_share = sum(start.namespace == unit.namespace for start in others) >= NAMESPACE_STARTS
    beyond = set[str]() if has_share else beyond_share(ordered)
    return [
        start
        for start in others
        if start.priority < unit.priority
        or (start.priority == unit.priority and start.id in beyond)
    ]


def start_of(
    unit: WaitingUnit,
    plan: PlannedStart,
    others: Iterable[StoredStart],
    ends: Mapping[PodUid, LeaseEnd],
    now: float,
) -> StoredStart:
    counted = {ending.pod for other in others for ending in other.waits_for}
    freed = defaultdict[NodeName, Counter[str]](Counter)
    for lease in plan.waits_for:
        if lease.pod not in counted:
            freed[lease.node].update(lease.resources)
    wanted = list[Reservation]()
    at_once = list[Mapping[str, int]]()
    for pod, placement in zip(unit.pods, plan.placements, strict=True):
        if placement is not None:
            wanted.append(reservation_for(pod.queued, (placement,)))
            at_once.append(_beyond(wanted[-1].resources, freed[placement.node]))
    return StoredStart(
        id=unit.id,
        wanted=tuple(wanted),
        at_once=tuple(at_once),
        waits_for=tuple(ending_lease(lease, ends[lease.pod]) for lease in plan.waits_for),
        at=plan.at,
        enforced=plan.enforced,
        priority=unit.priority,
        gang=unit.gang,
        opened_at=now,
    )


def _beyond(needed: Mapping[str, int], freed: Counter[str]) -> dict[str, int]:
    """Return what is needed beyond what is freed, and take the rest from that."""
    beyond = {}
    for name, amount in needed.items():
        taken = min(amount, freed[name])
        freed[name] -= taken
        beyond[name] = amount - taken
    return beyond


def lost_place(start: StoredStart, nodes: Iterable[NodeTotals]) -> str:
    by_name = {totals.node.facts.name: totals.node for totals in nodes}
    for reservation in start.wanted:
        (placement,) = reservation.candidates
        node = by_name.get(placement.node)
        if node is None or node.facts.unschedulable:
            return f"node {placement.node} is {'cordoned' if node else 'gone'}"
        claimed = {device.uuid for device, use in node.devices if use.claimed_by}
        usable = claimed & usable_devices(node)
        for share in placement.shares:
            if share.device not in usable:
                return f"GPU {share.device} of node {placement.node} is unhealthy or gone"
    return ""


def endless_leases(plan: PlannedStart, ends: Mapping[PodUid, LeaseEnd]) -> list[Lease]:
    return [lease for lease in plan.waits_for if lease.pod not in ends]


def is_claimed(plan: PlannedStart, ends: Mapping[PodUid, LeaseEnd], now: float) -> bool:
    """All that the plan waits for must end, and soon enough."""
    return plan.claims(now) and not endless_leases(plan, ends)


class StartReports:
    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._queued = deque[StartReported](maxlen=MOST_REPORTS)

    def add(
        self,
        pods: Iterable[PodEvent | Reservation],
        decision: StartDecision,
        text: str,
        *,
        once: bool = False,
        opened_at: float = 0.0,
    ) -> None:
        for pod in pods:
            report = StartReported(
                pod=pod.pod,
                namespace=pod.namespace,
                name=pod.name,
                decision=decision,
                text=cut(text),
                once=once,
                opened_at=opened_at,
            )
            self._queued.append(report)

    async def publish(self) -> None:
        """Raises UnavailableError if NATS is away; then the reports stay queued."""
        reports = list(self._queued)
        if reports:
            await self._publish(reports)
        for _ in reports:
            self._queued.popleft()


class WaitEstimate(NamedTuple):
    unit: WaitingUnit
    endless: frozenset[PodUid]
    """Pods without a known end that would have to end first."""
    at: float = inf
    """Infinite if no end is in sight."""

    @property
    def shown_to(self) -> list[PodQueued]:
        return [pod.queued for pod in self.unit.pods[:MOST_START_EVENTS]]


@dataclass(eq=False)
class WaitEstimates:
    """What is shown to pods and gangs without a start, until the expected time is quite another."""

    reports: StartReports

    def __post_init__(self) -> None:
        self.endless = frozenset[PodUid]()
        self.shown = dict[str, WaitEstimate]()

    def holds(self, unit: WaitingUnit, now: float) -> bool:
        shown = self.shown.get(unit.id)
        return shown is not None and shown.endless <= self.endless and now < shown.at

    def show(
        self, unit: WaitingUnit, plan: PlannedStart, ends: Mapping[PodUid, LeaseEnd], now: float
    ) -> None:
        endless = endless_leases(plan, ends)
        shown_at = self.shown[unit.id].at if self.holds(unit, now) else 0.0
        if endless and shown_at < inf:
            text = no_end_text(endless, lambda namespace: namespace == unit.namespace)
            pods = frozenset(lease.pod for lease in endless)
            self._report(WaitEstimate(unit, pods), StartDecision.UNKNOWN, text)
        elif not endless and abs(plan.at - shown_at) > (plan.at - now) / 4:
            # A quarter of the time left is what a user notices.
            ending = [ending_lease(lease, ends[lease.pod]) for lease in plan.waits_for]
            outlook = WaitEstimate(unit, frozenset(), plan.at)
            self._report(outlook, StartDecision.PLANNED, start_text(ending, ""))

    def _report(self, outlook: WaitEstimate, decision: StartDecision, text: str) -> None:
        self.shown[outlook.unit.id] = outlook
        self.reports.add(outlook.shown_to, decision, text, once=True)

    def take_back(self, id_: str, waiting: Container[PodUid]) -> None:
        """Its Event stays."""
        shown = self.shown.pop(id_, None)
        pods = [pod for pod in shown.shown_to if pod.pod in waiting] if shown else []
        self.reports.add(pods, StartDecision.WITHDRAWN, "")

    def review(self, units: Iterable[WaitingUnit], waiting: Container[PodUid], now: float) -> None:
        current = {unit.id for unit in units if self.holds(unit, now)}
        for id_ in self.shown.keys() - current:
            self.take_back(id_, waiting)


@dataclass(eq=False, kw_only=True)
class StartPlanner:
    ledger: RedisLeases
    store: Preemptions
    mirror: LeaseMirror
    reports: StartReports
    clock: Clock
    after_s: float = RESERVE_AFTER_S
    """Seconds that a pod without a gang waits before its start is planned; 0 turns this off."""
    most: int = 1

    def __post_init__(self) -> None:
        self._plan_at = 0.0
        self._planned_at = 0.0
        self._took_s = 0.0
        self._left = set[str]()
        self._pause_s = PLAN_S
        self._planned_for: object = None
        self._outlooks = WaitEstimates(self.reports)
        self._stored = dict[str, tuple[PodUid, ...]]()
        """By ID, the pods of the starts when plans were made last."""

    @property
    def has_shown(self) -> bool:
        return bool(self._outlooks.shown)

    async def withdraw(self, start: StoredStart, reason: str) -> None:
        try:
            ended = start.ended(PromiseOutcome.WITHDRAWN, self.clock.now())
            if not await self.store.close_start(start, ended):
                return
        except UnavailableError:  # it may have been closed all the same
            self._report_withdrawal(start, reason)
            raise
        finally:
            self.mirror.note_changed(_nodes_of(start))
        self._report_withdrawal(start, reason)
        self._plan_at = 0.0

    def _report_withdrawal(self, start: StoredStart, reason: str) -> None:
        pods = start.wanted[:MOST_START_EVENTS]
        self.reports.add(pods, StartDecision.WITHDRAWN, start.withdrawn_text(reason))

    def _plan_again_if_withdrawn(
        self, starts: Iterable[StoredStart], waiting: Container[PodUid]
    ) -> None:
        """Skip the pause if a binder has withdrawn a start while its pods still wait."""
        stored = {start.id: start.pods for start in starts}
        withdrawn = self._stored.keys() - stored.keys()
        if any(pod in waiting for id_ in withdrawn for pod in self._stored[id_]):
            self._plan_at = 0.0
        self._stored = stored

    async def plan(self, waiting: Sequence[WaitingPod], state: PreemptionState) -> None:
        now = self.clock.now()
        preempting = state.preemptors()
        left = [pod for pod in waiting if pod.queued.pod not in preempting]
        waiting_for = frozenset(pod.queued.pod for pod in left)
        self._plan_again_if_withdrawn(state.starts, waiting_for)
        if waiting_for != self._planned_for:
            self._planned_for = waiting_for
            self._pause_s = PLAN_S
            soon = self._planned_at + max(PLAN_S, PAUSE_FACTOR * self._took_s)
            self._plan_at = min(self._plan_at, soon)
        if not (self.after_s and (left or self._outlooks.shown)) or now < self._plan_at:
            return
        nodes = await self.mirror.nodes()
        for start in state.starts:
            if lost := lost_place(start, nodes):
                await self.withdraw(start, lost)
        fair_share = await self.ledger.totals.fair_share()
        queue = fair_queue(left, fair_share)
        waiting_long = waiting_units(queue, nodes, now=now, after_s=self.after_s)
        units = in_turn(waiting_long, fair_share, now)
        units.sort(key=lambda unit: unit.id not in self._left)
        run_times = await self.ledger.run_times.load()
        ends = {
            lease.pod: end
            for totals in nodes
            for lease in totals.leases
            if (end := lease_end(lease, now, run_times.expected_s(lease)))
        }
        self._outlooks.endless = frozenset(
            lease.pod for totals in nodes for lease in totals.leases if lease.pod not in ends
        )
        begun = False
        trials = StartTrials()
        first = [unit for unit in units[:MOST_TRIED] if ends or not self._outlooks.holds(unit, now)]
        self._left = {unit.id for unit in first}
        for unit in first:
            if self.clock.now() - now > MOST_PASS_S:
                break
            self._left.discard(unit.id)
            if await self._plan_unit(unit, nodes, ends, now, trials):
                begun = True
                nodes = await self.mirror.nodes()
                trials = StartTrials()  # with its claims
        planned = {pod for start in state.starts for pod in start.pods}
        self._outlooks.review(units, {pod.queued.pod for pod in waiting} - planned, now)
        self._planned_at = self.clock.now()
        self._pause_s = PLAN_S if begun else min(2 * self._pause_s, MAX_PLAN_S)
        self._took_s = self._planned_at - now
        self._plan_at = self._planned_at + max(self._pause_s, PAUSE_FACTOR * self._took_s)

    async def _plan_unit(
        self,
        unit: WaitingUnit,
        nodes: Sequence[NodeTotals],
        ends: Mapping[PodUid, LeaseEnd],
        now: float,
        trials: StartTrials,
    ) -> bool:
        starts = (await self.store.state(now=now, past_s=0)).starts
        own = next((start for start in starts if start.id == unit.id), None)
        before = own.at - EARLIER_S if own else inf
        if before < now or (own is not None and now < own.opened_at + AGAIN_S):
            return False
        lower = giving_way(unit, starts)
        staying = [start for start in starts if start not in (own, *lower)]
        if len(staying) >= self.most:
            return False
        given = with_claims(nodes, staying, [*lower, own] if own else lower)
        requests = unit.requests(nodes)
        plan = await asyncio.to_thread(
            plan_start,
            requests,
            unit.needed,
            given,
            with_some_end(lambda lease: ends.get(lease.pod)),
            now=now,
            before=before,
            trials=trials,
        )
        if plan is not None and not is_claimed(plan, ends, now):
            self._outlooks.show(unit, plan, ends, now)
            return False
        self._outlooks.take_back(unit.id, {pod.queued.pod for pod in unit.pods})
        if plan is None:
            return False
        return await self._claim(start_of(unit, plan, staying, ends, now), lower, own)

    async def _claim(
        self, planned: StoredStart, lower: Sequence[StoredStart], own: StoredStart | None
    ) -> bool:
        crossed = [
            (
                start,
                f"its namespace has more than {NAMESPACE_STARTS}, and others wait"
                if start.priority == planned.priority
                else f"a pod of priority {planned.priority} comes first",
            )
            for start in lower
            if planned.devices & start.devices
        ]
        if not planned.waits_for:  # it fits as soon as they have given way
            for start, reason in crossed:
                await self.withdraw(start, reason)
            return False
        replaced = [start for start, _ in crossed] + ([own] if own else [])
        now = self.clock.now()
        withdrawn = [start.ended(PromiseOutcome.WITHDRAWN, now) for start, _ in crossed]
        ended = [promise for promise in withdrawn if promise]
        is_stored = await self.store.open_start(planned, *replaced, ended=ended)
        for start in (planned, *replaced):
            self.mirror.note_changed(_nodes_of(start))
        if not is_stored:
            return False
        for start, reason in crossed:
            self._report_withdrawal(start, reason)
        pods = planned.wanted[:MOST_START_EVENTS]
        self.reports.add(pods, StartDecision.PLANNED, planned.text, opened_at=planned.opened_at)
        return True


def _nodes_of(start: StoredStart) -> set[NodeName]:
    return {reservation.candidates[0].node for reservation in start.wanted}

"""Planned starts of pods that wait: devices are claimed where a pod, or a gang, fits earliest.

Nobody is evicted: the leases on these devices end by their own terms, and until then only pods that
end before the start are let onto them. Nothing is claimed for what is only expected, and not soon.
Used by the binder that leads.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from services.binder.report.event_writer import ConditionWriter, EventRecorder
from services.binder.report.explanations import NO_END, PLANNED, WITHDRAWN, event_of
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.budgets.fair_share import FairShare, fair_queue
from shared.model.clock import Clock
from shared.model.devices.node import NodeFacts
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import PlacementChosen, PodQueued
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.ledger import (
    AlreadyLeased,
    NodeTotals,
    Reservation,
    Reserved,
    WaitingPod,
    reservation_for,
)
from shared.model.leases.preemption import PreemptionState, StoredStart, start_text
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import Gang
from shared.placing.anti_affinity import Domain, all_domains, repelled_request
from shared.placing.node_filters import check_anti_affinity
from shared.placing.starts import (
    AGAIN_S,
    EARLIER_S,
    LATE_S,
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

RESERVATION_S = 30.0
AGED_S = 3600.0
"""After so long, fair share no longer lets pods of other namespaces come first: none starves."""
NAMESPACE_STARTS = 2
"""So many starts are of one namespace while pods of others wait."""
PLAN_S = 2.0
PAUSE_FACTOR = 20.0
"""The pause after plans is at least so many times as long as they took."""
MAX_PLAN_S = 30.0
"""Plans without a result double the pause before the next ones up to this."""
MOST_PASS_S = 5.0
"""After this time, the others are left for the next plans, where they come first."""
MOST_EVENTS = 16
"""Pods of a gang that get an Event, and the text in their condition."""


def in_turn(units: Iterable[WaitingUnit], fair_share: FairShare, now: float) -> list[WaitingUnit]:
    """Return what waits in the order in which its starts are planned.

    What has waited for `AGED_S` comes before others of its rank, oldest first; the others stay in
    the order that they have. Those beyond the first of their namespaces come last: however many of
    one cannot be planned, the others get their turn.
    """

    def rank(unit: WaitingUnit) -> tuple[bool, int]:
        return not fair_share.entitlement_of(unit.namespace).has_budget, -unit.priority

    aged = sorted(units, key=lambda unit: (rank(unit), min(unit.since, now - AGED_S)))
    beyond = beyond_share(aged)
    return sorted(aged, key=lambda unit: (rank(unit), unit.id in beyond))


def beyond_share(ordered: Iterable[StoredStart | WaitingUnit]) -> set[str]:
    """Return the IDs of those beyond the first `NAMESPACE_STARTS` of their namespaces."""
    seen = Counter[Namespace]()
    beyond = set[str]()
    for each in ordered:
        seen[each.namespace] += 1
        if seen[each.namespace] > NAMESPACE_STARTS:
            beyond.add(each.id)
    return beyond


def giving_way(unit: WaitingUnit, starts: Iterable[StoredStart]) -> list[StoredStart]:
    """Return the starts that a pod or gang comes before: of a lower priority, or one too many."""
    others = [each for each in starts if each.id != unit.id]
    ordered = sorted(others, key=lambda each: (-each.priority, each.opened_at))
    has_share = sum(each.namespace == unit.namespace for each in others) >= NAMESPACE_STARTS
    beyond = set[str]() if has_share else beyond_share(ordered)
    return [
        each
        for each in others
        if each.priority < unit.priority or (each.priority == unit.priority and each.id in beyond)
    ]


def start_of(
    unit: WaitingUnit,
    plan: PlannedStart,
    others: Iterable[StoredStart],
    ends: Mapping[PodUid, LeaseEnd],
    now: float,
) -> StoredStart:
    """Return what is stored of a plan, beside other planned starts."""
    counted = {each.pod for other in others for each in other.waits_for}
    freed = defaultdict[NodeName, Counter[str]](Counter)
    for lease in plan.waits_for:
        if lease.pod not in counted:
            freed[lease.node].update(lease.resources)
    wanted = list[Reservation]()
    at_once = list[Mapping[str, int]]()
    for each, placement in zip(unit.pods, plan.placements, strict=True):
        if placement is not None:
            wanted.append(reservation_for(each.queued, (placement,)))
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
    """Return what became of a node or device on which a start is planned; empty: nothing."""
    known = {totals.node.facts.name: totals.node for totals in nodes}
    for each in start.wanted:
        (placement,) = each.candidates
        node = known.get(placement.node)
        if node is None or node.facts.unschedulable:
            return f"node {placement.node} is {'cordoned' if node else 'gone'}"
        usable = {
            device.uuid
            for device, use in node.devices
            if device.healthy and use.claimed_by and device.index not in node.facts.excluded_devices
        }
        for share in placement.shares:
            if share.device not in usable:
                return f"GPU {share.device} of node {placement.node} is unhealthy or gone"
    return ""


class Told(NamedTuple):
    """What the pods of a unit without a start were told."""

    unit: WaitingUnit
    endless: frozenset[PodUid]
    """The pods without a known end that would have to end first."""
    at: float = inf
    """When it is expected to start; infinite: no end is in sight."""


@dataclass(eq=False)
class Outlooks:
    """Pods and gangs without a start that were told that none is in sight, or soon.

    They are told again only if that is no longer so, or the expected time is quite another.
    """

    events: EventRecorder
    conditions: ConditionWriter

    def __post_init__(self) -> None:
        self.leases = frozenset[PodUid]()
        """The pods whose leases have no known end."""
        self.told = dict[str, Told]()

    def holds(self, unit: WaitingUnit, now: float) -> bool:
        """Return whether it was told something that is still so."""
        told = self.told.get(unit.id)
        return told is not None and told.endless <= self.leases and now < told.at

    def is_claimed(
        self,
        unit: WaitingUnit,
        plan: PlannedStart | None,
        ends: Mapping[PodUid, LeaseEnd],
        now: float,
    ) -> bool:
        """Return whether a plan is followed; tell its pods, if need be, why there is no start."""
        waits = plan.waits_for if plan else ()
        endless = [lease for lease in waits if lease.pod not in ends]
        if plan is None or (plan.claims(now) and not endless):
            self.take_back(unit.id, {each.queued.pod for each in unit.pods})
            return plan is not None
        known = self.told[unit.id].at if self.holds(unit, now) else 0.0
        if endless and known < inf:
            text = no_end_text(endless, lambda namespace: namespace == unit.namespace)
            self._tell(Told(unit, frozenset(lease.pod for lease in endless)), NO_END, text)
        elif not endless and abs(plan.at - known) > (plan.at - now) / 4:
            text = start_text([ending_lease(lease, ends[lease.pod]) for lease in waits], "")
            self._tell(Told(unit, frozenset(), plan.at), PLANNED, text)
        return False

    def _tell(self, told: Told, reason: str, text: str) -> None:
        self.told[told.unit.id] = told
        for each in told.unit.pods[:MOST_EVENTS]:
            event = event_of(each.queued, reason, text, warning=False)
            self.events.record(event, once=True)
            self.conditions.explain(event)

    def take_back(self, id_: str, waiting: Container[PodUid]) -> None:
        """Remove it from the conditions of those of its pods that wait; its Event stays."""
        told = self.told.pop(id_, None)
        for each in told.unit.pods[:MOST_EVENTS] if told else ():
            if each.queued.pod in waiting:
                self.conditions.explain(event_of(each.queued, WITHDRAWN, ""))

    def review(self, units: Iterable[WaitingUnit], waiting: Container[PodUid], now: float) -> None:
        """Take back what is no longer so of pods and gangs that were not tried."""
        current = {each.id for each in units if self.holds(each, now)}
        for id_ in self.told.keys() - current:
            self.take_back(id_, waiting)


@dataclass(eq=False, kw_only=True)
class StartPlanner:
    """Plans starts, and hands the devices over when their time has come."""

    ledger: RedisLeases
    store: Preemptions
    events: EventRecorder
    conditions: ConditionWriter
    clock: Clock
    after_s: float = RESERVE_AFTER_S
    """How long a pod without a gang waits before its start is planned; 0: none is."""
    most: int = 1
    """Starts that are planned at once."""

    def __post_init__(self) -> None:
        self._plan_at = 0.0
        self._planned_at = 0.0
        self._took_s = 0.0
        self._left = set[str]()
        self._pause_s = PLAN_S
        self._planned_for: object = None
        self._outlooks = Outlooks(self.events, self.conditions)

    async def advance(self, starts: Sequence[StoredStart]) -> list[PlacementChosen]:
        """Hand over, or withdraw, the starts whose time has come; return the placements."""
        return [each for start in starts for each in await self._advance(start)]

    async def _advance(self, start: StoredStart) -> list[PlacementChosen]:
        pods = start.pods
        # In this order, so that a pod that got a lease meanwhile is never observed without either.
        waiting = await self.ledger.waiting_pods.load(pods)
        leases = await self.ledger.load([*pods, *(each.pod for each in start.waits_for)])
        own = leases[: len(pods)]
        before = leases[len(pods) :]
        missing = set(pods) - {pod.queued.pod for pod in waiting}
        gone = (
            await self.ledger.waiting_pods.list_gone(sorted(missing)) if missing else set[PodUid]()
        )
        if any(own) or gone:
            reason = f"{'other pods' if any(own) else 'too few pods'} of its gang start"
            leased = {lease.pod for lease in own if lease}
            await self.withdraw(start, reason, set(pods) - gone - leased)
            return [chosen(lease) for lease in own if lease and lease.state is LeaseState.RESERVED]
        is_late = self.clock.now() > start.at + LATE_S
        if missing and not is_late:  # a placer decides again about them: they wait again soon
            return []
        running = [
            each for each, lease in zip(start.waits_for, before, strict=True) if lease is not None
        ]
        if not running and not is_late:
            return await self._reserve(start, waiting)
        if is_late:
            reason = f"{start.name_of(running[0])} still runs" if running else "there is no room"
            await self.withdraw(start, reason)
        return []

    async def _reserve(
        self, start: StoredStart, waiting: Sequence[WaitingPod]
    ) -> list[PlacementChosen]:
        found = await reserve_claimed(
            self.ledger, start.wanted, waiting, gang=start.gang, now=self.clock.now()
        )
        reason = next((each for each in found.values() if isinstance(each, str)), "")
        if reason:
            await self.withdraw(start, reason)
        elif len(found) == len(start.wanted):  # else it is tried again until it is late
            await self.store.close_start(start)
        return placements_of(found)

    async def withdraw(
        self, start: StoredStart, reason: str, told: Container[PodUid] | None = None
    ) -> None:
        """Give up a planned start, and say so to its pods, or to some of them."""
        try:
            if not await self.store.close_start(start):
                return
        except UnavailableError:  # it may have been closed all the same
            self._record_withdrawal(start, reason, told)
            raise
        self._record_withdrawal(start, reason, told)
        self._plan_at = 0.0

    def _record_withdrawal(
        self, start: StoredStart, reason: str, told: Container[PodUid] | None
    ) -> None:
        text = f"no longer {start.text}; {reason}. It is planned anew"
        self._record(start, WITHDRAWN, text, told)

    def _record(
        self, start: StoredStart, reason: str, text: str, told: Container[PodUid] | None = None
    ) -> None:
        pods = [each for each in start.wanted if told is None or each.pod in told]
        for each in pods[:MOST_EVENTS]:
            event = event_of(each, reason, text, warning=reason == WITHDRAWN)
            self.events.record(event)
            self.conditions.explain(event)

    async def plan(self, waiting: Sequence[WaitingPod], state: PreemptionState) -> None:
        """Plan the starts of the first that wait, and again where they can be earlier."""
        now = self.clock.now()
        preempting = {each.preemption.id for each in state.open}
        left = [each for each in waiting if each.queued.pod not in preempting]
        waiting_for = frozenset(each.queued.pod for each in left)
        if waiting_for != self._planned_for:
            self._planned_for = waiting_for
            self._pause_s = PLAN_S
            soon = self._planned_at + max(PLAN_S, PAUSE_FACTOR * self._took_s)
            self._plan_at = min(self._plan_at, soon)
        if not (self.after_s and (left or self._outlooks.told)) or now < self._plan_at:
            return
        nodes = await self._nodes()
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
        self._outlooks.leases = frozenset(
            lease.pod for totals in nodes for lease in totals.leases if lease.pod not in ends
        )
        begun = False
        trials = StartTrials()
        first = [each for each in units[:MOST_TRIED] if ends or not self._outlooks.holds(each, now)]
        self._left = {unit.id for unit in first}
        for unit in first:
            if self.clock.now() - now > MOST_PASS_S:
                break
            self._left.discard(unit.id)
            if await self._plan_unit(unit, nodes, ends, now, trials):
                begun = True
                nodes = await self._nodes()
                trials = StartTrials()  # with its claims
        planned = {pod for start in state.starts for pod in start.pods}
        self._outlooks.review(units, {each.queued.pod for each in waiting} - planned, now)
        self._planned_at = self.clock.now()
        self._pause_s = PLAN_S if begun else min(2 * self._pause_s, MAX_PLAN_S)
        self._took_s = self._planned_at - now
        self._plan_at = self._planned_at + max(self._pause_s, PAUSE_FACTOR * self._took_s)

    async def _nodes(self) -> list[NodeTotals]:
        return [node async for page in self.ledger.totals.pages() for node in page]

    async def _plan_unit(
        self,
        unit: WaitingUnit,
        nodes: Sequence[NodeTotals],
        ends: Mapping[PodUid, LeaseEnd],
        now: float,
        trials: StartTrials,
    ) -> bool:
        starts = (await self.store.state(now=now, past_s=0)).starts
        known = next((each for each in starts if each.id == unit.id), None)
        before = known.at - EARLIER_S if known else inf
        if before < now or (known is not None and now < known.opened_at + AGAIN_S):
            return False
        lower = giving_way(unit, starts)
        staying = [each for each in starts if each not in (known, *lower)]
        if len(staying) >= self.most:
            return False
        given = with_claims(nodes, staying, [*lower, known] if known else lower)
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
        if not self._outlooks.is_claimed(unit, plan, ends, now) or plan is None:
            return False
        crossed = [
            (
                each,
                f"its namespace has more than {NAMESPACE_STARTS}, and others wait"
                if each.priority == unit.priority
                else f"a pod of priority {unit.priority} comes first",
            )
            for each in lower
            if plan.devices & each.devices
        ]
        if not plan.waits_for:
            for each, reason in crossed:
                await self.withdraw(each, reason)
            return False
        start = start_of(unit, plan, staying, ends, now)
        replaced = [each for each, _ in crossed] + ([known] if known else [])
        if not await self.store.open_start(start, *replaced):
            return False
        for each, reason in crossed:
            self._record_withdrawal(each, reason, None)
        self._record(start, PLANNED, start.text)
        return True


async def reserve_claimed(
    ledger: RedisLeases,
    wanted: Sequence[Reservation],
    waiting: Iterable[WaitingPod],
    *,
    gang: Gang | None = None,
    now: float,
) -> dict[PodUid, PlacementChosen | str]:
    """Reserve what is claimed for waiting pods, once it is free: for all of a gang, or for none.

    Returns their placements, or why a pod cannot run there: anti-affinity keeps it off its node by
    now. A pod of which something is not free yet is left out.
    """
    cluster = await ledger.snapshot()
    facts = {node.facts.name: node.facts for node in cluster.nodes}
    repelling = all_domains(facts.values())
    nodes = {each.pod: each.candidates[0].node for each in wanted}
    found: dict[PodUid, PlacementChosen | str] = {
        each.queued.pod: f"the anti-affinity of another pod keeps it off node {node}"
        for each in waiting
        if (node := nodes[each.queued.pod]) in facts
        and _is_repelled(each.queued, facts[node], repelling)
    }
    left = [replace(each, read_version=cluster.version) for each in wanted if each.pod not in found]
    if gang is None:
        outcomes = await ledger.reserve(left, now=now, ttl_s=RESERVATION_S)
    elif not found:
        outcomes = await ledger.reserve_gang(gang, left, now=now, ttl_s=RESERVATION_S)
    else:
        outcomes = []
    leases = [each.lease for each in outcomes if isinstance(each, Reserved | AlreadyLeased)]
    return found | {lease.pod: chosen(lease) for lease in leases}


def placements_of(found: Mapping[PodUid, PlacementChosen | str]) -> list[PlacementChosen]:
    """Return the placements among the results of `reserve_claimed`."""
    return [each for each in found.values() if isinstance(each, PlacementChosen)]


def chosen(lease: Lease) -> PlacementChosen:
    """Return the event of a pod that has a reservation, which is to be bound."""
    return PlacementChosen(lease=lease, trace=lease.trace)


def _is_repelled(pod: PodQueued, facts: NodeFacts, repelling: Sequence[Domain]) -> bool:
    """Return whether required anti-affinity came to the node after it was chosen for the pod."""
    needs = repelled_request(pod, repelling).node_requirements
    return check_anti_affinity(needs, facts) is not None

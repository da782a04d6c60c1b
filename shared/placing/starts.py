"""Planned starts: where a waiting pod or gang fits earliest; pure.

Leases are taken away in the order of their ends until the pods fit. Their devices are then claimed:
what is let onto these before has to end in time.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import NamedTuple

from shared.model.devices.device import without_claim
from shared.model.leases.lease import Lease, ends_by, expected_end
from shared.model.leases.ledger import LedgerNode, NodeTotals, WaitingPod, with_changes
from shared.model.leases.preemption import EndingLease, StoredStart
from shared.model.names import MAX_RUN_TIME, DeviceUuid, Namespace, NodeName, PodUid
from shared.model.quantity import timestamp
from shared.model.requests.placement import Placement
from shared.model.requests.request import Gang, PodRequest
from shared.placing.anti_affinity import all_domains, repelled_request
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import placement_key
from shared.placing.node_filters import free_resources, has_too_little
from shared.placing.room import without
from shared.placing.trial_cluster import TrialCluster

RESERVE_AFTER_S = 60.0
"""How long a pod without a gang waits before its start is planned."""
MOST_TRIED = 8
"""The first pods and gangs of the queue for which a start is looked for."""
SOON_S = 3600.0
"""Devices are claimed for so long, at most, for what is only expected to end by then."""
AGAIN_S = 60.0
"""A start is planned again after this time."""
EARLIER_S = 60.0
"""A start is planned again after so long, and changed if it can be so much earlier."""
LATE_S = 30.0
"""After the planned time: the devices are given up if they are not free by then."""
MOST_KINDS = 16
"""More different requests of a gang would take too long to plan."""
FIRST_ENDS = 4
"""Twice as many for each further try."""
MOST_NAMED = 3
NEVER = 1e12
"""Unix seconds after all known ends."""


class LeaseEnd(NamedTuple):
    at: float
    enforced: bool
    """It ends by then at the latest, not only as expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStart:
    at: float
    placements: tuple[Placement | None, ...]
    """None for a pod that the gang does not need."""
    waits_for: tuple[Lease, ...] = ()
    enforced: bool = True
    """All of them end by an enforced time."""

    def claims(self, now: float) -> bool:
        """Its devices are claimed if it is a promise, or soon."""
        return self.enforced or self.at <= now + SOON_S

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        return tuple(dict.fromkeys(placement.node for placement in self.placements if placement))

    @property
    def devices(self) -> frozenset[DeviceUuid]:
        return frozenset(
            share.device for placement in self.placements if placement for share in placement.shares
        )


def lease_end(lease: Lease, now: float, learned_s: float | None = None) -> LeaseEnd | None:
    """Return None if nothing is known.

    A lease that lasts longer than expected is expected to last as long again; one beyond its
    maximum run time, to end as late again, but soon.
    """
    if lease.claim is not None:
        return None
    latest = ends_by(lease)
    if latest is not None:
        is_over = latest <= now
        soon = now + min(now - latest, SOON_S)
        return LeaseEnd(soon if is_over else latest, bool(lease.activated_at) and not is_over)
    expected = expected_end(lease, learned_s)
    if expected is None:
        return None
    return LeaseEnd(expected if expected > now else 2 * now - lease.created_at, enforced=False)


def ending_lease(lease: Lease, end: LeaseEnd) -> EndingLease:
    return EndingLease(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        ends_at=end.at,
        enforced=end.enforced,
    )


def with_claims(
    nodes: Iterable[NodeTotals], staying: Iterable[StoredStart], lifted: Iterable[StoredStart]
) -> list[NodeTotals]:
    changes = defaultdict[NodeName, Counter[str]](Counter)
    free = set[DeviceUuid]()
    for start in staying:
        for wanted, held in zip(start.wanted, start.at_once, strict=True):
            change = changes[wanted.candidates[0].node]
            change.update(wanted.resources)
            change.subtract(held)
    for start in lifted:
        for wanted, held in zip(start.wanted, start.at_once, strict=True):
            (placement,) = wanted.candidates
            changes[placement.node].subtract(held)
            free |= {share.device for share in placement.shares}
    return [
        replace(totals, node=_with_changes(totals.node, changes[name], free))
        if (name := totals.node.facts.name) in changes
        else totals
        for totals in nodes
    ]


def _with_changes(
    node: LedgerNode, change: Mapping[str, int], free: Container[DeviceUuid]
) -> LedgerNode:
    unclaimed = {
        device.uuid: without_claim(use)
        for device, use in node.devices
        if device.uuid in free and use.claimed_until
    }
    return with_changes(node, change, unclaimed)


def plan_start(
    requests: Sequence[PodRequest],
    needed: int,
    nodes: Iterable[NodeTotals],
    end_of: Callable[[Lease], LeaseEnd | None],
    *,
    now: float,
    before: float = inf,
    trials: "StartTrials | None" = None,
) -> PlannedStart | None:
    """Return the earliest start of `needed` of the pods, tried in order, or None.

    Leases without an end, or with one after `before`, stay. The same `trials` save time.
    """
    totals = list(nodes)
    ends = [
        (end, lease)
        for node_totals in totals
        for lease in node_totals.leases
        if (end := end_of(lease)) is not None and end.at <= before
    ]
    ends.sort(key=lambda entry: (entry[0].at, entry[1].pod))
    search = _Search(requests, needed, totals, ends, trials or StartTrials())
    return search.earliest(now, is_bounded=before < inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingClaim:
    """A ResourceClaim without an allocation, for which a pod waits."""

    claim: PodUid
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingUnit:
    """A pod, or the pods of a gang of which none runs."""

    id: str
    pods: tuple[WaitingPod, ...]
    needed: int
    """How many of them start at once."""
    gang: Gang | None
    claim: WaitingClaim | None = None
    """kube-scheduler allocates it before the pod starts."""

    @property
    def priority(self) -> int:
        return max(pod.queued.request.priority for pod in self.pods)

    @property
    def namespace(self) -> Namespace:
        return self.pods[0].queued.namespace

    @property
    def since(self) -> float:
        """Unix seconds."""
        return min(pod.waiting_since for pod in self.pods)

    def requests(self, nodes: Iterable[NodeTotals]) -> list[PodRequest]:
        repelling = all_domains(totals.node.facts for totals in nodes)
        return [repelled_request(pod.queued, repelling) for pod in self.pods]


def waiting_units(
    waiting: Iterable[WaitingPod], nodes: Iterable[NodeTotals], *, now: float, after_s: float
) -> list[WaitingUnit]:
    """Return what may get a planned start, in the order of the first pod of each.

    A pod without a gang has to have waited for `after_s`. Plans know neither the domains of gangs
    with a topology nor required rules about other pods, so these get none.
    """
    running = {lease.gang for totals in nodes for lease in totals.leases if lease.gang}
    gangs = defaultdict[str, list[WaitingPod]](list)
    for waiting_pod in waiting:
        queued = waiting_pod.queued
        gang = waiting_pod.queued.request.gang
        if queued.by_kube_scheduler or waiting_pod.refusal.permanent or waiting_pod.refusal.quota:
            continue
        if queued.request.has_required_rules:
            continue
        if gang is not None and gang.decided_as_one:
            gangs[gang.name].append(waiting_pod)
        elif now - waiting_pod.waiting_since >= after_s and queued.request.containers:
            gangs[queued.pod].append(waiting_pod)
    units = list[WaitingUnit]()
    for id_, pods in gangs.items():
        named = [gang for pod in pods if (gang := pod.queued.request.gang) is not None]
        gang = max(named, key=attrgetter("min_member"), default=None)
        if gang is None or not gang.decided_as_one:
            units.append(WaitingUnit(id=id_, pods=tuple(pods), needed=1, gang=None))
            continue
        kinds = {placement_key(pod.queued.request) for pod in pods}
        has_gpus = any(pod.queued.request.containers for pod in pods)
        is_whole = len(pods) >= gang.min_member and id_ not in running
        if is_whole and has_gpus and not gang.has_topology and len(kinds) <= MOST_KINDS:
            pods.sort(key=lambda pod: pod.queued.request.size, reverse=True)
            units.append(WaitingUnit(id=id_, pods=tuple(pods), needed=gang.min_member, gang=gang))
    return units


def with_some_end(end_of: Callable[[Lease], LeaseEnd | None]) -> Callable[[Lease], LeaseEnd | None]:
    """The youngest lease without a known end ends first, after all others."""

    def some_end(lease: Lease) -> LeaseEnd | None:
        last = LeaseEnd(NEVER - lease.created_at, enforced=False)
        return None if lease.claim else end_of(lease) or last

    return some_end


def no_end_text(endless: Sequence[Lease], visible: Callable[[Namespace], bool]) -> str:
    seen = [f"{lease.namespace}/{lease.name}" for lease in endless if visible(lease.namespace)]
    named = seen[:MOST_NAMED]
    left = len(endless) - len(named)
    if named:
        more = f"{left} more"
    else:
        more = "a pod of another namespace" if left == 1 else f"{left} pods of other namespaces"
    who = " and ".join(filter(None, (", ".join(named), more if left else "")))
    text = f"no end in sight: no maximum run time ({MAX_RUN_TIME}) is set for {who}"
    return f"{text}, which would have to end first"


def start_without_plan(
    unit: WaitingUnit,
    nodes: Sequence[NodeTotals],
    end_of: Callable[[Lease], LeaseEnd | None],
    *,
    now: float,
    visible: Callable[[Namespace], bool],
) -> str:
    """Name leases without a known end first, or else say when others have ended."""
    some_end = with_some_end(end_of)
    plan = plan_start(unit.requests(nodes), unit.needed, nodes, some_end, now=now)
    if plan is None or not plan.waits_for:
        return ""
    if endless := [lease for lease in plan.waits_for if not end_of(lease)]:
        return no_end_text(endless, visible)
    at = timestamp(plan.at)
    return f"could start at {at} at the earliest, as others end; no start is planned yet"


class StartTrials:
    """Nodes have the same names; only changed ones are put again."""

    def __init__(self) -> None:
        self.cluster = TrialCluster()
        self._put: dict[NodeName, tuple[NodeTotals, set[PodUid]]] = {}

    def end(self, nodes: Iterable[NodeTotals], leases: Iterable[Lease]) -> None:
        ended = defaultdict[NodeName, set[PodUid]](set)
        for lease in leases:
            ended[lease.node].add(lease.pod)
        for totals in nodes:
            name = totals.node.facts.name
            last_totals, pods = self._put.get(name, (None, None))
            if last_totals is not totals or pods != ended[name]:
                self.cluster.put_node(without(totals, ended[name]).node)
                self._put[name] = totals, ended[name]


class _Search:
    """A cluster in which the first so many of the leases have ended."""

    def __init__(
        self,
        requests: Sequence[PodRequest],
        needed: int,
        nodes: Sequence[NodeTotals],
        ends: Sequence[tuple[LeaseEnd, Lease]],
        trials: StartTrials,
    ) -> None:
        self._requests = requests
        self._needed = needed
        self._ends = ends
        self._trials = trials
        self._nodes = {totals.node.facts.name: totals for totals in nodes}

    def earliest(self, now: float, *, is_bounded: bool) -> PlannedStart | None:
        low = 0
        high = 0
        every = len(self._ends)
        if is_bounded and not self._placed_after(every):
            return None
        while not (placements := self._placed_after(high)):
            if high == every:
                return None
            low, high = high + 1, min(max(FIRST_ENDS, 2 * high), every)
        while low < high:
            middle = (low + high) // 2
            if earlier := self._placed_after(middle):
                placements = earlier
                high = middle
            else:
                low = middle + 1
        waits = self._waits(high, placements)
        return PlannedStart(
            at=max((end.at for end, _ in waits), default=now),
            placements=placements,
            waits_for=tuple(lease for _, lease in waits),
            enforced=all(end.enforced for end, _ in waits),
        )

    def _waits(
        self, ended: int, placements: Sequence[Placement | None]
    ) -> list[tuple[LeaseEnd, Lease]]:
        used = {
            (placement.node, share.device)
            for placement in placements
            if placement
            for share in placement.shares
        }
        short = self._short_nodes(placements)
        return [
            (end, lease)
            for end, lease in self._ends[:ended]
            if lease.node in short or any((lease.node, s.device) in used for s in lease.shares)
        ]

    def _short_nodes(self, placements: Sequence[Placement | None]) -> set[NodeName]:
        needs = defaultdict[NodeName, Counter[str]](Counter)
        for request, placement in zip(self._requests, placements, strict=True):
            if placement is not None:
                needs[placement.node].update(request.resources)
        nodes = {name: self._nodes[name].node for name in needs}
        return {
            name
            for name, node in nodes.items()
            if has_too_little(free_resources(node.facts, node.used), needs[name])
        }

    def _placed_after(self, ended: int) -> tuple[Placement | None, ...]:
        """Return () if they do not fit."""
        self._trials.end(self._nodes.values(), (lease for _, lease in self._ends[:ended]))
        placements = dict[int, Placement]()
        refused: PodRequest | None = None
        for number, request in enumerate(self._requests):
            if len(placements) == self._needed:
                break
            if request == refused:
                continue
            result = self._trials.cluster.place(PodUid(str(number)), request)
            if isinstance(result, NoFit):
                refused = request
            else:
                placements[number] = result
        for number in placements:
            self._trials.cluster.remove(PodUid(str(number)))
        if len(placements) < self._needed:
            return ()
        return tuple(map(placements.get, range(len(self._requests))))

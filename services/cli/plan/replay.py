"""A trace of pods placed on idle nodes by one policy: what is idle, and who waits how long; pure.

A pod that does not fit waits until another ends; those that came first are tried first, and later
ones that fit pass them. A gang starts as one. Pods run as long as in the trace, whenever they
start.

With terms, the first that wait get planned starts: their devices are claimed, and only what ends
before the start is let onto these.
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import heappop, heappush
from itertools import islice, pairwise
from math import exp, inf, log
from typing import NamedTuple

from msgspec import structs

from services.cli.plan.trace import TracePod, parts_of, with_order
from shared.model.device import DeviceUse
from shared.model.lease import Lease
from shared.model.ledger import LedgerNode, NodeTotals, counted_use
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.placement import Placement, Refusal
from shared.model.request import NodeOrder, PodRequest
from shared.placing.index.node_index import placement_key
from shared.placing.starts import LeaseEnd, PlannedStart, plan_start
from shared.placing.trial_cluster import TrialCluster

RESERVE_AFTER_S = 60.0
"""How long a pod without a gang waits before its start is planned."""
AGAIN_S = 60.0
"""A start is planned again after so long, and changed if it can be so much earlier."""
MOST_STARTS = 8
"""Starts that are planned at once."""
CLAIMED = DeviceUse(exclusive=True, claimed_by=True)


class Terms(StrEnum):
    """What is known of how long pods run."""

    NONE = "none"
    """Nothing: no start is planned."""
    EXACT = "exact"
    """Each has a maximum, and runs as long."""
    DOUBLE = "double"
    """Each has a maximum of twice the time that it runs."""
    LEARNED = "learned"
    """What is expected of equal pods that ended before; nothing is enforced."""


class Moment(NamedTuple):
    """The cluster from one moment on."""

    at_s: float
    allocated: int
    """Thousandths of GPUs."""
    waiting: int
    """Pods."""
    waiting_with_gpus: int


class Means(NamedTuple):
    """Means over a time."""

    idle_gpus: float
    idle_while_waiting: float
    """GPUs that are idle while a pod with GPUs waits; otherwise they count as 0."""
    waiting: float
    """Pods."""


class Promise(NamedTuple):
    """A start that was planned, and what came of it."""

    enforced: bool
    late_s: float
    """How long after the planned time the pod started; negative: before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a policy made of a trace."""

    policy: NodeOrder
    terms: Terms
    gpus: int
    arrivals_s: tuple[float, float]
    """When the first and the last pod arrived."""
    moments: Sequence[Moment]
    waits_s: Sequence[float]
    """Of each pod with GPUs that started and is in no gang; 0: it started at once."""
    gang_waits_s: Sequence[float]
    """Of each gang that started."""
    promises: Sequence[Promise]
    never: int
    """Pods with GPUs that had not started when all others had ended."""
    impossible: int
    """Pods that fit no node even if it is idle; they do not count as waiting."""

    def means(self, begin_s: float, end_s: float) -> Means:
        """Return the means from one moment to a later one."""
        idle = idle_while_waiting = waiting = 0.0
        last = self.moments[-1]._replace(at_s=end_s)
        for moment, following in pairwise((*self.moments, last)):
            passed = min(following.at_s, end_s) - max(moment.at_s, begin_s)
            if passed > 0:
                idle_gpu_s = passed * (self.gpus - moment.allocated / 1000)
                idle += idle_gpu_s
                idle_while_waiting += idle_gpu_s * bool(moment.waiting_with_gpus)
                waiting += passed * moment.waiting
        total = end_s - begin_s
        return Means(idle / total, idle_while_waiting / total, waiting / total)


def replay(
    pods: Sequence[TracePod],
    nodes: Sequence[LedgerNode],
    policy: NodeOrder,
    terms: Terms = Terms.NONE,
) -> Replay:
    """Replay pods, given in order of arrival, on idle nodes."""
    ordered = [replace(pod, request=with_order(pod.request, policy)) for pod in pods]
    run = _Run(nodes, ordered, terms)
    for number, pod in enumerate(run.pods):
        run.advance(pod.created_s)
        run.arrive(number)
    run.advance(inf)
    return Replay(
        policy=policy,
        terms=terms,
        gpus=sum(len(node.devices) for node in nodes),
        arrivals_s=(pods[0].created_s, pods[-1].created_s),
        moments=run.moments,
        waits_s=run.waits_s,
        gang_waits_s=run.gang_waits_s,
        promises=run.promises,
        never=run.moments[-1].waiting_with_gpus,
        impossible=run.impossible,
    )


@dataclass(slots=True)
class _Learned:
    """The mean of the logarithm of how long equal pods ran."""

    count: int = 0
    mean: float = 0.0

    def add(self, runs_s: float) -> None:
        self.count += 1
        self.mean += (log(max(runs_s, 1.0)) - self.mean) / min(self.count, 20)


@dataclass(slots=True)
class _Running:
    started_s: float
    leases: list[Lease]


class _Run:
    """The cluster at one moment of a replay."""

    def __init__(self, nodes: Sequence[LedgerNode], pods: Sequence[TracePod], terms: Terms) -> None:
        self.pods = pods
        self.moments = [Moment(pods[0].created_s, 0, 0, 0)]
        self.waits_s: list[float] = []
        self.gang_waits_s: list[float] = []
        self.promises: list[Promise] = []
        self.impossible = 0
        self._terms = terms
        self._nodes = {node.facts.name: node for node in nodes}
        self._cluster = TrialCluster(nodes)
        self._unclaimed = TrialCluster(nodes)
        """The same, if nothing was claimed: tried first, as it need not be changed for that."""
        self._ends: list[tuple[float, int]] = []
        """When running pods end, with their numbers, as a heap; -1: starts may be planned."""
        self._waiting: dict[Hashable, deque[int]] = {}
        """Numbers of pods that wait, by what is equal for those that fit the same places."""
        self._running: dict[int, _Running] = {}
        self._starts: dict[int, PlannedStart] = {}
        self._promised: dict[int, PlannedStart] = {}
        """The first plan of each."""
        self._learned: dict[Hashable, _Learned] = {}
        self._leases: dict[NodeName, dict[PodUid, Lease]] = {name: {} for name in self._nodes}
        self._changed, self._known = set(self._nodes), dict[NodeName, NodeTotals]()
        self._starts_on: dict[NodeName, list[int]] = {}
        self._planned_s: dict[int, float] = {}

    def arrive(self, number: int) -> None:
        """Start a pod that arrives now, or let it wait."""
        pod = self.pods[number]
        now = pod.created_s
        self._cluster.learn(pod.request)
        key = _key(pod)
        refusal = None if key in self._waiting else self._start(number, now)
        if refusal is not None and refusal.permanent:
            self.impossible += pod.members
        elif refusal is not None or key in self._waiting:
            self._waiting.setdefault(key, deque()).append(number)
            self._note(now, pod, waiting=pod.members)
            if self._terms is not Terms.NONE and pod.request.containers:
                heappush(self._ends, (now + RESERVE_AFTER_S * (pod.members == 1), -1))

    def advance(self, until_s: float) -> None:
        """End the pods whose time has come, and start those that wait for their place."""
        while self._ends and self._ends[0][0] <= until_s:
            now, has_ended = self._ends[0][0], False
            while self._ends and self._ends[0][0] == now:
                number = heappop(self._ends)[1]
                if number >= 0:
                    self._end(number, now)
                    has_ended = True
            if has_ended:
                self._start_planned(now)
                self._start_waiting(now)
            self._plan(now)

    def _end(self, number: int, now: float) -> None:
        pod, running = self.pods[number], self._running.pop(number)
        for lease in running.leases:
            self._cluster.remove(lease.pod)
            self._unclaimed.remove(lease.pod)
            del self._leases[lease.node][lease.pod]
            self._changed.add(lease.node)
        for start in self._starts.values():
            for lease in start.waits_for:
                if int(lease.namespace) == number:
                    self._put_claims(lease.node)
        self._learned.setdefault(_key(pod), _Learned()).add(now - running.started_s)
        self._note(now, pod, running=-1)

    def _start_waiting(self, now: float) -> None:
        heads = [(numbers[0], key) for key, numbers in self._waiting.items()]
        for number, key in sorted(heads, key=lambda head: head[0]):
            following: int | None = number
            while following is not None and self._start(following, now) is None:
                following = self._leave(following, key, now)

    def _leave(self, number: int, key: Hashable, now: float) -> int | None:
        """Take a pod that has started from those that wait; return the next of its kind."""
        numbers = self._waiting[key]
        numbers.remove(number)
        self._note(now, self.pods[number], waiting=-self.pods[number].members)
        if numbers:
            return numbers[0]
        del self._waiting[key]
        return None

    def _start(self, number: int, now: float) -> Refusal | None:
        """Start a pod, or all pods of a gang."""
        pod, placed = self.pods[number], list[tuple[PodUid, Placement]]()
        ends_by = self._ends_by(number, now)
        for member in range(pod.members):
            uid = PodUid(f"{number}.{member}")
            found = self._cluster.place(uid, pod.request)
            if isinstance(found, Refusal) and not found.permanent:
                found = self._place_before(uid, pod.request, ends_by) or found
            if isinstance(found, Refusal):
                for each, _ in placed:
                    self._cluster.remove(each)
                return found
            placed.append((uid, found))
        self._count_started(number, now, placed)
        return None

    def _count_started(
        self, number: int, now: float, placed: Sequence[tuple[PodUid, Placement]]
    ) -> None:
        pod = self.pods[number]
        if pod.request.containers:
            waits = self.waits_s if pod.members == 1 else self.gang_waits_s
            waits.append(now - pod.created_s)
        if pod.runs_s is not None:
            heappush(self._ends, (now + pod.runs_s, number))
        leases = [
            Lease(
                pod=uid,
                namespace=Namespace(str(number)),
                name=uid,
                node=placement.node,
                shares=placement.shares,
                resources=pod.request.resources,
                created_at=now,
            )
            for uid, placement in placed
        ]
        self._running[number] = _Running(now, leases)
        for uid, placement in placed:
            self._unclaimed.reserve(uid, pod.request, placement)
        for lease in leases:
            self._leases[lease.node][lease.pod] = lease
            self._changed.add(lease.node)
        self._note(now, pod, running=1)
        self._drop_start(number)
        promised = self._promised.pop(number, None)
        if promised is not None:
            self.promises.append(Promise(promised.enforced, now - promised.at))

    # Planned starts

    def _ends_by(self, number: int, started_s: float) -> LeaseEnd | None:
        """Return when a pod ends that starts, or has started, then, as far as is known."""
        pod = self.pods[number]
        if self._terms is Terms.LEARNED:
            known = self._learned.get(_key(pod))
            return LeaseEnd(started_s + exp(known.mean), enforced=False) if known else None
        if self._terms is Terms.NONE or pod.runs_s is None:
            return None
        factor = 2 if self._terms is Terms.DOUBLE else 1
        return LeaseEnd(started_s + factor * pod.runs_s, enforced=True)

    def _place_before(
        self, uid: PodUid, request: PodRequest, ends_by: LeaseEnd | None
    ) -> Placement | None:
        """Place a pod on devices that are claimed for starts after its end."""
        if ends_by is None:
            return None
        nodes = {
            name: None
            for start in self._starts.values()
            if ends_by.at <= start.at and (ends_by.enforced or not start.enforced)
            for name in start.nodes
        }
        for name in nodes:
            if self._unclaimed.shares_on(name, request) is None:
                continue
            self._put_claims(name, until=ends_by)
            shares = self._cluster.shares_on(name, request)
            placement = Placement(node=name, shares=shares) if shares is not None else None
            if placement:
                self._cluster.reserve(uid, request, placement)
            self._put_claims(name)
            if placement:
                return placement
        return None

    def _put_claims(
        self, name: NodeName, until: LeaseEnd | None = None, without: int | None = None
    ) -> None:
        """Claim devices of a node in the cluster, but not for starts after `until`, or of a pod."""
        node = self._nodes[name]
        claimed, held = self._claims(name, until, without)
        devices = tuple(
            (device, CLAIMED if device.uuid in claimed else use) for device, use in node.devices
        )
        facts = replace(node.facts, used_by_others=held)
        self._cluster.put_node(replace(node, facts=facts, devices=devices))
        self._changed.add(name)

    def _claims(
        self, name: NodeName, until: LeaseEnd | None = None, without: int | None = None
    ) -> tuple[set[DeviceUuid], dict[str, int]]:
        """Return what is claimed of a node: devices, and what the starts need beside what ends."""
        claimed, waits_for = set[DeviceUuid](), dict[PodUid, Lease]()
        held: dict[str, int] = {}
        for number in self._starts_on.get(name, ()):
            start = self._starts[number]
            if number == without:
                continue
            if not (until and until.at <= start.at and (until.enforced or not start.enforced)):
                claimed |= start.devices
            times = sum(each is not None and each.node == name for each in start.placements)
            _add(held, self.pods[number].request.resources, times)
            waits_for |= {lease.pod: lease for lease in start.waits_for if lease.node == name}
        for pod, lease in waits_for.items():
            if pod in self._leases[name]:
                _add(held, lease.resources, -1)
        used = self._nodes[name].facts.used_by_others
        return claimed, {**used, **{key: used.get(key, 0) + n for key, n in held.items() if n > 0}}

    def _drop_start(self, number: int) -> None:
        start = self._starts.pop(number, None)
        for name in start.nodes if start else ():
            self._starts_on[name].remove(number)
            self._put_claims(name)

    def _start_planned(self, now: float) -> None:
        """Start what was planned, once its leases have ended."""
        live = {lease.pod for running in self._running.values() for lease in running.leases}
        for number, start in list(self._starts.items()):
            if any(lease.pod in live for lease in start.waits_for):
                continue
            pod, placed = self.pods[number], list[tuple[PodUid, Placement]]()
            for name in start.nodes:
                self._put_claims(name, without=number)
            for member, planned in enumerate(start.placements):
                uid = PodUid(f"{number}.{member}")
                shares = planned and self._cluster.shares_on(planned.node, pod.request)
                if not (planned and shares):
                    break
                placement = Placement(node=planned.node, shares=shares)
                self._cluster.reserve(uid, pod.request, placement)
                placed.append((uid, placement))
            if len(placed) == pod.members:
                self._count_started(number, now, placed)
                self._leave(number, _key(pod), now)
            else:
                for uid, _ in placed:
                    self._cluster.remove(uid)
                for name in start.nodes:
                    self._put_claims(name)

    def _plan(self, now: float) -> None:
        """Plan starts of the first that wait, and again where they can be earlier."""
        if self._terms is Terms.NONE:
            return
        waiting = sorted(number for numbers in self._waiting.values() for number in numbers)
        heads = (
            number
            for number in waiting
            if self.pods[number].request.containers
            and (self.pods[number].members > 1 or self._waited(number, now) >= RESERVE_AFTER_S)
        )
        for number in islice(heads, MOST_STARTS):
            if now >= self._planned_s.get(number, -inf) + AGAIN_S:
                self._planned_s[number] = now
                self._plan_one(number, now)

    def _waited(self, number: int, now: float) -> float:
        return now - self.pods[number].created_s

    def _plan_one(self, number: int, now: float) -> None:
        pod, known = self.pods[number], self._starts.get(number)
        plan = plan_start(
            [pod.request] * pod.members,
            pod.members,
            self._totals(without=number),
            lambda lease: self._end_of(lease, now),
            now=now,
        )
        if plan is None or (known is not None and plan.at > known.at - AGAIN_S):
            return
        self._drop_start(number)
        self._starts[number] = plan
        self._promised.setdefault(number, plan)
        for name in plan.nodes:
            self._starts_on.setdefault(name, []).append(number)
        for name in plan.nodes:
            self._put_claims(name)

    def _end_of(self, lease: Lease, now: float) -> LeaseEnd | None:
        end = self._ends_by(int(lease.namespace), lease.created_at)
        if end is not None and end.at <= now:
            # It has run for longer than expected: as long again is what is expected then.
            return LeaseEnd(now + (now - lease.created_at), enforced=False)
        return end

    def _totals(self, without: int) -> list[NodeTotals]:
        """Return nodes, leases and claims, `without` those of a pod's own start."""
        for name in self._changed:
            self._known[name] = self._totals_of(name)
        self._changed.clear()
        own = self._starts.get(without)
        others = {name: self._totals_of(name, without) for name in own.nodes} if own else {}
        return [others.get(name, totals) for name, totals in self._known.items()]

    def _totals_of(self, name: NodeName, without: int | None = None) -> NodeTotals:
        node, leases = self._nodes[name], tuple(self._leases[name].values())
        uses, used = counted_use(leases)
        starts = [each for each in self._starts_on.get(name, ()) if each != without]
        claimed = {uuid for number in starts for uuid in self._starts[number].devices}
        held = dict(node.facts.used_by_others)
        for number in starts:
            times = sum(
                each is not None and each.node == name for each in self._starts[number].placements
            )
            _add(held, self.pods[number].request.resources, times)
        devices = tuple(
            (device, _with_claim(uses.get(device.uuid, use), device.uuid in claimed))
            for device, use in node.devices
        )
        facts = replace(node.facts, used_by_others=held)
        node = replace(node, facts=facts, devices=devices, used=used.get(name, {}))
        return NodeTotals(node=node, leases=leases)

    def _note(self, now: float, pod: TracePod, *, running: int = 0, waiting: int = 0) -> None:
        last, with_gpus = self.moments[-1], bool(pod.request.containers)
        self.moments.append(
            Moment(
                now,
                last.allocated + running * pod.members * parts_of(pod.request),
                last.waiting + waiting,
                last.waiting_with_gpus + waiting * with_gpus,
            )
        )


def _add(sums: dict[str, int], amounts: Mapping[str, int], times: int) -> None:
    for name, amount in amounts.items():
        sums[name] = sums.get(name, 0) + times * amount


def _with_claim(use: DeviceUse, claimed: bool) -> DeviceUse:
    return structs.replace(use, exclusive=True, claimed_by=True) if claimed else use


def _key(pod: TracePod) -> Hashable:
    return placement_key(pod.request), pod.members

"""How long a trace's pods wait, by policy, and how many GPUs are idle meanwhile.

    python -m tests.benchmarks.replay PODS.csv --nodes NODES.csv [--policies binpack] [--gangs]
        [--terms none exact double learned] [--planned-starts 8] [--load 1.2]

Method: the pods arrive as in the trace, on nodes that are idle at first; the placer's own code
decides. Quotas and budgets do not count. A pod that does not fit waits until another ends; those
that came first are tried first, and later ones that fit pass them. A gang starts as one. Pods run
as long as in the trace, whenever they start.

With terms, the first that wait get planned starts: their devices are claimed, and only what ends
before the start is let onto these. None is planned that is neither a promise nor soon.

PODS.csv has the columns of Alibaba's trace of 2023 or 2025; others are ignored:
  creation_time, deletion_time   seconds; empty: there from second 0, or without an end
  scheduled_time                 optional; a pod runs from then, or its creation, until its end
  2023: cpu_milli, memory_mib    thousandths of a cpu, MiB
        num_gpu, gpu_milli       number of GPUs, thousandths of each
        gpu_spec                 optional; models as in the labels of nodes, separated by |
  2025: cpu_request, memory_request, gpu_request   cpus, GiB, whole GPUs
        app_name, max_instance_per_node   pods of the app with that limit per node; -1: any
NODES.csv has the columns sn (the name), cpu_milli, memory_mib, gpu (how many) and model.
"""

import argparse
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import heappop, heappush
from itertools import islice, pairwise
from math import inf
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from shared.model.devices.device import with_claim
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import LedgerNode, NodeTotals, counted_use
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.request import NodeOrder
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import placement_key
from shared.placing.run_times import RunTimes
from shared.placing.starts import (
    AGAIN_S,
    EARLIER_S,
    LATE_S,
    MOST_TRIED,
    RESERVE_AFTER_S,
    LeaseEnd,
    PlannedStart,
    StartTrials,
    plan_start,
)
from shared.placing.trial_cluster import TrialCluster
from tests.benchmarks.trace import (
    TracePod,
    parts_of,
    read_nodes,
    read_pods,
    with_density,
    with_gangs,
    with_order,
)


class Terms(StrEnum):
    """What is known of how long pods run."""

    NONE = "none"
    """Nothing: no start is planned."""
    EXACT = "exact"
    """Each has a maximum, and runs as long."""
    DOUBLE = "double"
    """Each has a maximum of twice the time that it runs."""
    LEARNED = "learned"
    """What the run times of equal pods that ended before let expect; nothing is enforced."""


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
        idle = 0.0
        idle_while_waiting = 0.0
        waiting = 0.0
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
    *,
    planned_starts: int = 1,
) -> Replay:
    """Replay pods, given in order of arrival, on idle nodes; so many starts are planned at once."""
    ordered = [replace(pod, request=with_order(pod.request, policy)) for pod in pods]
    run = _Run(nodes, ordered, terms, planned_starts)
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


class _Run:
    """The cluster at one moment of a replay."""

    def __init__(
        self,
        nodes: Sequence[LedgerNode],
        pods: Sequence[TracePod],
        terms: Terms,
        planned_starts: int,
    ) -> None:
        self.pods = pods
        self._most = planned_starts
        self.moments = [Moment(pods[0].created_s, 0, 0, 0)]
        self.waits_s: list[float] = []
        self.gang_waits_s: list[float] = []
        self.promises: list[Promise] = []
        self.impossible = 0
        self._terms = terms
        self._nodes = {node.facts.name: node for node in nodes}
        self._cluster = TrialCluster(nodes)
        self._ends: list[tuple[float, int]] = []
        """When running pods end, with their numbers, as a heap; -1: starts may be planned."""
        self._waiting: dict[Hashable, deque[int]] = {}
        """Numbers of pods that wait, by what is equal for those that fit the same places."""
        self._running: dict[int, list[Lease]] = {}
        self._leases: dict[NodeName, dict[PodUid, Lease]] = {name: {} for name in self._nodes}
        self._known: dict[NodeName, NodeTotals] = {}
        """Nodes that have not changed since."""
        self._run_times = RunTimes()
        self._kinds: dict[Hashable, Lease] = {}
        """By what is equal, a lease whose name stands for all such pods."""
        self._starts: dict[int, PlannedStart] = {}
        self._promised: dict[int, PlannedStart] = {}
        """The first plan of each."""
        self._starts_on: dict[NodeName, list[int]] = {}
        self._planned_s: dict[int, float] = {}
        self._trials = StartTrials()

    def arrive(self, number: int) -> None:
        """Start a pod that arrives now, or let it wait."""
        pod = self.pods[number]
        now = pod.created_s
        self._cluster.learn(pod.request)
        key = _key(pod)
        if key not in self._waiting and self._start(number, now):
            return
        if not self._cluster.may_fit(pod.request):
            self.impossible += pod.members
        else:
            self._waiting.setdefault(key, deque()).append(number)
            self._note(now, pod, waiting=pod.members)
            if self._terms is not Terms.NONE and pod.request.containers:
                heappush(self._ends, (now + RESERVE_AFTER_S * (pod.members == 1), -1))

    def advance(self, until_s: float) -> None:
        """End the pods whose time has come, and start those that wait for their place."""
        while self._ends and self._ends[0][0] <= until_s:
            now = self._ends[0][0]
            has_ended = False
            while self._ends and self._ends[0][0] == now:
                number = heappop(self._ends)[1]
                if number >= 0:
                    self._end(number, now)
                    has_ended = True
            if has_ended:
                self._start_planned(now)
                self._start_waiting(now)
            if self._plan(now):
                self._start_waiting(now)

    def _end(self, number: int, now: float) -> None:
        pod = self.pods[number]
        leases = self._running.pop(number)
        for lease in leases:
            self._cluster.remove(lease.pod)
            del self._leases[lease.node][lease.pod]
            self._known.pop(lease.node, None)
        for name in {lease.node for lease in leases if self._starts_on.get(lease.node)}:
            self._put_claims(name)
        self._run_times.learn([(self._kind(pod), now - leases[0].created_at)])
        self._note(now, pod, running=-1)

    def _start_waiting(self, now: float) -> None:
        heads = [(numbers[0], key) for key, numbers in self._waiting.items()]
        for number, key in sorted(heads, key=lambda head: head[0]):
            following: int | None = number
            while following is not None and self._start(following, now):
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

    def _start(self, number: int, now: float, plan: PlannedStart | None = None) -> bool:
        """Start a pod, or all pods of a gang, where there is room, or as planned; or none."""
        pod = self.pods[number]
        leases = list[Lease]()
        end = self._end_of(number, now)
        for member in range(pod.members):
            uid = PodUid(f"{number}.{member}")
            planned = plan.placements[member] if plan else None
            if planned is None:
                decision = self._cluster.place(
                    uid, pod.request, end.at if end and end.enforced else None
                )
                placement = None if isinstance(decision, NoFit) else decision
            else:
                placement = self._cluster.place_on(planned.node, uid, pod.request)
            if placement is None:
                for lease in leases:
                    self._cluster.remove(lease.pod)
                return False
            leases.append(
                Lease(
                    pod=uid,
                    namespace=Namespace(str(number)),
                    name=uid,
                    node=placement.node,
                    shares=placement.shares,
                    resources=pod.request.resources | placement.numa_cpus,
                    created_at=now,
                )
            )
        self._count_started(number, now, leases)
        return True

    def _count_started(self, number: int, now: float, leases: list[Lease]) -> None:
        pod = self.pods[number]
        if pod.request.containers:
            waits = self.waits_s if pod.members == 1 else self.gang_waits_s
            waits.append(now - pod.created_s)
        if pod.runs_s is not None:
            heappush(self._ends, (now + pod.runs_s, number))
        self._running[number] = leases
        for lease in leases:
            self._leases[lease.node][lease.pod] = lease
            self._known.pop(lease.node, None)
        self._note(now, pod, running=1)
        self._drop_start(number)
        promised = self._promised.pop(number, None)
        if promised is not None:
            self.promises.append(Promise(promised.enforced, now - promised.at))

    # Planned starts

    def _end_of(self, number: int, started_s: float) -> LeaseEnd | None:
        """Return when a pod ends that starts, or has started, then, as far as is known."""
        pod = self.pods[number]
        if self._terms is Terms.LEARNED:
            learned_s = self._run_times.expected_s(self._kind(pod))
            return LeaseEnd(started_s + learned_s, enforced=False) if learned_s else None
        if self._terms is Terms.NONE or pod.runs_s is None:
            return None
        factor = 2 if self._terms is Terms.DOUBLE else 1
        return LeaseEnd(started_s + factor * pod.runs_s, enforced=True)

    def _end_of_lease(self, lease: Lease, now: float) -> LeaseEnd | None:
        end = self._end_of(int(lease.namespace), lease.created_at)
        if end is not None and end.at <= now:
            # It has run for longer than expected: as long again is what is expected then.
            return LeaseEnd(2 * now - lease.created_at, enforced=False)
        return end

    def _kind(self, pod: TracePod) -> Lease:
        key = _key(pod)
        if key not in self._kinds:
            self._kinds[key] = Lease(
                pod=PodUid(""),
                namespace=Namespace(str(len(self._kinds))),
                name="",
                node=NodeName(""),
                shares=(),
            )
        return self._kinds[key]

    def _start_planned(self, now: float) -> None:
        """Start what was planned, once its leases have ended."""
        for number, start in list(self._starts.items()):
            if any(lease.pod in self._leases[lease.node] for lease in start.waits_for):
                continue
            for name in start.nodes:
                self._put_claims(name, without=number)
            if self._start(number, now, start):
                self._leave(number, _key(self.pods[number]), now)
            else:
                for name in start.nodes:
                    self._put_claims(name)

    def _put_claims(self, name: NodeName, without: int | None = None) -> None:
        """Claim in the cluster what starts need of a node, but not that of one pod."""
        self._known.pop(name, None)
        self._cluster.put_node(self._node(name, (), without))

    def _drop_start(self, number: int) -> None:
        start = self._starts.pop(number, None)
        for name in start.nodes if start else ():
            self._starts_on[name].remove(number)
            self._put_claims(name)

    def _plan(self, now: float) -> bool:
        """Plan starts of the first that wait, and again where they can be earlier.

        Returns whether one that waits may start now.
        """
        if self._terms is Terms.NONE:
            return False
        waiting = sorted(number for numbers in self._waiting.values() for number in numbers)
        heads = (number for number in waiting if self._may_be_planned(self.pods[number], now))
        late = [number for number, start in self._starts.items() if now > start.at + LATE_S]
        for number in late:
            self._drop_start(number)
            del self._planned_s[number]
        frees = bool(late)
        for number in islice(heads, MOST_TRIED):
            if number not in self._starts and len(self._starts) >= self._most:
                continue
            if now >= self._planned_s.get(number, -inf) + AGAIN_S:
                self._planned_s[number] = now
                frees |= self._plan_one(number, now)
        return frees

    def _may_be_planned(self, pod: TracePod, now: float) -> bool:
        has_waited = pod.members > 1 or now - pod.created_s >= RESERVE_AFTER_S
        return has_waited and bool(pod.request.containers)

    def _plan_one(self, number: int, now: float) -> bool:
        pod = self.pods[number]
        start = self._starts.get(number)
        before = start.at - EARLIER_S if start else inf
        if before < now:
            return False
        plan = plan_start(
            [pod.request] * pod.members,
            pod.members,
            self._totals(number),
            lambda lease: self._end_of_lease(lease, now),
            now=now,
            before=before,
            trials=self._trials,
        )
        if plan is None or not plan.waits_for:
            return plan is not None
        if not plan.claims(now):
            return False
        self._drop_start(number)
        self._starts[number] = plan
        self._promised.setdefault(number, plan)
        for name in plan.nodes:
            self._starts_on.setdefault(name, []).append(number)
            self._put_claims(name)
        return start is not None

    def _totals(self, number: int) -> list[NodeTotals]:
        """Return nodes with leases and claims, but not the claims of a pod's own start."""
        own = self._starts[number].nodes if number in self._starts else ()
        for name in self._nodes:
            if name not in self._known:
                self._known[name] = self._totals_of(name)
        return [
            self._totals_of(name, number) if name in own else totals
            for name, totals in self._known.items()
        ]

    def _totals_of(self, name: NodeName, without: int | None = None) -> NodeTotals:
        leases = tuple(self._leases[name].values())
        return NodeTotals(node=self._node(name, leases, without), leases=leases)

    def _node(
        self, name: NodeName, leases: Sequence[Lease], without: int | None = None
    ) -> LedgerNode:
        """Return a node with these leases and what starts need, but not that of one pod.

        Without leases, less what those free that end first.
        """
        node = self._nodes[name]
        claimed = dict[DeviceUuid, float]()
        ending = dict[PodUid, Lease]()
        held = Counter[str]()
        for number in self._starts_on.get(name, ()):
            start = self._starts[number]
            if number == without:
                continue
            claimed |= dict.fromkeys(start.devices, start.at)
            for placement in start.placements:
                if placement and placement.node == name:
                    held.update(self.pods[number].request.resources)
            ending |= {lease.pod: lease for lease in start.waits_for if lease.node == name}
        if not leases:
            for pod in ending.keys() & self._leases[name].keys():
                held.subtract(ending[pod].resources)
        uses, used = counted_use(leases)
        devices = tuple(
            (device, with_claim(uses.get(device.uuid, use), claimed.get(device.uuid, 0)))
            for device, use in node.devices
        )
        facts = replace(node.facts, used_by_others=+held) if held else node.facts
        return replace(node, facts=facts, devices=devices, used=used.get(name, {}))

    def _note(self, now: float, pod: TracePod, *, running: int = 0, waiting: int = 0) -> None:
        last = self.moments[-1]
        with_gpus = bool(pod.request.containers)
        self.moments.append(
            Moment(
                now,
                last.allocated + running * pod.members * parts_of(pod.request),
                last.waiting + waiting,
                last.waiting_with_gpus + waiting * with_gpus,
            )
        )


def _key(pod: TracePod) -> Hashable:
    return placement_key(pod.request), pod.members


HEADINGS = (
    "policy", "terms", "idle", "while waiting", "started", "waited", "mean s", "p50 s", "p99 s",
    "max s", "gangs", "gang p95 s", "kept", "error p50 s", "never", "impossible",
)  # fmt: skip


def figures(result):
    """Return the figures of a replay, as many as there are headings."""
    means = result.means(*result.arrivals_s)
    waits = sorted(result.waits_s)
    gang_waits = sorted(result.gang_waits_s)
    promises = [promise for promise in result.promises if promise.enforced]
    errors = sorted(abs(promise.late_s) for promise in result.promises)
    return (
        result.policy.value,
        result.terms.value,
        f"{means.idle_gpus:.2f}",
        f"{means.idle_while_waiting:.2f}",
        len(waits),
        sum(wait > 0 for wait in waits) + result.never,
        round(fmean(waits or [0.0]), 1),
        *(quantile(waits, part) for part in (0.5, 0.99, 1)),
        len(gang_waits),
        quantile(gang_waits, 0.95),
        f"{sum(promise.late_s <= 0 for promise in promises)}/{len(promises)}",
        quantile(errors, 0.5),
        result.never,
        result.impossible,
    )


def quantile(ordered, part):
    """Return a quantile of ordered seconds, or 0 if there are none."""
    return round(ordered[int(part * (len(ordered) - 1))], 1) if ordered else 0.0


def main(argv: Sequence[str] | None = None) -> None:
    """Replay a trace and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pods", type=Path)
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--policies", nargs="+", type=NodeOrder, default=list(NodeOrder))
    parser.add_argument("--terms", nargs="+", type=Terms, default=[Terms.NONE])
    parser.add_argument("--planned-starts", type=int, default=1)
    parser.add_argument("--load", type=float, default=1.0, help="multiplies the rate of arrival")
    parser.add_argument("--gangs", action="store_true", help="every fifth pod with several GPUs")
    flags = parser.parse_args(argv)
    pods = read_pods(flags.pods.read_text().splitlines(), str(flags.pods), timed=True)
    pods = [replace(pod, created_s=pod.created_s / flags.load) for pod in pods]
    if flags.gangs:
        pods = with_gangs(pods)
    nodes = with_density(read_nodes(flags.nodes.read_text().splitlines(), str(flags.nodes)), pods)
    print("\t".join(HEADINGS))
    for policy in flags.policies:
        for terms in flags.terms:
            result = replay(pods, nodes, policy, terms, planned_starts=flags.planned_starts)
            print("\t".join(map(str, figures(result))), flush=True)


if __name__ == "__main__":
    main()

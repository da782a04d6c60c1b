"""A trace of pods placed on idle nodes by one policy: what is idle, and who waits how long; pure.

A pod that does not fit waits until another ends; those that came first are tried first, and later
ones that fit pass them. Pods run as long as in the trace, whenever they start.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf
from typing import NamedTuple

from services.cli.plan.trace import TracePod, parts_of, with_order
from shared.model.ledger import LedgerNode
from shared.model.names import PodUid
from shared.model.placement import Refusal
from shared.model.request import NodeOrder
from shared.placing.index.node_index import placement_key
from shared.placing.trial_cluster import TrialCluster


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a policy made of a trace."""

    policy: NodeOrder
    gpus: int
    arrivals_s: tuple[float, float]
    """When the first and the last pod arrived."""
    moments: Sequence[Moment]
    waits_s: Sequence[float]
    """Of each pod with GPUs that started; 0: it started at once."""
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


def replay(pods: Sequence[TracePod], nodes: Sequence[LedgerNode], policy: NodeOrder) -> Replay:
    """Replay pods, given in order of arrival, on idle nodes."""
    run = _Run(nodes, [replace(pod, request=with_order(pod.request, policy)) for pod in pods])
    for number, pod in enumerate(run.pods):
        run.end_until(pod.created_s)
        run.arrive(number)
    run.end_until(inf)
    return Replay(
        policy=policy,
        gpus=sum(len(node.devices) for node in nodes),
        arrivals_s=(pods[0].created_s, pods[-1].created_s),
        moments=run.moments,
        waits_s=run.waits_s,
        never=run.moments[-1].waiting_with_gpus,
        impossible=run.impossible,
    )


class _Run:
    """The cluster at one moment of a replay."""

    def __init__(self, nodes: Sequence[LedgerNode], pods: Sequence[TracePod]) -> None:
        self.pods = pods
        self.moments = [Moment(pods[0].created_s, 0, 0, 0)]
        self.waits_s: list[float] = []
        self.impossible = 0
        self._cluster = TrialCluster(nodes)
        self._ends: list[tuple[float, int]] = []
        """When running pods end, with their numbers, as a heap."""
        self._waiting: dict[Hashable, deque[int]] = {}
        """Numbers of pods that wait, by what is equal for those that fit the same places."""

    def arrive(self, number: int) -> None:
        """Start a pod that arrives now, or let it wait."""
        pod = self.pods[number]
        self._cluster.learn(pod.request)
        key = placement_key(pod.request)
        refusal = None if key in self._waiting else self._start(number, pod.created_s)
        if refusal is not None and refusal.permanent:
            self.impossible += 1
        elif refusal is not None or key in self._waiting:
            self._waiting.setdefault(key, deque()).append(number)
            self._note(pod.created_s, pod, waiting=1)

    def end_until(self, until_s: float) -> None:
        """End the pods whose time has come, and start those that wait for their place."""
        while self._ends and self._ends[0][0] <= until_s:
            now = self._ends[0][0]
            while self._ends and self._ends[0][0] == now:
                _, number = heappop(self._ends)
                self._cluster.remove(_uid(number))
                self._note(now, self.pods[number], running=-1)
            self._start_waiting(now)

    def _start_waiting(self, now: float) -> None:
        heads = [(numbers[0], key) for key, numbers in self._waiting.items()]
        heapify(heads)
        while heads:
            number, key = heappop(heads)
            if self._start(number, now) is None:
                self._note(now, self.pods[number], waiting=-1)
                numbers = self._waiting[key]
                numbers.popleft()
                if numbers:
                    heappush(heads, (numbers[0], key))
                else:
                    del self._waiting[key]

    def _start(self, number: int, now: float) -> Refusal | None:
        pod = self.pods[number]
        found = self._cluster.place(_uid(number), pod.request)
        if isinstance(found, Refusal):
            return found
        if pod.request.containers:
            self.waits_s.append(now - pod.created_s)
        if pod.runs_s is not None:
            heappush(self._ends, (now + pod.runs_s, number))
        self._note(now, pod, running=1)
        return None

    def _note(self, now: float, pod: TracePod, *, running: int = 0, waiting: int = 0) -> None:
        last, with_gpus = self.moments[-1], bool(pod.request.containers)
        self.moments.append(
            Moment(
                now,
                last.allocated + running * parts_of(pod.request),
                last.waiting + waiting,
                last.waiting_with_gpus + waiting * with_gpus,
            )
        )


def _uid(number: int) -> PodUid:
    return PodUid(f"pod-{number}")

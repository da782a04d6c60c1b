"""The extender: replies to kube-scheduler about pods that request GPUs.

Filter and prioritize use a mirror of the ledger and call nothing. Bind is a request to a binder,
which writes the lease and the Binding. Any number of replicas may run.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from opentelemetry.trace import SpanKind

from services.extender.pod_requests import ELSEWHERE_S, CachedPod, PodRequests
from services.extender.scheduler_api import (
    ExtenderArgs,
    ExtenderBindingArgs,
    ExtenderBindingResult,
    ExtenderFilterResult,
    HostPriority,
)
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.pod_events import PodFilteredOut, PodQueued
from shared.model.events.request_reply import PodBindingReply, PodBindingRequest
from shared.model.leases.ledger import FeedTruncatedError
from shared.model.names import NodeName, PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import PodRequest
from shared.placing.choice.device_choice import allowed_modes, choose_devices
from shared.placing.index.device_stages import Excluded
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import NodeIndex, placement_key
from shared.placing.index.ranked_nodes import LAST_RANK, request_kind
from shared.placing.index.threshold_column import store
from shared.placing.mirror.node_mirror import MirroredNode
from shared.placing.placement import placement_of, where_placed
from shared.placing.refusal.quota_refusals import PodOnNodes, narrowed, over_quota
from shared.placing.refusal.refusals import explain
from shared.runtime import telemetry
from shared.runtime.ledger_mirror import LedgerMirror
from shared.runtime.service import emits, loops, publishes
from shared.runtime.telemetry import Tracing

CACHED_SPLITS = 64
CLAIMED = "GpuClaimed"
UNKNOWN = "node(s) were not known to Leasehold"
BEST = 10
MOST_NODES = 100
"""Fitting nodes of which kube-scheduler chooses one, for a pod that prefers none: below so many it
takes no sample of its own, either (`minFeasibleNodesToFind` in pkg/scheduler/schedule_one.go).
"""
COMPARED_NODES = 16
"""The policy `fragmentation` compares those that fit most tightly."""
HOLD_S = 2.0
"""Between prioritize and bind pass milliseconds, unless volumes have to be provisioned."""
VOLUME_HOLD_S = 10.0
"""The same for pods with volumes that have to be provisioned."""
FLUSH_S = 0.2
"""Refusals are published together at this interval."""
AGAIN_S = 0.1
"""Pause before other devices of the node are chosen: the mirror lags behind the ledger."""
Bind = Callable[[PodBindingRequest], Awaitable[PodBindingReply]]
"""Lets a binder lease and bind. Raises UnavailableError if none replies in time."""


@dataclass(frozen=True, slots=True)
class NodeSplit:
    position: int
    """Of the mirror."""
    reasons: dict[NodeName, str]
    """By node that does not fit, without names of devices."""
    claimed: frozenset[NodeName]
    """Nodes that fit but for devices that a preemption has claimed."""
    excluded: Excluded
    has_fitting: bool


class NodeFilter:
    """Splits the nodes once per kind of request, until the mirror changes."""

    def __init__(self, index: NodeIndex) -> None:
        self.index = index
        self._splits: dict[Hashable, NodeSplit] = {}

    def verdict(
        self, request: PodRequest, offered: Sequence[NodeName], claimed_on: NodeName | None = None
    ) -> ExtenderFilterResult:
        """On the node `claimed_on`, claimed devices are the pod's own."""
        split = self._split(request)
        nodes = self.index.mirror.nodes
        reasons = split.reasons
        fitting = [name for name in offered if name in nodes and name not in reasons]
        if claimed_on in split.claimed and claimed_on in offered:
            fitting.append(claimed_on)
        if len(fitting) == len(offered):
            return ExtenderFilterResult(node_names=fitting)
        chosen = frozenset(fitting)
        failed = {name: reasons.get(name, UNKNOWN) for name in offered if name not in chosen}
        return ExtenderFilterResult(node_names=fitting, failed_and_unresolvable_nodes=failed)

    def refusal(self, request: PodRequest, verdict: ExtenderFilterResult) -> Refusal:
        """Return why no offered node fits, as the placer explains it where it can."""
        split = self._split(request)
        if not split.has_fitting:
            key = placement_key(request)
            last = self.index.explanations.get(key)
            return explain(request, self.index, NoFit(key, split.position, split.excluded, last))
        failed = verdict.failed_and_unresolvable_nodes
        others = len(self.index.mirror.nodes) - len(failed)
        return Refusal(
            reason=f"0/{len(failed)} nodes are available: {counted(failed.values())}; "
            f"kube-scheduler has excluded {others} others",
            hint="see its own events about the pod (kubectl describe pod)",
        )

    def _split(self, request: PodRequest) -> NodeSplit:
        key = placement_key(request)
        position = self.index.mirror.changes.end
        split = self._splits.pop(key, None)
        if split is None or split.position != position:
            split = self._make(request)
        return store(self._splits, key, split, CACHED_SPLITS)

    def _make(self, request: PodRequest) -> NodeSplit:
        index = self.index
        fitting, excluded = index.sets.split(request)
        reasons = {
            node.name: text
            for (_, text), members in excluded.items()
            for node in index.sets.nodes_in(members)
        }
        claimed = (
            node.name
            for (code, _), members in excluded.items()
            if code == CLAIMED
            for node in index.sets.nodes_in(members)
        )
        return NodeSplit(
            position=index.mirror.changes.end,
            reasons=reasons,
            claimed=frozenset(claimed),
            excluded=excluded,
            has_fitting=bool(fitting),
        )


def counted(texts: Iterable[str]) -> str:
    """Return each text once with its number, the most frequent first.

    >>> counted(["no GPU", "no memory", "no memory"])
    '2 no memory, 1 no GPU'
    """
    ordered = sorted(Counter(texts).items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{number} {text}" for text, number in ordered)


def refused_everywhere(offered: Iterable[NodeName], reason: str) -> ExtenderFilterResult:
    return ExtenderFilterResult(
        node_names=[], failed_and_unresolvable_nodes=dict.fromkeys(offered, reason)
    )


def scores(
    request: PodRequest, offered: Sequence[NodeName], index: NodeIndex
) -> dict[NodeName, int]:
    """Only the best has `BEST`; of equal nodes it is the one whose name sorts first."""
    mirrored = index.mirror.nodes
    nodes = [node for name in offered if (node := mirrored.get(name)) is not None]
    if not nodes:
        return {}
    costs = _ranks(request, nodes, index)
    if request.node_order.compares:
        costs = _fragmentation(request, nodes, costs, index)
    ordered = sorted(set(costs))
    scale = (BEST - 1) / len(ordered)
    grades = {cost: round((len(ordered) - at) * scale) for at, cost in enumerate(ordered)}
    by_node = {node.name: grades[cost] for node, cost in zip(nodes, costs, strict=True)}
    best = min(node.name for node, cost in zip(nodes, costs, strict=True) if cost == ordered[0])
    by_node[best] = BEST
    return by_node


def best_nodes(
    request: PodRequest, fitting: Sequence[NodeName], index: NodeIndex
) -> list[NodeName]:
    left = set(fitting)
    best: list[NodeName] = []
    for mode in allowed_modes(request):
        kind, need = request_kind(request, mode)
        for node in index.ranked_nodes(kind).in_order(need):
            if node.name in left:
                left.discard(node.name)
                best.append(node.name)
                if len(best) == MOST_NODES:
                    return best
    return best


def _ranks(request: PodRequest, nodes: Sequence[MirroredNode], index: NodeIndex) -> Sequence[float]:
    """Those for the preferred mode come first."""
    by_mode = [
        index.ranked_nodes(request_kind(request, mode)[0]) for mode in allowed_modes(request)
    ]

    def rank(node: MirroredNode) -> float:
        ranks = enumerate(ranked.rank_of(node) for ranked in by_mode)
        in_order = (at * LAST_RANK + rank for at, rank in ranks if rank != LAST_RANK)
        return next(in_order, len(by_mode) * LAST_RANK)

    return [rank(node) for node in nodes]


def _fragmentation(
    request: PodRequest, nodes: Sequence[MirroredNode], ranks: Sequence[float], index: NodeIndex
) -> Sequence[float]:
    """Return what the pod costs later pods on each node; nodes that are not compared cost most."""
    index.fragmentation.catch_up()
    order = sorted(range(len(nodes)), key=lambda at: (ranks[at], nodes[at].name))
    costs: dict[int, float] = {}
    for at in order[:COMPARED_NODES]:
        picks = choose_devices(request, nodes[at])
        if picks is not None:
            costs[at] = index.fragmentation.cost(request, nodes[at], picks)
    worst = max(costs.values(), default=0.0) + 1
    return [costs.get(at, worst) for at in range(len(nodes))]


@publishes(PodBindingRequest)
@dataclass(eq=False, kw_only=True)
class Extender:
    """Every reply is computed from the request, the mirror and what may be forgotten."""

    ledger: RedisLeases
    pods: PodRequests
    bind_pod: Bind
    clock: Clock
    tracing: Tracing

    def __post_init__(self) -> None:
        self.ledger_mirror = LedgerMirror(self.ledger, self.clock)
        self.mirror = self.ledger_mirror.mirror
        self.index = NodeIndex(self.mirror)
        self.nodes = NodeFilter(self.index)
        self._holds: dict[PodUid, tuple[float, Placement]] = {}
        """Shares that the mirror counts before their Binding, and until when."""
        self._refused: dict[PodUid, PodFilteredOut] = {}
        self._has_refused = asyncio.Event()

    def unready_reason(self) -> str | None:
        return self.ledger_mirror.unready_reason()

    @loops
    async def follow_ledger(self) -> None:
        try:
            await self.ledger_mirror.follow()
        except FeedTruncatedError:
            return

    @emits
    async def filtered_out(self) -> AsyncIterator[Sequence[PodFilteredOut]]:
        """An event is published when the reason or the free capacity changes."""
        while True:
            await self._has_refused.wait()
            await self.clock.sleep(FLUSH_S)
            self._has_refused.clear()
            events = list(self._refused.values())
            self._refused.clear()
            if events:
                yield events

    def filter(self, args: ExtenderArgs) -> ExtenderFilterResult:
        """Return the nodes that fit, and why the others do not.

        For example, of 3 nodes: `node_names=["a"]`, and a reason for each of `b` and `c`.
        """
        if args.node_names is None:
            return ExtenderFilterResult(error="the extender needs nodeCacheCapable: true")
        unready = self.unready_reason()
        if unready is not None:
            return ExtenderFilterResult(error=f"Leasehold's extender is not ready: {unready}")
        self._end_holds()
        try:
            pod = self.pods.observe(args.pod)
        except RequestError as error:
            return refused_everywhere(args.node_names, str(error))
        self._drop_hold(pod.queued.pod)
        if self._learns(pod):
            self.index.fragmentation.workload.learn(pod.queued.request)
        verdict, refusal = self._verdict(pod, args.node_names)
        if refusal is not None:
            self._publish_refusal(pod, refusal)
        elif len(verdict.node_names) == 1:
            self._hold(pod, verdict.node_names[0])
        return verdict

    def prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        """Return scores by the policy in force; hold the best node's share for a moment."""
        if args.node_names is None or self.unready_reason() is not None:
            return []
        pod = self.pods.observe(args.pod)
        self._drop_hold(pod.queued.pod)
        by_node = scores(pod.queued.request, args.node_names, self.index)
        if by_node:
            self._hold(pod, max(by_node, key=by_node.__getitem__))
        return [HostPriority(host=name, score=score) for name, score in by_node.items()]

    async def bind(self, args: ExtenderBindingArgs) -> ExtenderBindingResult:
        """Request the lease and the Binding of a binder; return why the pod was not bound."""
        unready = self.unready_reason()
        if unready is not None:
            return ExtenderBindingResult(error=f"Leasehold's extender is not ready: {unready}")
        try:
            pod = await self.pods.load(args)
            if pod is None:
                return ExtenderBindingResult(error="the pod was deleted or replaced")
            reply = await self._request(pod, args.node)
            if reply.no_capacity:
                await self.clock.sleep(AGAIN_S)
                reply = await self._request(pod, args.node)
        except LeaseholdError as error:
            return ExtenderBindingResult(error=str(error))
        return ExtenderBindingResult(error=self._outcome(pod, reply))

    def _verdict(
        self, pod: CachedPod, offered: Sequence[NodeName]
    ) -> tuple[ExtenderFilterResult, Refusal | None]:
        request = self._allowed(pod)
        if request is None:
            refusal = self._over_quota(pod)
            return refused_everywhere(offered, refusal.reason), refusal
        if pod.node is not None and self.clock.ticks() < pod.node_until:
            text = f"the pod is being bound to node {pod.node}"
            failed = {name: text for name in offered if name != pod.node}
            fitting = [pod.node] if pod.node in offered else []
            return ExtenderFilterResult(
                node_names=fitting, failed_and_unresolvable_nodes=failed
            ), None
        verdict = self.nodes.verdict(request, offered, pod.offered_on)
        if len(verdict.node_names) > MOST_NODES and not (pod.has_preferences or pod.offered_on):
            best = best_nodes(request, verdict.node_names, self.index)
            return ExtenderFilterResult(
                node_names=best, failed_and_unresolvable_nodes=verdict.failed_and_unresolvable_nodes
            ), None
        if verdict.node_names:
            return verdict, None
        refusal = self.nodes.refusal(request, verdict)
        if pod.excesses:
            refusal = self._over_quota(pod, refusal)
        return verdict, refusal

    def _allowed(self, pod: CachedPod) -> PodRequest | None:
        """Return the request within the quota that refused it last, or None if nothing is."""
        if pod.excesses and self.mirror.capacity > pod.excess_capacity:
            pod.excesses = ()
        return narrowed(pod.queued.request, pod.excesses)

    def _over_quota(self, pod: CachedPod, other_refusal: Refusal | None = None) -> Refusal:
        tried = PodOnNodes(pod.queued.request, self.index, where_placed)
        return over_quota(pod.queued.namespace, pod.excesses, other_refusal, tried)

    def _learns(self, pod: CachedPod) -> bool:
        first = pod.published is None
        return first and pod.queued.request.node_order.compares

    def _publish_refusal(self, pod: CachedPod, refusal: Refusal) -> None:
        capacity = pod.excess_capacity if pod.excesses else self.mirror.capacity
        if pod.published == (refusal.reason, capacity):
            return
        pod.published = refusal.reason, capacity
        event = PodFilteredOut(queued=pod.queued, refusal=refusal, capacity=capacity)
        self._refused[pod.queued.pod] = event
        self._has_refused.set()

    def _place(self, request: PodRequest, node: NodeName) -> Placement:
        mirrored = self.mirror.nodes.get(node)
        if mirrored is None:
            return Placement(node=node, shares=())
        return placement_of(mirrored, choose_devices(request, mirrored) or [])

    def _hold(self, pod: CachedPod, node: NodeName) -> None:
        """Count the share as used until the pod is bound, for a moment at most."""
        placement = self._place(self._allowed(pod) or pod.queued.request, node)
        if not placement.shares:
            return
        self._reserve(pod.queued, placement)
        hold_s = VOLUME_HOLD_S if pod.has_claims else HOLD_S
        self._holds[pod.queued.pod] = self.clock.ticks() + hold_s, placement

    def _reserve(self, queued: PodQueued, placement: Placement) -> None:
        request = queued.request
        self.mirror.reserve(
            queued.pod, placement, request.node_resources, request.anti_affinity_groups
        )

    def _drop_hold(self, pod: PodUid) -> None:
        self._holds.pop(pod, None)
        self.mirror.drop(pod)

    def _end_holds(self) -> None:
        now = self.clock.ticks()
        for pod in [pod for pod, (ends_at, _) in self._holds.items() if ends_at <= now]:
            self._drop_hold(pod)
        self.mirror.drop_counted()

    async def _request(self, pod: CachedPod, node: NodeName) -> PodBindingReply:
        """A held share is requested as it is.

        Until its lease is confirmed, the mirror may count it twice.
        """
        queued = pod.queued
        _, placement = self._holds.pop(queued.pod, (0.0, None))
        if placement is None or placement.node != node:
            self.mirror.drop(queued.pod)
            placement = self._place(self._allowed(pod) or queued.request, node)
            if placement.shares:
                self._reserve(queued, placement)
        capacity = self.mirror.capacity
        (traced,), spans = self.tracing.start("bind pod", [queued], kind=SpanKind.SERVER)
        try:
            reply = await self.bind_pod(
                PodBindingRequest(queued=traced, placement=placement, repels=pod.repels)
            )
        except UnavailableError:
            self.mirror.drop(queued.pod)
            raise
        finally:
            telemetry.end(spans)
        if reply.lease is None:
            self.mirror.drop(queued.pod)
        else:
            self.mirror.confirm(reply.lease)
        if reply.quotas:
            before = pod.excesses
            pod.excesses = (*before, *reply.quotas)
            pod.excess_capacity = min(capacity, pod.excess_capacity) if before else capacity
        return reply

    def _outcome(self, pod: CachedPod, reply: PodBindingReply) -> str:
        if reply.bound:
            self.pods.forget(pod.queued.pod)
            return ""
        if reply.node is not None:
            pod.node = reply.node
            pod.node_until = self.clock.ticks() + ELSEWHERE_S
        if not reply.quotas:
            return reply.reason
        refusal = self._over_quota(pod)
        if narrowed(pod.queued.request, pod.excesses) is None:
            self._publish_refusal(pod, refusal)
        return refusal.reason

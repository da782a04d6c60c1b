"""The extender: replies to kube-scheduler's questions about pods that request GPUs.

Filter and prioritize are answered from a mirror of the ledger, without a call to anything. Bind is
a request to a binder, which writes the lease and the Binding. Any number of replicas may run.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from opentelemetry.trace import SpanKind

from services.extender.pod_memory import ELSEWHERE_S, RememberedPod, SoftHolds
from services.extender.pod_requests import PodRequests
from services.extender.scheduler_api import (
    ExtenderArgs,
    ExtenderBindingArgs,
    ExtenderBindingResult,
    ExtenderFilterResult,
    HostPriority,
)
from services.extender.scores import MOST_NODES, best_nodes, scores
from services.extender.verdicts import NodeFilter, OfferedVerdict, refused_everywhere
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.pod_events import PodFilteredOut, PodQueued
from shared.model.events.request_reply import PodBindingReply, PodBindingRequest
from shared.model.ledger import FeedTruncatedError
from shared.model.names import NodeName, PodUid
from shared.model.placement import Placement, Refusal
from shared.model.request import NodeOrder, PodRequest
from shared.placing.choice.device_choice import choose_devices
from shared.placing.choice.picks import build_shares
from shared.placing.index.node_index import NodeIndex
from shared.placing.refusal.quota_refusals import narrowed, over_quota
from shared.runtime import telemetry
from shared.runtime.ledger_mirror import FollowedLedger, LedgerMirror
from shared.runtime.service import emits, loops, publishes
from shared.runtime.telemetry import Tracing

HOLD_S = 2.0
"""Between prioritize and bind pass milliseconds, unless volumes have to be provisioned."""
VOLUME_HOLD_S = 10.0
FLUSH_S = 0.2
"""Refusals are published together at this interval."""
AGAIN_S = 0.1
"""Pause before other devices of the node are chosen: the mirror lags behind the ledger."""


class BinderRequests(Protocol):
    """The binders."""

    async def bind(self, request: PodBindingRequest) -> PodBindingReply:
        """Lease and bind. Raises UnavailableError if no binder replies in time."""
        ...


@publishes(PodBindingRequest)
class Extender:
    """Every reply is computed from the request, the mirror and what may be forgotten."""

    def __init__(
        self,
        *,
        ledger: FollowedLedger,
        pods: PodRequests,
        binders: BinderRequests,
        clock: Clock,
        tracing: Tracing,
    ) -> None:
        self.pods = pods
        self.binders = binders
        self.clock = clock
        self.tracing = tracing
        self.ledger_mirror = LedgerMirror(ledger, clock)
        self.mirror = self.ledger_mirror.mirror
        self.index = NodeIndex(self.mirror)
        self.nodes = NodeFilter(self.index)
        self.holds = SoftHolds()
        self._refused: dict[PodUid, PodFilteredOut] = {}
        self._has_refused = asyncio.Event()

    def unready_reason(self) -> str | None:
        """Return why there are no verdicts, or None."""
        return self.ledger_mirror.unready_reason()

    @loops
    async def follow_ledger(self) -> None:
        """Keep the mirror up to date: a snapshot, then every change."""
        try:
            await self.ledger_mirror.follow()
        except FeedTruncatedError:
            return

    @emits
    async def filtered_out(self) -> AsyncIterator[Sequence[PodFilteredOut]]:
        """Publish the pods that no node fits, when their reason or the free capacity changes."""
        while True:
            await self._has_refused.wait()
            await self.clock.sleep(FLUSH_S)
            self._has_refused.clear()
            events = list(self._refused.values())
            self._refused.clear()
            if events:
                yield events

    def filter(self, args: ExtenderArgs) -> ExtenderFilterResult:
        """Return the nodes that fit, and why the others do not."""
        if args.node_names is None:
            return ExtenderFilterResult(error="the extender needs nodeCacheCapable: true")
        unready = self.unready_reason()
        if unready is not None:
            return ExtenderFilterResult(error=f"Leasehold's extender is not ready: {unready}")
        self._end_holds()
        try:
            pod = self.pods.observe(args.pod)
        except RequestError as error:
            verdict = refused_everywhere(args.node_names, str(error))
            return ExtenderFilterResult(failed_and_unresolvable_nodes=verdict.reasons)
        self._drop_hold(pod.queued.pod)
        if self._learns(pod):
            self.index.fragmentation.workload.learn(pod.queued.request)
        verdict, refusal = self._verdict(pod, args.node_names)
        if refusal is not None:
            self._publish_refusal(pod, refusal)
        elif len(verdict.fitting) == 1:
            self._hold(pod, verdict.fitting[0])
        return ExtenderFilterResult(
            node_names=verdict.fitting, failed_and_unresolvable_nodes=verdict.reasons
        )

    def prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        """Return scores by the policy in force; hold the best node's share for a moment."""
        if args.node_names is None or self.unready_reason() is not None:
            return []
        pod = self.pods.observe(args.pod)
        self._drop_hold(pod.queued.pod)
        found = scores(pod.queued.request, args.node_names, self.index)
        if found is None:
            return []
        self._hold(pod, found.best)
        return [HostPriority(host=name, score=score) for name, score in found.scores.items()]

    async def bind(self, args: ExtenderBindingArgs) -> ExtenderBindingResult:
        """Have the pod leased and bound by a binder; return why it was not."""
        unready = self.unready_reason()
        if unready is not None:
            return ExtenderBindingResult(error=f"Leasehold's extender is not ready: {unready}")
        try:
            pod = await self.pods.known(args)
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
        self, pod: RememberedPod, offered: Sequence[NodeName]
    ) -> tuple[OfferedVerdict, Refusal | None]:
        """Return the verdict, and the refusal if no offered node fits."""
        request = self._allowed(pod)
        namespace = pod.queued.namespace
        if request is None:
            refusal = over_quota(namespace, pod.excesses, None)
            return refused_everywhere(offered, refusal.reason), refusal
        if pod.node is not None and self.clock.ticks() < pod.node_until:
            text = f"the pod is being bound to node {pod.node}"
            failed = {name: text for name in offered if name != pod.node}
            fitting = [pod.node] if pod.node in offered else []
            return OfferedVerdict(fitting=fitting, reasons=failed), None
        verdict = self.nodes.verdict(request, offered, pod.offered_on)
        if len(verdict.fitting) > MOST_NODES and not (pod.has_preferences or pod.offered_on):
            best = best_nodes(request, verdict.fitting, self.index)
            return OfferedVerdict(fitting=best, reasons=verdict.reasons), None
        if verdict.fitting:
            return verdict, None
        refusal = self.nodes.refusal(request, verdict)
        if pod.excesses:
            refusal = over_quota(namespace, pod.excesses, refusal)
        return verdict, refusal

    def _allowed(self, pod: RememberedPod) -> PodRequest | None:
        """Return the request within the quota that refused it last; None: nothing is allowed."""
        if pod.excesses and self.mirror.capacity > pod.excess_capacity:
            pod.excesses = ()
        return narrowed(pod.queued.request, pod.excesses)

    def _learns(self, pod: RememberedPod) -> bool:
        first = pod.published is None
        return first and pod.queued.request.node_order is NodeOrder.FRAGMENTATION

    def _publish_refusal(self, pod: RememberedPod, refusal: Refusal) -> None:
        capacity = pod.excess_capacity if pod.excesses else self.mirror.capacity
        if pod.published == (refusal.reason, capacity):
            return
        pod.published = refusal.reason, capacity
        event = PodFilteredOut(queued=pod.queued, refusal=refusal, capacity=capacity)
        self._refused[pod.queued.pod] = event
        self._has_refused.set()

    def _place(self, request: PodRequest, node: NodeName) -> Placement:
        """Return the shares that the pod gets on a node; none if nothing fits."""
        mirrored = self.mirror.nodes.get(node)
        picks = choose_devices(request, mirrored) if mirrored is not None else None
        return Placement(
            node=node,
            shares=build_shares(picks or ()),
            node_version=mirrored.version if mirrored is not None else 0,
        )

    def _hold(self, pod: RememberedPod, node: NodeName) -> None:
        """Count the share on the node as used until the pod is bound, for a moment at most."""
        placement = self._place(self._allowed(pod) or pod.queued.request, node)
        if not placement.shares:
            return
        self._reserve(pod.queued, placement)
        hold_s = VOLUME_HOLD_S if pod.has_claims else HOLD_S
        self.holds.put(pod.queued.pod, placement, self.clock.ticks() + hold_s)

    def _reserve(self, queued: PodQueued, placement: Placement) -> None:
        request = queued.request
        self.mirror.reserve(queued.pod, placement, request.resources, request.anti_affinity_groups)

    def _drop_hold(self, pod: PodUid) -> None:
        self.holds.take(pod)
        self.mirror.drop(pod)

    def _end_holds(self) -> None:
        for pod in self.holds.take_ended(self.clock.ticks()):
            self.mirror.drop(pod)
        self.mirror.drop_counted()

    async def _request(self, pod: RememberedPod, node: NodeName) -> PodBindingReply:
        """Request the lease and the Binding; meanwhile the share counts as used.

        What is held is requested as it is. Until a lease is confirmed, the mirror may count it
        twice, so that it shows less room than there is.
        """
        queued = pod.queued
        placement = self.holds.take(queued.pod)
        if placement is None or placement.node != node:
            self.mirror.drop(queued.pod)
            placement = self._place(self._allowed(pod) or queued.request, node)
            if placement.shares:
                self._reserve(queued, placement)
        capacity = self.mirror.capacity
        (traced,), spans = self.tracing.start("extender bind", [queued], kind=SpanKind.SERVER)
        try:
            reply = await self.binders.bind(
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
            known = pod.excesses
            pod.excesses = (*known, *reply.quotas)
            pod.excess_capacity = min(capacity, pod.excess_capacity) if known else capacity
        return reply

    def _outcome(self, pod: RememberedPod, reply: PodBindingReply) -> str:
        """Return the error for kube-scheduler; empty: the pod is bound."""
        if reply.bound:
            self.pods.memory.forget(pod.queued.pod)
            return ""
        if reply.node is not None:
            pod.node, pod.node_until = reply.node, self.clock.ticks() + ELSEWHERE_S
        if not reply.quotas:
            return reply.reason
        refusal = over_quota(pod.queued.namespace, pod.excesses, None)
        if narrowed(pod.queued.request, pod.excesses) is None:
            self._publish_refusal(pod, refusal)
        return refusal.reason

"""The API server and its watcher: pods and nodes, Bindings that take long or fail, listings."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.model.devices.node import NodeRevision
from shared.model.errors import ConflictError, RequestError, UnavailableError
from shared.model.events.event import Event
from shared.model.events.pod_events import (
    BindingFailed,
    BoundPod,
    ListedPods,
    NodeChanged,
    NodesListed,
    PodQueued,
    PodsListed,
    PodTerminated,
    QuotasUpdated,
)
from shared.model.leases.lease_copy import ANNOTATION
from shared.model.leases.preemption import EvictionOutcome, Victim
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import PodRequest
from shared.pods.pod_snapshot import DisruptionBudget, PodSnapshot
from tests.model.claims import Claims
from tests.model.virtual_time import ActorClock
from tests.model.volumes import WITH_CLAIM, Volumes
from tests.support.build import facts

NAMESPACE = Namespace("default")
NOTICE_S = 2.0
"""Between the announcement of an eviction and the eviction."""
TERMINAL = frozenset({"Succeeded", "Failed"})


@dataclass(slots=True)
class Pod:
    """A pod as the API server has it."""

    uid: PodUid
    name: str
    request: PodRequest
    created_at: float
    node: NodeName | None = None
    lease: str = ""
    phase: str = "Pending"
    deleting: bool = False
    is_protected: bool = False
    """A PodDisruptionBudget allows no eviction of it."""
    announced_s: float = math.inf
    """When its eviction was announced, by the monotonic clock; infinite if it is not."""

    @property
    def is_terminal(self) -> bool:
        return self.phase in TERMINAL

    @property
    def is_pending(self) -> bool:
        return self.node is None and not self.is_terminal and not self.deleting


@dataclass(slots=True)
class SlowWrite:
    """A write that the API server has not answered, whether or not its sender still lives."""

    about: str
    write: Callable[[], None]
    outcome: asyncio.Future[str] = field(default_factory=asyncio.Future)


def _snapshot(pod: Pod) -> PodSnapshot:
    return PodSnapshot(
        pod.uid,
        pod.node,
        namespace=NAMESPACE,
        name=pod.name,
        priority=pod.request.priority,
        deleting=pod.deleting,
        terminal=pod.is_terminal,
        resource_version=pod.lease,
        annotations={ANNOTATION: pod.lease},
    )


class ApiServer:
    """Pods and nodes; each change is an event of the watcher's, on its way."""

    def __init__(
        self, publish: Callable[[Sequence[Event]], None], clock: ActorClock, claims: Claims
    ) -> None:
        self.publish = publish
        self.clock = clock
        self.claims = claims
        self.pods: dict[str, Pod] = {}
        self.nodes: set[NodeName] = set()
        self.cordoned: set[NodeName] = set()
        self.left: set[NodeName] = set()
        """Nodes that were deleted at least once."""
        self.node_states: list[NodeChanged] = []
        """All that were published."""
        self.on_binding: Callable[[PodUid], None] = lambda _: None
        """Called when a binder sends a Binding."""
        self.held = 0
        """As many of the next Bindings and allocations wait until the model answers them."""
        self.calls: list[SlowWrite] = []
        self.resync_requests: dict[str, None] = {}
        self.volumes = Volumes(self._queue_claiming)
        self.on_bound: Callable[[Pod], None] = lambda _: None
        self.on_evicted: Callable[[Pod, float], None] = lambda *_: None
        """Called before a pod is evicted, with the time of its announcement."""
        self._numbers = 0

    # Users and kubelets

    def create(self, name: str, request: PodRequest) -> Pod:
        self._numbers += 1
        pod = Pod(PodUid(f"{name}-{self._numbers}"), name, request, self.clock.now())
        self.pods[name] = pod
        self.publish([self._queued(pod)])
        return pod

    def delete(self, name: str, *, force: bool) -> None:
        """Delete a pod: at once by force, or if no kubelet has it; else its kubelet ends it."""
        pod = self.pods[name]
        if force or pod.node is None or pod.is_terminal:
            self.remove(pod)
        else:
            pod.deleting = True

    def remove(self, pod: Pod) -> None:
        del self.pods[pod.name]
        if not pod.is_terminal:
            self.publish([self._terminated(pod, "")])

    def finish(self, pod: Pod, phase: str) -> None:
        """Its kubelet reports that the pod's containers have ended, or never start."""
        if self.find(pod.uid) is pod and not pod.is_terminal:
            pod.phase = phase
            self.publish([self._terminated(pod, phase)])

    def finish_deleted(self, pod: Pod) -> None:
        """Its kubelet has ended the deleted pod's containers: report that, and remove it."""
        self.finish(pod, "Failed")
        del self.pods[pod.name]

    def find(self, uid: PodUid) -> Pod | None:
        return next((pod for pod in self.pods.values() if pod.uid == uid), None)

    def add_node(self, name: NodeName) -> None:
        self.nodes.add(name)
        self.publish([self._node_changed(name)])

    def remove_node(self, name: NodeName) -> None:
        self.left.add(name)
        self.nodes.discard(name)
        self.cordoned.discard(name)
        self.publish([self._node_changed(name)])

    def cordon_or_uncordon(self, name: NodeName) -> None:
        self.cordoned ^= {name}
        self.publish([self._node_changed(name)])

    # The watcher

    def list_nodes(self) -> None:
        """Publish all nodes again, and their names."""
        self.publish([self._node_changed(name) for name in sorted(self.nodes)])
        self.publish([NodesListed(nodes=tuple(sorted(self.nodes)), revision=self._numbers)])

    def list_pods(self) -> None:
        """List the bound pods; the list may arrive much later."""
        self._numbers += 1
        bound = tuple(
            BoundPod(pod=p.uid, namespace=NAMESPACE, name=p.name, node=p.node, lease=p.lease)
            for p in self.pods.values()
            if p.node is not None and not p.is_terminal
        )
        unbound = tuple(p.uid for p in self.pods.values() if p.node is None and not p.is_terminal)
        self.publish(
            [
                QuotasUpdated(quotas=(), read_at=0.0),
                PodsListed(
                    listing_id=f"listing-{self._numbers}",
                    chunk=0,
                    chunks=1,
                    pods=ListedPods(bound=bound, unbound=unbound, claims=self.claims.list_all()),
                    request_ids=tuple(self.resync_requests),
                ),
            ]
        )

    def queue_again(self) -> None:
        """Publish pending pods again, as the watcher does from time to time."""
        self.publish(
            [self._queued(pod, again=True) for pod in self.pods.values() if pod.is_pending]
        )

    def resync(self, request_id: str = "") -> None:
        """Publish everything again, as on request."""
        if request_id:
            self.resync_requests[request_id] = None
        self.list_nodes()
        self.queue_again()
        self.claims.resync()
        self.list_pods()

    def _queue_claiming(self, name: str) -> None:
        """Publish a pending pod again whose claim has changed."""
        pod = self.pods.get(name)
        if pod is not None and pod.is_pending and pod.request.claims == WITH_CLAIM:
            self.publish([self._queued(pod, again=True)])

    def requeue(self, failed: BindingFailed) -> None:
        pod = self.find(failed.pod)
        if pod is not None and pod.is_pending:
            self.publish([self._queued(pod, again=True)])

    # Binders

    async def bind_pod(
        self,
        namespace: str,
        name: str,
        uid: str,
        node: str,
        annotations: Mapping[str, str],
        **_: Any,
    ) -> None:
        self.on_binding(PodUid(uid))
        about = f"Binding of {uid} to {node}"
        await self.write(about, lambda: self._bind(name, uid, node, annotations))

    async def write(self, about: str, write: Callable[[], None]) -> None:
        """Write, at once or when the model says so. Raises the errors of the API server."""
        if not self.held:
            write()
            return
        self.held -= 1
        call = SlowWrite(about, write)
        self.calls.append(call)
        if await call.outcome != "done":
            raise UnavailableError("the API server did not answer")

    async def get(self, namespace: str, name: str) -> PodSnapshot | None:
        pod = self.pods.get(name)
        return _snapshot(pod) if pod else None

    async def evict(
        self, victim: Victim | PodSnapshot, *, dry_run: bool = False
    ) -> tuple[EvictionOutcome, str]:
        if dry_run:
            return self._evict(victim.pod, dry_run=True)
        pod = self.find(victim.pod)
        # As it is now: the announcement may be withdrawn before a slow write has happened.
        announced_s = pod.announced_s if pod else math.inf
        outcomes = list[tuple[EvictionOutcome, str]]()
        await self.write(
            f"eviction of {victim.pod}",
            lambda: outcomes.append(self._evict(victim.pod, announced_s=announced_s)),
        )
        return outcomes[0]

    def _evict(
        self, uid: PodUid, *, announced_s: float = math.inf, dry_run: bool = False
    ) -> tuple[EvictionOutcome, str]:
        pod = self.find(uid)
        if pod is None:
            return EvictionOutcome.GONE, "not found"
        if pod.is_protected and not pod.is_terminal:
            return EvictionOutcome.BLOCKED, "a PodDisruptionBudget allows no disruption"
        if not (dry_run or pod.deleting):
            self.on_evicted(pod, announced_s)
            self.delete(pod.name, force=False)
        return EvictionOutcome.EVICTED, ""

    async def announce(self, victim: Victim, at: float) -> None:
        await self.write(
            f"announcement to {victim.pod}",
            lambda: self._announce(victim.pod),
        )

    async def withdraw(self, victim: Victim) -> None:
        pod = self.find(victim.pod)
        if pod is not None:
            pod.announced_s = math.inf

    def _announce(self, uid: PodUid) -> None:
        """Note when its owner could know: an earlier write may happen after another binder's."""
        pod = self.find(uid)
        if pod is not None:
            pod.announced_s = min(pod.announced_s, self.clock.ticks())

    async def annotate(
        self,
        namespace: str,
        name: str,
        uid: str,
        annotations: Mapping[str, str],
        *,
        resource_version: str = "",
    ) -> None:
        pod = self.pods.get(name)
        if pod is None or (pod.uid, pod.lease) != (uid, resource_version):
            raise ConflictError(f"pod {name} has changed since")
        pod.lease = annotations[ANNOTATION]

    async def node_labels(self, name: NodeName) -> Mapping[str, str] | None:
        return {} if name in self.nodes else None

    def answer(self, number: int, outcome: str) -> None:
        """Answer a slow write: it is `done`, `done, reply lost`, or `lost`."""
        call = self.calls.pop(number)
        try:
            if outcome != "lost":
                call.write()
        except (RequestError, ConflictError) as error:
            if not call.outcome.done():
                call.outcome.set_exception(error)
        else:
            if not call.outcome.done():
                call.outcome.set_result(outcome)

    def answer_all(self) -> None:
        """Carry out all slow writes, and be fast again."""
        self.held = 0
        while self.calls:
            self.answer(0, "done")

    def _bind(self, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        pod = self.pods.get(name)
        if pod is None:
            raise RequestError(f"pod {name} is not found")
        if pod.uid != uid or not pod.is_pending:
            raise ConflictError(f"pod {name} is bound, being deleted, or another one")
        pod.node = NodeName(node)
        pod.lease = annotations[ANNOTATION]
        self.on_bound(pod)

    # Events

    def _queued(self, pod: Pod, *, again: bool = False) -> PodQueued:
        self._numbers += 1
        return PodQueued(
            pod=pod.uid,
            namespace=NAMESPACE,
            name=pod.name,
            resource_version="1",
            request=self.volumes.completed(pod.request, pod.name),
            created_at=pod.created_at,
            requeue_number=-self._numbers if again else 0,
        )

    def _terminated(self, pod: Pod, phase: str) -> PodTerminated:
        return PodTerminated(
            pod=pod.uid, namespace=NAMESPACE, name=pod.name, node=pod.node, phase=phase
        )

    def _node_changed(self, name: NodeName) -> NodeChanged:
        self._numbers += 1
        state = NodeChanged(
            node=facts(name, unschedulable=name in self.cordoned),
            deleted=name not in self.nodes,
            revision=NodeRevision(self._numbers),
        )
        self.node_states.append(state)
        return state


@dataclass(frozen=True, slots=True)
class PodListing:
    """Pods and PodDisruptionBudgets as planners read them; no pod waits for a ResourceClaim."""

    api: ApiServer

    async def get(self, namespace: str, name: str) -> PodSnapshot | None:
        return await self.api.get(namespace, name)

    async def follow_pods(self) -> None:
        """The list is always as new as a watch."""

    async def get_claim(self, namespace: str, name: str) -> None:
        raise AssertionError(f"a planner reads ResourceClaim {namespace}/{name}")

    async def get_class(self, name: str) -> None:
        raise AssertionError(f"a planner reads DeviceClass {name}")

    async def has_slices(self, node: str) -> bool:
        raise AssertionError(f"a planner reads ResourceSlices of {node}")

    async def list_pods(self) -> tuple[dict[PodUid, PodSnapshot], list[DisruptionBudget]]:
        pods = self.api.pods.values()
        budgets = [
            DisruptionBudget(name=pod.name, pods=frozenset({pod.uid}), allowed=0)
            for pod in pods
            if pod.is_protected
        ]
        return {pod.uid: _snapshot(pod) for pod in pods}, budgets

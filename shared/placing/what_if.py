"""Whether pods would fit on the cluster as it is now, and what is missing if not; pure."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from msgspec import structs

from shared.model.devices.device import DeviceUse
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import LedgerNode, NodeTotals
from shared.model.leases.preemption import start_text
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.placement import Placement
from shared.model.requests.request import PodRequest
from shared.model.views.plans import PlannedShare
from shared.model.views.view import View
from shared.placing.index.no_fit import NoFit
from shared.placing.room import ClusterTrials, rooms_by_few
from shared.placing.starts import LeaseEnd, PlannedStart, StartTrials, ending_lease, plan_start
from shared.placing.trial_cluster import TrialCluster

EndOf = Callable[[Lease], LeaseEnd | None]
MOST_PLANNED = 8
MAX_ADDED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPod:
    origin: str
    """The object that it comes from, such as `Deployment web`."""
    name: str
    request: PodRequest


class WhatIfOrder(View, frozen=True, kw_only=True):
    """Pods to try."""

    manifest: str
    """YAML or JSON, with any number of pods and of objects that create pods."""
    when: bool = False
    """Whether to find out when pods that would wait would start."""


class RoomView(View, frozen=True, kw_only=True):
    """What would have to end on a node for a pod that would wait."""

    node: NodeName
    leases: tuple[str, ...]
    """Namespaces and names."""
    gpu_s_used: float


class TriedOutcome(View, frozen=True, kw_only=True):
    """Where a pod would run, or why it would wait."""

    origin: str
    pod: str
    """Its namespace and name."""
    node: str = ""
    """Empty if it would wait."""
    shares: tuple[PlannedShare, ...] = ()
    refusal: str = ""
    room: RoomView | None = None
    """Null if it would run, or nothing helps."""
    when: str = ""
    """If requested, for the last waiting pod of the first objects: when all so far have started."""


class AddedNodes(View, frozen=True, kw_only=True):
    """Nodes whose addition would let pods run that would wait."""

    like: NodeName
    """A node of the cluster of the same kind."""
    gpus: tuple[str, ...]
    """The models of each node's devices."""
    memory_mib: tuple[int, ...]
    """Their memory."""
    count: int
    pods: int
    """How many of the pods would run on them."""


class Forecast(View, frozen=True, kw_only=True):
    """The result for all pods, in their order."""

    pods: tuple[TriedOutcome, ...]
    add_nodes: tuple[AddedNodes, ...] = ()
    """The alternatives, those for most of the pods with fewest GPUs first."""

    @property
    def waiting(self) -> tuple[TriedOutcome, ...]:
        """Those that would wait."""
        return tuple(pod for pod in self.pods if not pod.node)


def forecast(
    pods: Sequence[TriedPod],
    nodes: Sequence[NodeTotals],
    *,
    now: float,
    visible: Callable[[Namespace], bool] = lambda _: True,
    end_of: EndOf | None = None,
) -> Forecast:
    """Place the pods one after the other; budgets and quotas are not counted.

    Only pods of visible namespaces are named as those that would have to end.
    """
    trials = ClusterTrials(nodes)
    rooms: dict[str, RoomView | None] = {}
    outcomes: list[TriedOutcome] = []
    waiting: list[PodRequest] = []
    by_origin: dict[str, list[int]] = {}
    for number, pod in enumerate(pods):
        decision = trials.cluster.place(_uid(number), pod.request)
        outcome = TriedOutcome(origin=pod.origin, pod=pod.name)
        if isinstance(decision, Placement):
            shares = PlannedShare.of(decision.shares)
            outcomes.append(structs.replace(outcome, node=decision.node, shares=shares))
            continue
        refusal = trials.cluster.explain(pod.request, decision)
        waiting.append(pod.request)
        by_origin.setdefault(pod.origin, []).append(number)
        if pod.origin not in rooms:
            rooms[pod.origin] = _room(pod.request, trials, now, visible)
        room = rooms[pod.origin]
        outcomes.append(structs.replace(outcome, refusal=refusal.text, room=room))
    if end_of is not None:
        planned = StartTrials()
        first = [pod.request for pod, outcome in zip(pods, outcomes, strict=True) if outcome.node]
        for numbers in islice(by_origin.values(), MOST_PLANNED):
            tried = first + [pods[number].request for number in numbers]
            plan = plan_start(tried, len(tried), nodes, end_of, now=now, trials=planned)
            first = first if plan is None else tried
            when = _when(plan, end_of, visible)
            outcomes[numbers[-1]] = structs.replace(outcomes[numbers[-1]], when=when)
    return Forecast(pods=tuple(outcomes), add_nodes=tuple(_additions(waiting, nodes)))


def _when(plan: PlannedStart | None, end_of: EndOf, visible: Callable[[Namespace], bool]) -> str:
    leases = plan.waits_for if plan else ()
    ends = [ending_lease(lease, end) for lease in leases if (end := end_of(lease))]
    if not ends:
        return "no end in sight: pods that would have to end have no maximum run time"
    last = ends[-1]
    is_named = visible(last.namespace)
    return start_text(ends, f"{last.namespace}/{last.name}" if is_named else "another pod")


def _room(
    request: PodRequest, trials: ClusterTrials, now: float, visible: Callable[[Namespace], bool]
) -> RoomView | None:
    def may_end(lease: Lease) -> bool:
        return not lease.claim and visible(lease.namespace)

    room = next(rooms_by_few(request, trials, may_end, now=now), None)
    trials.restore()
    if room is None:
        return None
    return RoomView(
        node=room.placement.node,
        leases=tuple(f"{lease.namespace}/{lease.name}" for lease in room.leases),
        gpu_s_used=round(room.used_gpu_s, 3),
    )


def _additions(waiting: Sequence[PodRequest], nodes: Iterable[NodeTotals]) -> list[AddedNodes]:
    kinds: dict[Hashable, LedgerNode] = {}
    for totals in nodes:
        kinds.setdefault(_kind(totals.node), totals.node)
    additions = [added for example in kinds.values() if (added := _addition(waiting, example)).pods]
    return sorted(
        additions, key=lambda added: (-added.pods, added.count * len(added.gpus), added.like)
    )


def _addition(waiting: Sequence[PodRequest], example: LedgerNode) -> AddedNodes:
    cluster = TrialCluster()
    left = list(enumerate(waiting))
    added = 0
    while left and added < MAX_ADDED:
        cluster.put_node(_idle_copy(example, added))
        still = [
            (number, request)
            for number, request in left
            if isinstance(cluster.place(_uid(number), request), NoFit)
        ]
        if len(still) == len(left):
            break
        added, left = added + 1, still
    return AddedNodes(
        like=example.facts.name,
        gpus=tuple(device.model for device, _ in example.devices),
        memory_mib=tuple(device.memory_mib for device, _ in example.devices),
        count=added,
        pods=len(waiting) - len(left),
    )


def _kind(node: LedgerNode) -> Hashable:
    devices = tuple((d.model, d.memory_mib, d.mode, d.slots, d.unit_mib) for d, _ in node.devices)
    return devices, tuple(sorted(node.facts.allocatable.items())), node.facts.taints


def _idle_copy(node: LedgerNode, number: int) -> LedgerNode:
    name = NodeName(f"added-{number + 1}")
    renamed = {device.uuid: DeviceUuid(f"{name}-{device.index}") for device, _ in node.devices}
    facts = replace(
        node.facts,
        name=name,
        unschedulable=False,
        used_by_others={},
        excluded_devices=(),
        unserved_resources=(),
    )
    devices = tuple(
        (
            replace(
                device,
                uuid=renamed[device.uuid],
                healthy=True,
                fault="",
                links={renamed[uuid]: score for uuid, score in device.links.items()},
            ),
            DeviceUse(),
        )
        for device, _ in node.devices
    )
    return LedgerNode(facts=facts, devices=devices, served=node.served)


def _uid(number: int) -> PodUid:
    return PodUid(f"tried-{number}")

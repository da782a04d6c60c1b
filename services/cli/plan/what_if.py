"""Whether pods would fit on the cluster as it is now, and what is missing if not; pure."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shared.model.device import Device, DeviceUse
from shared.model.ledger import LedgerNode, NodeTotals
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.placement import Placement, Refusal
from shared.model.request import PodRequest
from shared.placing.room import ClusterTrials, Room, rooms_by_few
from shared.placing.trial_cluster import TrialCluster

MAX_ADDED = 1000
"""Nodes of one kind that are added at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPod:
    """A pod that does not exist yet."""

    origin: str
    """The object that it comes from, such as `Deployment web`."""
    name: str
    """Its namespace and name."""
    request: PodRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedOutcome:
    """Where a pod would run, or why it would wait."""

    pod: TriedPod
    found: Placement | Refusal
    room: Room | None = None
    """What would have to end for a pod that would wait. None if it would run, or nothing helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedNodes:
    """Nodes whose addition would let pods run that would wait."""

    like: NodeName
    """A node of the cluster of the same kind."""
    devices: tuple[Device, ...]
    """Those of each node."""
    count: int
    pods: int
    """How many of the pods would run on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The result for all pods, in their order."""

    outcomes: tuple[TriedOutcome, ...]
    added: tuple[AddedNodes, ...] = ()
    """The alternatives, those for most of the pods with fewest GPUs first."""

    @property
    def waiting(self) -> tuple[TriedOutcome, ...]:
        """Those that would wait."""
        return tuple(each for each in self.outcomes if isinstance(each.found, Refusal))


def forecast(pods: Sequence[TriedPod], nodes: Sequence[NodeTotals], *, now: float) -> Forecast:
    """Place the pods one after the other; budgets and quotas are not counted."""
    trials = ClusterTrials(nodes)
    rooms: dict[Hashable, Room | None] = {}
    outcomes: list[TriedOutcome] = []
    for number, pod in enumerate(pods):
        found, room = trials.cluster.place(_uid(number), pod.request), None
        if isinstance(found, Refusal):
            key = pod.origin
            if key not in rooms:
                found_rooms = rooms_by_few(
                    pod.request, trials, lambda lease: not lease.claim, now=now
                )
                rooms[key] = next(found_rooms, None)
                trials.restore()
            room = rooms[key]
        outcomes.append(TriedOutcome(pod=pod, found=found, room=room))
    waiting = [each.pod.request for each in outcomes if isinstance(each.found, Refusal)]
    return Forecast(outcomes=tuple(outcomes), added=tuple(_additions(waiting, nodes)))


def _additions(waiting: Sequence[PodRequest], nodes: Iterable[NodeTotals]) -> list[AddedNodes]:
    kinds: dict[Hashable, LedgerNode] = {}
    for totals in nodes:
        kinds.setdefault(_kind(totals.node), totals.node)
    found = [each for example in kinds.values() if (each := _addition(waiting, example)).pods]
    return sorted(found, key=lambda each: (-each.pods, each.count * len(each.devices), each.like))


def _addition(waiting: Sequence[PodRequest], example: LedgerNode) -> AddedNodes:
    """Add idle nodes like the example as long as each lets further pods run."""
    cluster, left, added = TrialCluster(), list(enumerate(waiting)), 0
    while left and added < MAX_ADDED:
        cluster.put_node(_idle_copy(example, added))
        still = [
            (number, request)
            for number, request in left
            if isinstance(cluster.place(_uid(number), request), Refusal)
        ]
        if len(still) == len(left):
            break
        added, left = added + 1, still
    return AddedNodes(
        like=example.facts.name,
        devices=tuple(device for device, _ in example.devices),
        count=added,
        pods=len(waiting) - len(left),
    )


def _kind(node: LedgerNode) -> Hashable:
    """Return what nodes have in common that the same pods fit on while they are idle."""
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


def runs(outcomes: Iterable[TriedOutcome]) -> Iterator[tuple[TriedOutcome, Placement]]:
    """Yield those that would run, with their places."""
    for each in outcomes:
        if isinstance(each.found, Placement):
            yield each, each.found

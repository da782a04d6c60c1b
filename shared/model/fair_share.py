"""Whose turn it is among namespaces whose pods wait; `fair.lua` goes by the same rules.

Namespaces with budget left come before those without. Then comes the higher priority; of equal ones
the namespace that holds the smallest dominant part of all healthy devices, divided by its share of
the cluster (dominant resource fairness with weights); of equal ones the oldest pod.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.model.device import MIB, Device
from shared.model.events.pod_events import PodQueued
from shared.model.lease import Lease, bookings
from shared.model.names import Namespace
from shared.model.request import Company, GpuRequest, PodRequest

WHOLE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """An amount of GPUs, over all devices."""

    cores_percent: int = 0
    memory_mib: int = 0

    def plus(self, other: "Taken") -> "Taken":
        """Return the sum."""
        return Taken(
            cores_percent=self.cores_percent + other.cores_percent,
            memory_mib=self.memory_mib + other.memory_mib,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """What a namespace may claim when others wait, too."""

    share: int = 1
    has_budget: bool = True
    starts: bool = True
    """New pods of it may start; else its budget keeps them waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What decides the order, at one moment."""

    total: Taken = Taken()
    """Of all healthy devices."""
    taken: Mapping[Namespace, Taken] = field(default_factory=dict)
    rights: Mapping[Namespace, Right] = field(default_factory=dict)

    def right(self, namespace: Namespace) -> Right:
        """Return a namespace's right; one nobody has told of has budget and one share."""
        return self.rights.get(namespace, Right())

    def part(self, namespace: Namespace, more: Taken = Taken()) -> float:
        """Return the dominant part of the cluster that a namespace holds, with `more` on top."""
        taken = self.taken.get(namespace, Taken()).plus(more)
        return max(
            taken.cores_percent / max(1, self.total.cores_percent),
            taken.memory_mib / max(1, self.total.memory_mib),
        )

    def weighed(self, namespace: Namespace, more: Taken = Taken()) -> float:
        """Return that part, divided by the namespace's share."""
        return self.part(namespace, more) / self.right(namespace).share


def taken_by(lease: Lease) -> Taken:
    """Return what a lease counts as."""
    booked = bookings(lease.shares)
    return Taken(
        cores_percent=sum(
            WHOLE if each.company is Company.ALONE else each.cores_percent for each in booked
        ),
        memory_mib=sum(each.memory_mib for each in booked),
    )


def turns_of(
    devices: Iterable[Device], leases: Iterable[Lease], rights: Mapping[Namespace, Right]
) -> Turns:
    """Add up what decides the order."""
    healthy = [device for device in devices if device.healthy]
    taken: dict[Namespace, Taken] = {}
    for lease in leases:
        taken[lease.namespace] = taken.get(lease.namespace, Taken()).plus(taken_by(lease))
    total = Taken(
        cores_percent=WHOLE * len(healthy), memory_mib=sum(device.memory_mib for device in healthy)
    )
    return Turns(total=total, taken=taken, rights=rights)


def in_turn(queued: Iterable[PodQueued], turns: Turns) -> list[PodQueued]:
    """Return waiting pods in the order in which they are offered what is freed.

    After each one, what it asks for counts as held by its namespace.
    """
    queues: dict[Namespace, list[PodQueued]] = {}
    for pod in queued:
        queues.setdefault(pod.namespace, []).append(pod)
    for queue in queues.values():
        queue.sort(key=lambda pod: (-pod.request.priority, pod.created_at, pod.pod), reverse=True)
    given = dict.fromkeys(queues, Taken())
    heap = [_first(queue, turns, given) for queue in queues.values()]
    heapq.heapify(heap)
    order: list[PodQueued] = []
    while heap:
        queue = queues[heapq.heappop(heap)[-1]]
        pod = queue.pop()
        order.append(pod)
        given[pod.namespace] = given[pod.namespace].plus(asked_by(pod.request, turns.total))
        if queue:
            heapq.heappush(heap, _first(queue, turns, given))
    return order


def why_before(first: PodQueued, second: PodQueued, turns: Turns) -> str:
    """Say why a waiting pod comes before another one, as things stand."""
    one, other = turns.right(first.namespace), turns.right(second.namespace)
    if one.has_budget != other.has_budget:
        return "whose namespace has budget left"
    if first.request.priority != second.request.priority:
        return f"of priority {first.request.priority}"
    parts = turns.weighed(first.namespace), turns.weighed(second.namespace)
    if first.namespace != second.namespace and parts[0] != parts[1]:
        return (
            f"whose namespace holds {parts[0]:.1%} of the GPUs for each of its shares"
            if parts[0] < parts[1]
            else "whose namespace's turn comes first once what is offered before is counted"
        )
    return "which is older"


def asked_by(request: PodRequest, total: Taken) -> Taken:
    """Return about what a pod takes; exactly that is known once it is placed."""
    asked = [_asked(each, total) for each in request.containers]
    return max(asked, key=lambda each: (each.cores_percent, each.memory_mib), default=Taken())


def _asked(request: GpuRequest, total: Taken) -> Taken:
    device_mib = WHOLE * total.memory_mib // max(1, total.cores_percent)
    amounts: Sequence[int | None] = (
        request.memory_units,
        request.memory_percent,
        request.memory_bytes,
    )
    if request.whole or not any(amounts):
        return Taken(cores_percent=WHOLE * request.gpus, memory_mib=device_mib * request.gpus)
    each = -(-(request.memory_bytes or 0) // MIB) or request.memory_units or 0
    if request.memory_percent:
        each = device_mib * request.memory_percent // WHOLE
    return Taken(cores_percent=request.cores_percent * request.gpus, memory_mib=each * request.gpus)


def _first(
    queue: list[PodQueued], turns: Turns, given: Mapping[Namespace, Taken]
) -> tuple[bool, int, float, float, str, Namespace]:
    pod = queue[-1]
    name = pod.namespace
    return (
        not turns.right(name).has_budget,
        -pod.request.priority,
        turns.weighed(name, given[name]),
        pod.created_at,
        pod.pod,
        name,
    )

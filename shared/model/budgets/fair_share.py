"""Fair share: the order of waiting pods among namespaces; pure.

Namespaces with budget left come first, then the higher priority, then the namespace with the
smallest weighted dominant share (dominant resource fairness), then the oldest pod.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.model.devices.device import MIB, Device
from shared.model.events.pod_events import PodQueued
from shared.model.leases.lease import Lease, bookings
from shared.model.leases.ledger import WaitingPod
from shared.model.names import Namespace
from shared.model.requests.request import GpuRequest, PodRequest, SharingPolicy

WHOLE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAmount:
    cores_percent: int = 0
    memory_mib: int = 0

    def plus(self, other: "GpuAmount") -> "GpuAmount":
        return GpuAmount(
            cores_percent=self.cores_percent + other.cores_percent,
            memory_mib=self.memory_mib + other.memory_mib,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entitlement:
    weight: int = 1
    has_budget: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FairShare:
    total: GpuAmount = GpuAmount()
    used: Mapping[Namespace, GpuAmount] = field(default_factory=dict)
    entitlements: Mapping[Namespace, Entitlement] = field(default_factory=dict)

    def entitlement_of(self, namespace: Namespace) -> Entitlement:
        return self.entitlements.get(namespace, Entitlement())

    def dominant_share(self, namespace: Namespace, more: GpuAmount = GpuAmount()) -> float:
        """Return the larger part of the cluster's cores or memory that it holds with `more`."""
        taken = self.used.get(namespace, GpuAmount()).plus(more)
        return max(
            taken.cores_percent / max(1, self.total.cores_percent),
            taken.memory_mib / max(1, self.total.memory_mib),
        )

    def weighted_dominant_share(self, namespace: Namespace, more: GpuAmount = GpuAmount()) -> float:
        return self.dominant_share(namespace, more) / self.entitlement_of(namespace).weight


def amount_of_lease(lease: Lease) -> GpuAmount:
    booked = bookings(lease.shares)
    return GpuAmount(
        cores_percent=sum(
            WHOLE if booking.sharing is SharingPolicy.EXCLUSIVE else booking.cores_percent
            for booking in booked
        ),
        memory_mib=sum(booking.memory_mib for booking in booked),
    )


def fair_share_of(
    devices: Iterable[Device], leases: Iterable[Lease], rights: Mapping[Namespace, Entitlement]
) -> FairShare:
    healthy = [device for device in devices if device.healthy]
    taken: dict[Namespace, GpuAmount] = {}
    for lease in leases:
        taken[lease.namespace] = taken.get(lease.namespace, GpuAmount()).plus(
            amount_of_lease(lease)
        )
    total = GpuAmount(
        cores_percent=WHOLE * len(healthy), memory_mib=sum(device.memory_mib for device in healthy)
    )
    return FairShare(total=total, used=taken, entitlements=rights)


def fair_order(queued: Iterable[PodQueued], fair_share: FairShare) -> list[PodQueued]:
    """Return waiting pods in the order in which freed capacity is offered to them.

    A pod's request then counts as used: the pods of two namespaces alternate.
    """
    queues: dict[Namespace, list[PodQueued]] = {}
    for pod in queued:
        queues.setdefault(pod.namespace, []).append(pod)
    for queue in queues.values():
        queue.sort(key=lambda pod: (-pod.request.priority, pod.created_at, pod.pod), reverse=True)
    offered = dict.fromkeys(queues, GpuAmount())
    heap = [_first(queue, fair_share, offered) for queue in queues.values()]
    heapq.heapify(heap)
    order: list[PodQueued] = []
    while heap:
        queue = queues[heapq.heappop(heap)[-1]]
        pod = queue.pop()
        order.append(pod)
        offered[pod.namespace] = offered[pod.namespace].plus(
            amount_of_request(pod.request, fair_share.total)
        )
        if queue:
            heapq.heappush(heap, _first(queue, fair_share, offered))
    return order


def fair_queue(waiting: Iterable[WaitingPod], fair_share: FairShare) -> list[WaitingPod]:
    by_pod = {pod.queued.pod: pod for pod in waiting}
    order = fair_order((pod.queued for pod in by_pod.values()), fair_share)
    return [by_pod[queued.pod] for queued in order]


def precedence_reason(first: PodQueued, second: PodQueued, fair_share: FairShare) -> str:
    own = fair_share.entitlement_of(first.namespace)
    other = fair_share.entitlement_of(second.namespace)
    if own.has_budget != other.has_budget:
        return "whose namespace has budget left"
    if first.request.priority != second.request.priority:
        return f"of priority {first.request.priority}"
    parts = (
        fair_share.weighted_dominant_share(first.namespace),
        fair_share.weighted_dominant_share(second.namespace),
    )
    if first.namespace != second.namespace and parts[0] != parts[1]:
        return (
            f"whose namespace's GPUs count as {parts[0]:.1%}, less than {parts[1]:.1%}"
            if parts[0] < parts[1]
            else "whose namespace comes first when GPUs that are being offered are counted"
        )
    return "which is older"


def amount_of_request(request: PodRequest, total: GpuAmount) -> GpuAmount:
    """Return an approximation; the exact amount is known after placement."""
    amounts = [_requested_amount(container, total) for container in request.containers]
    return max(
        amounts, key=lambda amount: (amount.cores_percent, amount.memory_mib), default=GpuAmount()
    )


def _requested_amount(request: GpuRequest, total: GpuAmount) -> GpuAmount:
    device_mib = WHOLE * total.memory_mib // max(1, total.cores_percent)
    amounts: Sequence[int | None] = (
        request.memory_units,
        request.memory_percent,
        request.memory_bytes,
    )
    if request.whole or not any(amounts):
        return GpuAmount(cores_percent=WHOLE * request.gpus, memory_mib=device_mib * request.gpus)
    memory_mib = -(-(request.memory_bytes or 0) // MIB) or request.memory_units or 0
    if request.memory_percent:
        memory_mib = device_mib * request.memory_percent // WHOLE
    return GpuAmount(
        cores_percent=request.cores_percent * request.gpus, memory_mib=memory_mib * request.gpus
    )


def _first(
    queue: list[PodQueued], fair_share: FairShare, offered: Mapping[Namespace, GpuAmount]
) -> tuple[bool, int, float, float, str, Namespace]:
    pod = queue[-1]
    name = pod.namespace
    return (
        not fair_share.entitlement_of(name).has_budget,
        -pod.request.priority,
        fair_share.weighted_dominant_share(name, offered[name]),
        pod.created_at,
        pod.pod,
        name,
    )

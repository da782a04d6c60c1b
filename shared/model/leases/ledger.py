"""Requests to the ledger and its replies: reservations, totals, changes, waiting pods; pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from shared.model.budgets.quota import QuotaExcess
from shared.model.devices.device import Device, DeviceUse
from shared.model.devices.node import AntiAffinityTerm, NodeFacts
from shared.model.errors import ConflictError
from shared.model.events.pod_events import PodGated, PodQueued
from shared.model.leases.lease import Lease, LeaseRequest, bookings
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import PodRequest, SharingPolicy, Uncounted


class Reservation(LeaseRequest, frozen=True, kw_only=True, omit_defaults=True):
    """A request for a lease on the first of the candidates that still fits."""

    candidates: tuple[Placement, ...]
    priority: int = 0
    read_version: int | None = None
    """By which the candidates were chosen: no lease is given beside a pod that `repels` others and
    was reserved for later. None for kube-scheduler, which knows such pods."""
    repels: tuple[AntiAffinityTerm, ...] = ()
    """In force before the watcher reports it."""
    selected_as: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    """Those of its own rules: no more of them may be reserved since `read_version`."""
    uncounted: Uncounted = ()
    """Pods that may have a lease which does not count them: then no lease is given."""


def reservation_for(
    queued: PodQueued,
    candidates: tuple[Placement, ...],
    *,
    read_version: int | None = None,
    repels: tuple[AntiAffinityTerm, ...] = (),
) -> Reservation:
    """Return the request for a lease on the first of the candidates that fits.

    A lease has one set of resources: candidates that take other CPUs than the first are left out.
    """
    request = queued.request
    numa_cpus = candidates[0].numa_cpus if candidates else {}
    return Reservation(
        pod=queued.pod,
        namespace=queued.namespace,
        name=queued.name,
        candidates=tuple(
            [candidate for candidate in candidates if candidate.numa_cpus == numa_cpus]
        ),
        dialect=request.dialect,
        resources=request.node_resources | numa_cpus,
        anti_affinity_groups=request.anti_affinity_groups,
        gang=request.gang.name if request.gang else "",
        gang_min=request.gang.min_member if request.gang else 0,
        priority=request.priority,
        memo=request.memo,
        trace=queued.trace,
        weighed=candidates[0].weighed if candidates else "",
        term=request.term,
        claims=tuple([claim for claim in request.claims if not claim.bound])
        if request.claims
        else (),
        read_version=read_version,
        repels=repels or (request.pod_rules.repels if request.pod_rules else ()),
        selected_as=request.selected_as,
        guards=request.guards,
        uncounted=request.uncounted,
    )


class NodeUse(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 0
    used: Mapping[str, int] = msgspec.field(default_factory=dict)


class ReservedLease(msgspec.Struct, frozen=True, kw_only=True):
    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyLeased:
    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCapacity:
    pod: PodUid
    reason: str
    """For each candidate, as `node: reason`, separated by `; `."""
    devices: Mapping[DeviceUuid, DeviceUse] = field(default_factory=dict)
    nodes: Mapping[NodeName, NodeUse] = field(default_factory=dict)
    quotas: tuple[QuotaExcess, ...] = ()
    reserved_for_other: bool = False
    """A candidate's capacity is reserved for a waiting pod that comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangIncomplete:
    pod: PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class GonePod:
    pod: PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    pod: PodUid
    reason: str


ReservationOutcome = (
    ReservedLease | AlreadyLeased | NoCapacity | GangIncomplete | GonePod | TooLarge
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerNode:
    """A node's facts and devices, and what leases take of both."""

    facts: NodeFacts
    version: int = 0
    used: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[tuple[Device, DeviceUse], ...] = ()
    served: tuple[str, ...] = ()
    newly_served: tuple[str, ...] = ()
    """Resources whose allocatable 0 in node status is outdated."""

    @property
    def serving(self) -> frozenset[str]:
        """Resources that the kubelet accepts requests for."""
        return frozenset(self.served).difference(self.paused)

    @property
    def paused(self) -> frozenset[str]:
        """Resources that its agent serves, and of which its kubelet has none."""
        unserved = set(self.facts.unserved_resources).difference(self.newly_served)
        return frozenset(unserved.intersection(self.served))


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerChange:
    """One entry of the feed. Amounts are totals, so it may be applied twice."""

    position: str
    cause: str
    capacity: int
    version: int = 0
    nodes: tuple[LedgerNode, ...] = ()
    removed: tuple[NodeName, ...] = ()
    used: Mapping[NodeName, NodeUse] = field(default_factory=dict)
    devices: Mapping[DeviceUuid, DeviceUse] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatus:
    generation: str
    capacity: int
    vanished: int
    expires_at: float
    """Of the first reservation; 0 without one."""
    waiting: int
    unsynced: int
    preemptions: int
    budgets: int
    changed_gangs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """The changes after `position` may be applied although it contains some of them."""

    position: str
    capacity: int
    version: int = 0
    nodes: tuple[LedgerNode, ...]


class UnreadableRecord(NamedTuple):
    kind: str
    key: str
    """UID of the pod, UUID of the device, name of the node, quota's namespace; or empty."""
    node: str = ""


UNTRIED = "KubeScheduler"
"""Code of a pod that kube-scheduler keeps waiting, and no extender refused."""
RESERVED_FOR_OTHER = -1
"""Instead of a capacity number: the capacity is reserved for an offer to another pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPod:
    queued: PodQueued
    refusal: Refusal
    capacity: int
    """That the verdict is based on, or `RESERVED_FOR_OTHER`."""
    waiting_since: float = 0.0
    receives_offers: bool = True
    """Freed capacity is offered to it, not to another pod of its gang, or later."""
    min_members: int = 0
    """The verdict holds while fewer pods of its gang exist; 0 for any number."""
    scheduler_reason: str = ""
    """Of a pod whose node kube-scheduler chooses, in its words."""

    @property
    def was_filtered_out(self) -> bool:
        """The extender has refused it."""
        return self.queued.by_kube_scheduler and self.refusal.counts != ((UNTRIED, 0),)

    @property
    def reason_code(self) -> str:
        if self.refusal.quota:
            return "GpuQuota"
        if self.refusal.forming:
            return "GangIncomplete"
        return self.refusal.counts[0][0] if self.refusal.counts else "Other"


def budget_hint(namespace: Namespace) -> str:
    return (
        f"`leasehold budget {namespace}` shows why, and until when; an administrator can grant GPU "
        "time, or correct an invalid budget"
    )


def waits_for_budget(pod: PodGated) -> WaitingPod:
    queued = PodQueued(
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        resource_version=pod.resource_version,
        request=PodRequest(priority=pod.priority),
        created_at=pod.created_at,
    )
    refusal = Refusal(
        reason=f"the GPU budget of namespace {pod.namespace} is used up or invalid",
        hint=budget_hint(pod.namespace),
        counts=(("Budget", 0),),
    )
    return WaitingPod(queued=queued, refusal=refusal, capacity=0, receives_offers=False)


def waits_for_kube_scheduler(queued: PodQueued, reason: str, now: float) -> WaitingPod:
    scheduler = queued.scheduler or "kube-scheduler"
    refusal = Refusal(
        reason=f"{scheduler} has not tried it yet", counts=((UNTRIED, 0),), permanent=True
    )
    return WaitingPod(
        queued=queued,
        refusal=refusal,
        capacity=0,
        waiting_since=now,
        receives_offers=False,
        scheduler_reason=reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GangEnrollment:
    live_count: int
    waiting_count: int
    waiting: tuple[WaitingPod, ...] = ()
    """By priority, then age. Empty while they are too few, and once the gang runs, unless an
    enrolled pod was queued again."""
    leases: tuple[Lease, ...] = ()
    gone: tuple[PodUid, ...] = ()
    nodes: tuple[NodeName, ...] = ()
    """Of a gang with a topology: the nodes on which its pods hold leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitResult:
    stale: tuple[PodUid, ...] = ()
    already_leased: tuple[Lease, ...] = ()
    gone: tuple[PodUid, ...] = ()
    changed: tuple[PodUid, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTotals:
    """The stored totals of a node and the leases whose sum they must be."""

    node: LedgerNode
    leases: tuple[Lease, ...]
    index_mismatches: tuple[str, ...] = ()
    is_known: bool = True
    """The API server has the node, as far as the ledger knows."""
    reported: tuple[DeviceUuid, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedPods:
    pods: tuple[PodQueued, ...] = ()
    complete: bool = True
    """Nothing freed is left to offer; otherwise ask again once these pods are placed."""


class FeedTruncatedError(ConflictError):
    def __init__(self, position: str, reason: str) -> None:
        super().__init__(f"the ledger's feed cannot continue from {position}: {reason}")
        self.position = position


def with_changes(
    node: LedgerNode, change: Mapping[str, int], uses: Mapping[DeviceUuid, DeviceUse]
) -> LedgerNode:
    used = {name: node.used.get(name, 0) + change.get(name, 0) for name in {**node.used, **change}}
    devices = tuple((device, uses.get(device.uuid, use)) for device, use in node.devices)
    return replace(node, used=used, devices=devices)


def counted_use(
    leases: Iterable[Lease],
) -> tuple[dict[DeviceUuid, DeviceUse], dict[NodeName, dict[str, int]]]:
    """The ledger's totals must be equal to it. Only fences of devices may be higher."""
    devices: dict[DeviceUuid, DeviceUse] = {}
    nodes: dict[NodeName, dict[str, int]] = {}
    for lease in leases:
        fences = {share.device: share.fence for share in lease.shares}
        for booking in bookings(lease.shares):
            use = devices.get(booking.device, DeviceUse())
            devices[booking.device] = DeviceUse(
                memory_mib=use.memory_mib + booking.memory_mib,
                cores_percent=use.cores_percent + booking.cores_percent,
                shares=use.shares + booking.shares,
                fence=max(use.fence, fences[booking.device]),
                anti_affinity_groups=use.anti_affinity_groups
                | frozenset(lease.anti_affinity_groups),
                exclusive=use.exclusive or booking.sharing is SharingPolicy.EXCLUSIVE,
                slots_taken=_with_slots(use.slots_taken, booking.device, lease),
                layout=booking.layout or use.layout,
                mode=booking.mode,
            )
        used = nodes.setdefault(lease.node, {})
        for resource, amount in lease.resources.items():
            used[resource] = used.get(resource, 0) + amount
    return devices, nodes


def _with_slots(taken: str, device: DeviceUuid, lease: Lease) -> str:
    slots = {s.slot for s in lease.shares if s.device == device and s.slot is not None}
    slots.update(number for number, mark in enumerate(taken) if mark == "1")
    return "".join("1" if n in slots else "0" for n in range(max(slots, default=-1) + 1))

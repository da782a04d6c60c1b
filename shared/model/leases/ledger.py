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
from shared.model.requests.request import PodRequest, SharingPolicy


class Reservation(LeaseRequest, frozen=True, kw_only=True, omit_defaults=True):
    """A request for a lease on the first of the candidates that still fits."""

    candidates: tuple[Placement, ...]
    priority: int = 0
    read_version: int | None = None
    """The ledger's version that the candidates were chosen by.

    No lease is given beside a pod that `repels` others and was reserved for after that. None:
    kube-scheduler chose, which knows such pods.
    """
    repels: tuple[AntiAffinityTerm, ...] = ()
    """Required anti-affinity of a pod of kube-scheduler, in force before the watcher reports it."""


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
        resources=request.resources | numa_cpus if numa_cpus else request.resources,
        anti_affinity_groups=request.anti_affinity_groups,
        gang=request.gang.name if request.gang else "",
        priority=request.priority,
        memo=request.memo,
        trace=queued.trace,
        weighed=candidates[0].weighed if candidates else "",
        term=request.term,
        read_version=read_version,
        repels=repels,
    )


class NodeUse(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a node, other than devices, that live leases use."""

    version: int = 0
    used: Mapping[str, int] = msgspec.field(default_factory=dict)


class ReservedLease(msgspec.Struct, frozen=True, kw_only=True):
    """The pod has a new lease."""

    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyLeased:
    """The pod already has a live lease."""

    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCapacity:
    """No candidate fits any more; with the current totals, so that the placer decides again."""

    pod: PodUid
    reason: str
    """The reason per candidate, as `node: reason`, separated by `; `."""
    devices: Mapping[DeviceUuid, DeviceUse] = field(default_factory=dict)
    nodes: Mapping[NodeName, NodeUse] = field(default_factory=dict)
    quotas: tuple[QuotaExcess, ...] = ()
    """Exceeded quotas, for each candidate that a quota refused."""
    reserved_for_other: bool = False
    """Capacity of a candidate is reserved for an offer to a waiting pod that comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangIncomplete:
    """The pod fits, but its gang does not: nothing is reserved for any of its pods."""

    pod: PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class GonePod:
    """The pod has terminated or was deleted: nothing is reserved for it any more."""

    pod: PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    """The pod's lease cannot be stored: it has more of something than the ledger stores."""

    pod: PodUid
    reason: str
    """What there would be too much of, how much, and the limit."""


ReservationOutcome = (
    ReservedLease | AlreadyLeased | NoCapacity | GangIncomplete | GonePod | TooLarge
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerNode:
    """A node in the ledger: its facts, its devices, and what leases take of both."""

    facts: NodeFacts
    version: int = 0
    """Increases with every change of the node's facts, devices or use."""
    used: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[tuple[Device, DeviceUse], ...] = ()
    served: tuple[str, ...] = ()
    """Resources that the node agent's device plugin serves."""
    newly_served: tuple[str, ...] = ()
    """Those of them for which an allocatable amount of 0 in node status is outdated."""

    @property
    def serving(self) -> frozenset[str]:
        """Resources that the kubelet currently accepts requests for."""
        return frozenset(self.served).difference(self.paused)

    @property
    def paused(self) -> frozenset[str]:
        """Resources that its agent serves and of which its kubelet has none to allocate."""
        unserved = set(self.facts.unserved_resources).difference(self.newly_served)
        return frozenset(unserved.intersection(self.served))


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerChange:
    """One entry of the feed. All amounts are totals, so an entry may be applied twice."""

    position: str
    cause: str
    capacity: int
    """The capacity number after the change."""
    version: int = 0
    """The highest version that the ledger had given then."""
    nodes: tuple[LedgerNode, ...] = ()
    """Nodes whose inventory changed, with their full state."""
    removed: tuple[NodeName, ...] = ()
    used: Mapping[NodeName, NodeUse] = field(default_factory=dict)
    devices: Mapping[DeviceUuid, DeviceUse] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatus:
    """What may have to be done in the ledger."""

    generation: str
    capacity: int
    """It rises whenever something is freed or added."""
    vanished: int
    expires_at: float
    """When the first reservation expires; 0: there is none."""
    waiting: int
    unsynced: int
    """Leases whose nodes or annotations may be outdated after a resize."""
    preemptions: int
    budgets: int
    changed_gangs: int
    """Gangs whose pods' verdicts must be decided again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """All nodes. Applying every change after `position` brings them up to date.

    A page may already contain a change that comes after `position`; applying it again is harmless.
    """

    position: str
    capacity: int
    version: int = 0
    nodes: tuple[LedgerNode, ...]


class UnreadableRecord(NamedTuple):
    """A record that was damaged, and cannot be decoded."""

    kind: str
    """`leases`, `devices`, `nodes` or `waiting`."""
    key: str
    """UID of the pod, UUID of the device, or name of the node."""
    node: str = ""
    """The node that it belongs to; empty: not known."""


RESERVED_FOR_OTHER = -1
"""Instead of a capacity number: the capacity is reserved for an offer to another pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPod:
    """A pod that fits nowhere, with its verdict."""

    queued: PodQueued
    refusal: Refusal
    capacity: int
    """The capacity number of the state that the verdict is based on, or `RESERVED_FOR_OTHER`."""
    waiting_since: float = 0.0
    receives_offers: bool = True
    """Whether freed capacity is offered to it; False: to another pod of its gang, or not yet."""
    min_members: int = 0
    """The verdict is valid while fewer pods of its gang exist; 0: for any number."""

    @property
    def reason_code(self) -> str:
        """The code of most nodes, or why it waits otherwise."""
        if self.refusal.quota:
            return "GpuQuota"
        if self.refusal.forming:
            return "GangIncomplete"
        return self.refusal.counts[0][0] if self.refusal.counts else "Other"


def budget_hint(namespace: Namespace) -> str:
    """Return what helps where the budget of a namespace lets no new pods in."""
    return (
        f"`leasehold budget {namespace}` shows why, and until when; an administrator can grant GPU "
        "time, or correct an invalid budget"
    )


def waits_for_budget(pod: PodGated) -> WaitingPod:
    """Return a pod at the gate of its namespace's budget as a waiting pod."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GangEnrollment:
    """The pods of a gang, counted when some of them were enrolled as waiting."""

    live_count: int
    waiting_count: int
    waiting: tuple[WaitingPod, ...] = ()
    """The waiting pods by priority, then age. Empty while they are too few, and once the gang
    runs, unless one of the enrolled pods was queued again."""
    leases: tuple[Lease, ...] = ()
    """If enrolled pods have leases already: these, and all of the gang that are not active yet."""
    gone: tuple[PodUid, ...] = ()
    """Pods that were not enrolled, since they have terminated or were deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitResult:
    """The pods of a call to `wait` that need not wait."""

    stale: tuple[PodUid, ...] = ()
    """Pods to place again, since capacity was freed meanwhile."""
    already_leased: tuple[Lease, ...] = ()
    gone: tuple[PodUid, ...] = ()
    changed: tuple[PodUid, ...] = ()
    """Pods that waited already, for another reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTotals:
    """The stored totals of a node and the leases whose sum they must be, read atomically."""

    node: LedgerNode
    leases: tuple[Lease, ...]
    index_mismatches: tuple[str, ...] = ()
    """Inconsistent index entries, as text; empty if the ledger is consistent."""
    known: bool = True
    """Whether the API server has the node, as far as the ledger knows."""
    reported: tuple[DeviceUuid, ...] = ()
    """The devices that are healthy in its latest report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedPods:
    """Waiting pods to place again."""

    pods: tuple[PodQueued, ...] = ()
    complete: bool = True
    """All freed capacity was offered; otherwise request more after these pods were placed."""


class FeedTruncatedError(ConflictError):
    """The feed no longer contains the position: a new snapshot is needed."""

    def __init__(self, position: str, reason: str) -> None:
        super().__init__(f"the ledger's feed cannot continue from {position}: {reason}")
        self.position = position


def with_changes(
    node: LedgerNode, change: Mapping[str, int], uses: Mapping[DeviceUuid, DeviceUse]
) -> LedgerNode:
    """Return a node of which so much more of resources is used, with other uses of some devices."""
    used = {name: node.used.get(name, 0) + change.get(name, 0) for name in {**node.used, **change}}
    devices = tuple((device, uses.get(device.uuid, use)) for device, use in node.devices)
    return replace(node, used=used, devices=devices)


def counted_use(
    leases: Iterable[Lease],
) -> tuple[dict[DeviceUuid, DeviceUse], dict[NodeName, dict[str, int]]]:
    """Sum up what leases take of devices and nodes; the ledger's totals must be equal.

    The fences are the highest among the leases; a device's own may be higher.
    """
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
            )
        used = nodes.setdefault(lease.node, {})
        for resource, amount in lease.resources.items():
            used[resource] = used.get(resource, 0) + amount
    return devices, nodes


def _with_slots(taken: str, device: DeviceUuid, lease: Lease) -> str:
    slots = {s.slot for s in lease.shares if s.device == device and s.slot is not None}
    slots.update(number for number, mark in enumerate(taken) if mark == "1")
    return "".join("1" if n in slots else "0" for n in range(max(slots, default=-1) + 1))

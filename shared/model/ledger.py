"""What the ledger is asked and what it tells: reservations, totals, changes, waiting pods."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shared.model.device import Device, DeviceUse
from shared.model.errors import ConflictError
from shared.model.events.pod_events import PodQueued
from shared.model.lease import Lease, bookings
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.placement import Placement, Refusal
from shared.model.quota import QuotaExcess
from shared.model.request import SharingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A wish for a lease: the first of the candidates that still fits is taken."""

    pod: PodUid
    namespace: Namespace
    name: str
    candidates: tuple[Placement, ...]
    dialect: str = ""
    resources: Mapping[str, int] = field(default_factory=dict)
    """Ordinary resources, in the units of `PodRequest.resources`."""
    anti_affinity_groups: tuple[str, ...] = ()
    gang: str = ""
    memo: str = ""
    trace: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """What live leases hold of a node's ordinary resources."""

    version: int = 0
    used: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """The pod holds a new lease."""

    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyLeased:
    """The pod had a live lease already, and keeps it."""

    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCapacity:
    """None of the candidates fits any more; the totals of what was tried, to decide afresh."""

    pod: PodUid
    reason: str
    """Why, per candidate, as `node: reason`, separated by `; `."""
    devices: Mapping[DeviceUuid, DeviceUse] = field(default_factory=dict)
    nodes: Mapping[NodeName, NodeUse] = field(default_factory=dict)
    quotas: tuple[QuotaExcess, ...] = ()
    """What of its namespace's quota was in the way, for each candidate that it refused."""
    reserved_for_other: bool = False
    """What a candidate would have taken is being offered to a waiting pod that comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangIncomplete:
    """The pod fits, but not all of its gang do: nothing is held for any of them."""

    pod: PodUid


ReservationOutcome = Reserved | AlreadyLeased | NoCapacity | GangIncomplete


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerNode:
    """A node as the ledger has it: facts, devices, and what leases take of both."""

    facts: NodeFacts
    version: int = 0
    """Rises with every change of the node's facts, devices or use."""
    used: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[tuple[Device, DeviceUse], ...] = ()
    served: tuple[str, ...] = ()
    """Resources that the node agent's device plugin serves."""

    @property
    def serving(self) -> frozenset[str]:
        """Resources that a kubelet would really ask the device plugin for at this moment."""
        return frozenset(self.served).difference(self.facts.unserved_resources)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerChange:
    """One entry of the feed. All amounts are totals: to hear an entry twice is harmless."""

    position: str
    """Where to go on reading after this entry."""
    cause: str
    capacity: int
    """The capacity number after the change."""
    nodes: tuple[LedgerNode, ...] = ()
    """Nodes whose inventory changed, whole."""
    removed: tuple[NodeName, ...] = ()
    used: Mapping[NodeName, NodeUse] = field(default_factory=dict)
    devices: Mapping[DeviceUuid, DeviceUse] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All nodes. Hearing every change after `position` brings them to the present.

    A page may already contain a change that comes after `position`; hearing it again is harmless.
    """

    position: str
    capacity: int
    nodes: tuple[LedgerNode, ...]


RESERVED_FOR_OTHER = -1
"""In place of a capacity number: what the pod would take is first offered to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPod:
    """A pod that fits nowhere, with the verdict that says so."""

    queued: PodQueued
    refusal: Refusal
    capacity: int
    """The capacity number of the state on which the verdict was reached; `KEPT_BACK`: see there."""
    waiting_since: float = 0.0
    receives_offers: bool = True
    """What is freed is offered to it; False: to another of its gang, or to nobody yet."""
    min_members: int = 0
    """The verdict holds while fewer of its gang than this are here; 0: whoever is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangEnrollment:
    """A gang, counted at one moment, some pods of it just enrolled among those that wait."""

    live_count: int
    """Its pods that hold a live lease."""
    waiting_count: int
    """Its pods that wait."""
    waiting: tuple[WaitingPod, ...] = ()
    """Those pods, highest priority first, then oldest; none while they are too few to begin, and
    none once the gang runs."""
    leases: tuple[Lease, ...] = ()
    """If a pod enrolled holds a lease already: all leases of the gang that are not active yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitResult:
    """Pods of a call to `wait` that do not wait."""

    stale: tuple[PodUid, ...] = ()
    """To be decided again: something was freed since."""
    already_leased: tuple[Lease, ...] = ()
    """Live leases of those that hold one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTotals:
    """One node's stored totals and the leases they must be the sum of, read at one moment."""

    node: LedgerNode
    leases: tuple[Lease, ...]
    index_mismatches: tuple[str, ...] = ()
    """What the indexes hold without its counterpart, in words; empty in a sound ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedPods:
    """Waiting pods to be decided again."""

    pods: tuple[PodQueued, ...] = ()
    complete: bool = True
    """All that was freed so far has been offered; else ask again once these have been decided."""


class FeedTruncatedError(ConflictError):
    """The feed no longer goes back to the position: a new snapshot is needed."""

    def __init__(self, position: str, reason: str) -> None:
        super().__init__(f"the ledger's feed cannot go on from {position}: {reason}")
        self.position = position


def counted_use(
    leases: Iterable[Lease],
) -> tuple[dict[DeviceUuid, DeviceUse], dict[NodeName, dict[str, int]]]:
    """Add up what leases take of devices and of nodes: what the ledger's totals must equal.

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

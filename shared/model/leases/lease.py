"""The lease: who holds which shares of which devices, and in which state; pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.model.bounds import (
    MOST_CONSUMERS,
    MOST_SHARES,
    Amount,
    ContainerText,
    Count,
    Fence,
    GenerationText,
    Groups,
    Index,
    KeyText,
    LongText,
    MemoText,
    Mib,
    ModelText,
    NameText,
    Percent,
    Resources,
    Seconds,
    ShortText,
    TraceText,
)
from shared.model.errors import ConflictError
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.quantity import peak
from shared.model.requests.request import NO_TERM, SharingPolicy, Term


class LeaseState(StrEnum):
    """State of a lease."""

    RESERVED = "reserved"
    """Reserved until `expires_at` for a pod that is not bound yet."""
    BOUND = "bound"
    """A binder has committed the lease; the pod is bound to the node, or about to be."""
    ACTIVE = "active"
    """The node agent has returned the devices to the kubelet."""
    RELEASED = "released"
    EXPIRED = "expired"


TRANSITIONS: Mapping[LeaseState, frozenset[LeaseState]] = {
    LeaseState.RESERVED: frozenset({LeaseState.BOUND, LeaseState.RELEASED, LeaseState.EXPIRED}),
    LeaseState.BOUND: frozenset({LeaseState.ACTIVE, LeaseState.RELEASED}),
    LeaseState.ACTIVE: frozenset({LeaseState.RELEASED}),
    LeaseState.RELEASED: frozenset(),
    LeaseState.EXPIRED: frozenset(),
}


def reachable() -> Mapping[LeaseState, frozenset[LeaseState]]:
    """Return which states a lease in each state can come to, in one or more transitions."""
    reached: dict[LeaseState, frozenset[LeaseState]] = {}

    def search(state: LeaseState) -> frozenset[LeaseState]:
        if state not in reached:
            reached[state] = TRANSITIONS[state].union(*map(search, TRANSITIONS[state]))
        return reached[state]

    return {state: search(state) for state in TRANSITIONS}


MIB = 1 << 20

LIVE = frozenset({LeaseState.RESERVED, LeaseState.BOUND, LeaseState.ACTIVE})


class StaleLeaseError(ConflictError):
    """The stored lease has moved past the version, or the state, this writer read."""

    def __init__(self, pod: PodUid, *, read: int, stored: int | None) -> None:
        super().__init__(f"lease of pod {pod}: read version {read}, stored version {stored}")
        self.pod = pod
        self.read = read
        self.stored = stored


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedUnits:
    """The amounts as the pod requested them, for dialects that must report them again."""

    memory_mib: Mib
    """The requested memory; a MIG share takes the whole memory of its instance."""
    memory_bytes: Amount | None = None
    memory_percent: Percent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MigPlacement:
    """The MIG instance of a share: its position in the layout of the device."""

    layout: ShortText
    position: Count
    profile: ShortText


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSize:
    """The size of a container's share of each of its devices."""

    memory_mib: Mib
    cores_percent: Percent


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAllocation:
    """The allocation of a ResourceClaim that a lease covers."""

    generation: GenerationText
    """Differs between allocations of one claim; see `shared.model.requests.claim.generation_of`."""
    consumers: Annotated[tuple[PodUid, ...], Meta(max_length=MOST_CONSUMERS)] = ()
    """Pods in the claim's `status.reservedFor`, sorted."""


class Share(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One container's share of one device."""

    container: ContainerText
    """The container; if a ResourceClaim holds the lease: the `request` of its allocation result."""
    device: DeviceUuid
    index: Index
    device_mib: Mib
    device_model: ModelText = ""
    memory_mib: Mib
    cores_percent: Percent
    unit_mib: Mib = 1
    whole: bool = False
    slotted: bool = True
    init: bool = False
    slot: Count | None = None
    """Slot number, assigned by the ledger if the share is slotted."""
    fence: Fence = 0
    """Fence of the device, raised by the ledger for this share. A higher fence is newer."""
    sharing: SharingPolicy = SharingPolicy.SHARED
    slots: Count = 0
    mig: MigPlacement | None = None
    """The MIG instance of the share, whose position is `slot`; None: HAMi-core enforces it."""
    requested_units: RequestedUnits | None = None
    requested_size: ShareSize | None = None
    """The size in the pod's spec, if the lease was resized."""
    share_id: ShortText = ""
    """`shareID` of the claim's allocation result; empty: a pod holds the lease, or the device is
    allocated as a whole."""

    @property
    def booked_cores(self) -> int:
        """Percentage of the device's cores that the share reserves; 0 for a MIG instance."""
        return 0 if self.mig else self.cores_percent

    @property
    def part_of_device(self) -> float:
        """The larger part of the device's cores or memory, 0 to 1."""
        memory = self.memory_mib / max(self.device_mib, 1)
        return 1.0 if self.whole else min(1.0, max(self.booked_cores / 100, memory))

    @property
    def limit_bytes(self) -> int:
        """Memory of the device that the container may use, in bytes."""
        requested = self.requested_units.memory_bytes if self.requested_units else None
        return self.memory_mib * MIB if requested is None or self.mig else requested

    @property
    def memory_units(self) -> int:
        """The memory in the unit of the request."""
        return self.memory_mib // self.unit_mib


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """The usage of one device by one lease, for all its containers."""

    device: DeviceUuid
    memory_mib: int
    cores_percent: int
    shares: int
    slots: int
    sharing: SharingPolicy
    layout: str


class LeaseDescription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a lease has from its request, and the ledger only keeps."""

    name: NameText
    claim: ClaimAllocation | None = None
    """The allocation, if a ResourceClaim holds the lease; None: a pod holds it."""
    dialect: ShortText = ""
    memo: MemoText = ""
    trace: TraceText = ""
    """W3C traceparent of the span that created the lease."""
    weighed: LongText = ""
    term: Term = NO_TERM


class LeaseRequest(LeaseDescription, frozen=True, kw_only=True, omit_defaults=True):
    """What a lease has from its request, the ordinary resources of its pod included."""

    pod: PodUid
    """The uid of its holder: of the claim, if there is a `claim`."""
    namespace: Namespace
    resources: Resources = msgspec.field(default_factory=dict)
    """Resources other than devices, in the units of `PodRequest.resources`; and exclusive CPUs, by
    `numa_cpus_name`."""
    anti_affinity_groups: Groups = ()
    gang: KeyText = ""


class Lease(LeaseRequest, frozen=True, kw_only=True, omit_defaults=True):
    """The right of a pod or a ResourceClaim to shares of one node's devices.

    That of a pod includes its other resources. Versioned: the ledger raises `version` with every
    change, and every change names the version it was decided on.
    """

    node: NodeName
    shares: Annotated[tuple[Share, ...], Meta(max_length=MOST_SHARES)]
    state: LeaseState = LeaseState.RESERVED
    version: Fence = 0
    created_at: Seconds = 0.0
    expires_at: Seconds = 0.0
    """Unix seconds at which a reservation ends; 0 once bound."""
    activated_at: Seconds = 0.0
    """Unix seconds at which it became active, by the ledger's own clock; 0: it did not."""
    resized_at: Seconds = 0.0
    """When a resize last changed its shares, Unix seconds in whole milliseconds by the ledger's own
    clock; 0: none did."""

    @property
    def users(self) -> tuple[PodUid, ...]:
        """The pods that have its shares: one, or the consumers of its claim."""
        return (self.pod,) if self.claim is None else self.claim.consumers

    @property
    def containers(self) -> tuple[str, ...]:
        """Containers with shares, in the order in which the kubelet serves them; or requests."""
        return tuple(dict.fromkeys(share.container for share in self.shares))

    def shares_of(self, container: str) -> tuple[Share, ...]:
        """Return the shares of one container, in the order of its devices."""
        return tuple(share for share in self.shares if share.container == container)


END_MARGIN_S = 15.0
"""From a pod's deadline and grace period until its lease has ended: the kubelet compares deadlines
once a second, counts from its first status of the pod, after Allocate, and reports the end."""


def ends_by(lease: Lease) -> float | None:
    """Return the instant (Unix seconds) by which its capacity is free, if nothing fails.

    None: its pod has no maximum run time. Without `activated_at` it is a guess, since the pod's
    time has not begun.
    """
    term = lease.term
    if term.max_run_s is None:
        return None
    return _start(lease) + term.max_run_s + term.grace_s + END_MARGIN_S


def end_text(term: Term, now: float) -> str:
    """Return when a pod that starts now reaches its maximum run time, in RFC 3339 and UTC; or "".

    With the offset `+00:00`: before 3.11 Python's `fromisoformat` does not read `Z`.
    """
    if term.max_run_s is None:
        return ""
    return datetime.fromtimestamp(now + term.max_run_s, UTC).isoformat(timespec="seconds")


START_MARGIN_S = 60.0
"""From a lease until its pod's time begins: until the pod is bound and its node has admitted it."""


def will_end_by(term: Term, now: float) -> float | None:
    """Return the instant by which a lease that begins now ends; None: it has no enforced term."""
    if term.max_run_s is None:
        return None
    return now + START_MARGIN_S + term.max_run_s + term.grace_s + END_MARGIN_S


def expected_end(lease: Lease, learned_s: float | None = None) -> float | None:
    """Return the instant at which its pod is expected to end, at the latest `ends_by`; or None.

    Its author's expectation counts, then `learned_s`, then its maximum run time.
    """
    term = lease.term
    expected = term.expected_run_s if term.expected_run_s is not None else learned_s
    lengths = [length for length in (expected, term.max_run_s) if length is not None]
    return _start(lease) + min(lengths) if lengths else None


def _start(lease: Lease) -> float:
    return lease.activated_at or lease.created_at


def bookings(shares: Iterable[Share]) -> tuple[Booking, ...]:
    """Sum up what the shares take of each device, in order of first appearance.

    `shares` are in the order of the pod's containers: see `shared.model.quantity.peak`.
    """
    beside: dict[DeviceUuid, list[Share]] = {}
    for share in shares:
        beside.setdefault(share.device, []).append(share)
    return tuple(_booking(device, held) for device, held in beside.items())


def allocated_shares(leases: Mapping[str, Lease]) -> tuple[Share, ...]:
    """Return the shares of some of a pod's containers, in the order of its containers.

    Each container's shares are those of its lease in `leases`.
    """
    names = dict.fromkeys(share.container for lease in leases.values() for share in lease.shares)
    return tuple(
        share for name in names if name in leases for share in leases[name].shares_of(name)
    )


def _booking(device: DeviceUuid, shares: list[Share]) -> Booking:
    return Booking(
        device=device,
        memory_mib=peak(((s.memory_mib, s.init) for s in shares), 0),
        cores_percent=peak(((s.booked_cores, s.init) for s in shares), 0),
        shares=peak(((1, s.init) for s in shares), 0),
        slots=peak(((int(s.slotted), s.init) for s in shares), 0),
        sharing=_strictest_sharing(shares),
        layout=next((share.mig.layout for share in shares if share.mig), ""),
    )


def _strictest_sharing(shares: Iterable[Share]) -> SharingPolicy:
    manners = {share.sharing for share in shares}
    for manner in (SharingPolicy.EXCLUSIVE, SharingPolicy.IDLE_DEVICE, SharingPolicy.SHARED):
        if manner in manners:
            return manner
    return SharingPolicy.BEST_EFFORT


ShareKey = tuple[PodUid, str, DeviceUuid, int | None]
"""Pod, name of a container, device, and the position of a MIG instance in its layout."""
IDLE_AFTER_S = 600.0
"""A share that has not been used for this long is marked as idle, by default."""


def share_key(pod: PodUid, share: Share) -> ShareKey:
    """Return the key of a pod's share."""
    position = None if share.mig is None else share.mig.position
    return pod, share.container, share.device, position


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareMeasurement:
    """A container's usage of one device, as the agent of its node measured it last."""

    pod: PodUid
    namespace: Namespace
    name: NameText
    container: ContainerText
    device: DeviceUuid
    memory_mib: Mib | None = None
    """None: neither the driver nor HAMi-core reports it."""
    cores_percent: Percent | None = None
    """Percent of the device's cores in use; None: it is not reported."""
    position: Count | None = None
    """Of its MIG instance in the device's layout; None: the share is no instance."""
    processes: Amount = 0
    idle_since: Seconds | None = None
    """Unix seconds of the last use, by kernels or a change of memory; None: it is in use."""

    @property
    def key(self) -> ShareKey:
        """What distinguishes the share."""
        return self.pod, self.container, self.device, self.position

    def is_idle(self, now: float, *, after_s: float = IDLE_AFTER_S) -> bool:
        """Whether it has not been used for `after_s` seconds; `now` is in Unix seconds."""
        return self.idle_since is not None and now - self.idle_since >= after_s

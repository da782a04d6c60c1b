"""The lease: which shares of which devices a pod or claim holds, and in which state; pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.model.bounds import (
    MOST_CLAIMS,
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
from shared.model.devices.enforcers import (
    ComputeEnforcer,
    MemoryEnforcer,
    SharingMode,
    held_text,
)
from shared.model.devices.time_slices import Interval
from shared.model.errors import ConflictError
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.quantity import peak
from shared.model.requests.request import NO_TERM, PodClaim, SharingPolicy, Term


class LeaseState(StrEnum):
    RESERVED = "reserved"
    """Held until `expires_at` for a pod that is not bound yet."""
    BOUND = "bound"
    ACTIVE = "active"
    """The kubelet has the devices from the node agent."""
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
    """Return the states that a lease can come to in any number of transitions."""
    reached: dict[LeaseState, frozenset[LeaseState]] = {}

    def search(state: LeaseState) -> frozenset[LeaseState]:
        if state not in reached:
            reached[state] = TRANSITIONS[state].union(*map(search, TRANSITIONS[state]))
        return reached[state]

    return {state: search(state) for state in TRANSITIONS}


MIB = 1 << 20

LIVE = frozenset({LeaseState.RESERVED, LeaseState.BOUND, LeaseState.ACTIVE})


class StaleLeaseError(ConflictError):
    """The stored lease has passed the version or state that this writer read."""

    def __init__(self, pod: PodUid, *, read: int, stored: int | None) -> None:
        super().__init__(f"lease of pod {pod}: read version {read}, stored version {stored}")
        self.pod = pod
        self.read = read
        self.stored = stored


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedUnits:
    """The amounts as requested, for dialects that must report them again."""

    memory_mib: Mib
    """A MIG share takes the whole memory of its instance, whatever was requested."""
    memory_bytes: Amount | None = None
    memory_percent: Percent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MigPlacement:
    layout: ShortText
    position: Count
    profile: ShortText


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSize:
    memory_mib: Mib
    cores_percent: Percent


RESIZE_WAITING = "ResizeWaiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingSize(ShareSize):
    """A smaller size that a container gets as soon as it uses no more memory."""

    container: ContainerText
    since: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAllocation:
    generation: GenerationText
    """Differs between allocations of one claim."""
    consumers: Annotated[tuple[PodUid, ...], Meta(max_length=MOST_CONSUMERS)] = ()
    """Pods in `status.reservedFor`, sorted."""


class Share(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One container's share of one device."""

    container: ContainerText
    """For a ResourceClaim, the `request` of its allocation result."""
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
    fence: Fence = 0
    """Raised by the ledger for each share of the device; higher is newer."""
    sharing: SharingPolicy = SharingPolicy.SHARED
    slots: Count = 0
    mig: MigPlacement | None = None
    requested_units: RequestedUnits | None = None
    requested_size: ShareSize | None = None
    """The size in the pod's spec, if the lease was resized."""
    share_id: ShortText = ""
    """Of the claim's allocation result; empty for a pod, and for a whole device."""
    memory: MemoryEnforcer = "hami-core"
    compute: ComputeEnforcer = "hami-core"
    """0 % of the cores are neither limited nor reserved."""
    mode: SharingMode = "hami-core"

    @property
    def booked_cores(self) -> int:
        return 0 if self.mig else self.cores_percent

    @property
    def limit_bytes(self) -> int:
        requested = self.requested_units.memory_bytes if self.requested_units else None
        return self.memory_mib * MIB if requested is None or self.mig else requested

    @property
    def held_text(self) -> str:
        return held_text(self.memory, self.compute, capped=self.cores_percent > 0)

    @property
    def memory_units(self) -> int:
        return self.memory_mib // self.unit_mib


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    device: DeviceUuid
    memory_mib: int
    cores_percent: int
    shares: int
    slots: int
    sharing: SharingPolicy
    layout: str
    mode: SharingMode


class LeaseDescription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the ledger only keeps of a lease."""

    name: NameText
    claim: ClaimAllocation | None = None
    """Set if a ResourceClaim holds the lease."""
    dialect: ShortText = ""
    memo: MemoText = ""
    trace: TraceText = ""
    weighed: LongText = ""
    term: Term = NO_TERM
    claims: Annotated[tuple[PodClaim, ...], Meta(max_length=MOST_CLAIMS)] = ()
    """PersistentVolumeClaims that have to be bound before its pod is."""
    gang_min: Count = 0
    """`Gang.min_member`; 0 without a gang."""
    waiting_size: WaitingSize | None = None
    intervals: Annotated[dict[ContainerText, Interval], Meta(max_length=MOST_SHARES)] = (
        msgspec.field(default_factory=dict)
    )


class LeaseRequest(LeaseDescription, frozen=True, kw_only=True, omit_defaults=True):
    pod: PodUid
    """Of the pod, or of the claim if there is a `claim`."""
    namespace: Namespace
    resources: Resources = msgspec.field(default_factory=dict)
    """Resources other than devices, in the units of `PodRequest.resources`; exclusive CPUs by
    `numa_cpus_name`."""
    anti_affinity_groups: Groups = ()
    gang: KeyText = ""


class Lease(LeaseRequest, frozen=True, kw_only=True, omit_defaults=True):
    """The right of a pod or a ResourceClaim to shares of one node's devices.

    The ledger raises `version` with every change, and refuses a change decided on another version.
    """

    node: NodeName
    shares: Annotated[tuple[Share, ...], Meta(max_length=MOST_SHARES)]
    state: LeaseState = LeaseState.RESERVED
    version: Fence = 0
    created_at: Seconds = 0.0
    expires_at: Seconds = 0.0
    """0 once bound."""
    activated_at: Seconds = 0.0
    """By the ledger's clock; 0 until it is active."""
    resized_at: Seconds = 0.0
    """By the ledger's clock, in whole milliseconds; or 0."""

    @property
    def users(self) -> tuple[PodUid, ...]:
        return (self.pod,) if self.claim is None else self.claim.consumers

    @property
    def containers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(share.container for share in self.shares))

    @property
    def time_slices(self) -> dict[DeviceUuid, Interval]:
        return time_slices_of(self.shares, self.intervals)

    def shares_of(self, container: str) -> tuple[Share, ...]:
        return tuple(share for share in self.shares if share.container == container)


def time_slices_of(
    shares: Iterable[Share], intervals: Mapping[str, Interval]
) -> dict[DeviceUuid, Interval]:
    """Return the length of time slices by GPU; none for instances of MIG."""
    return {
        share.device: intervals[share.container]
        for share in shares
        if share.mig is None and share.container in intervals
    }


END_MARGIN_S = 15.0
"""From a pod's deadline and grace period until its lease has ended: the kubelet compares deadlines
once a second, counts from its first status of the pod, and then reports the end."""


def ends_by(lease: Lease) -> float | None:
    """Return the Unix seconds by which its capacity is free, or None without a maximum run time.

    Before `activated_at` it is a guess.
    """
    term = lease.term
    if term.max_run_s is None:
        return None
    return _start(lease) + term.max_run_s + term.grace_s + END_MARGIN_S


def end_text(term: Term, now: float) -> str:
    """Return when a pod that starts now reaches its maximum run time, or "".

    In UTC with `+00:00`: before 3.11, Python's `fromisoformat` reads no `Z`.
    """
    if term.max_run_s is None:
        return ""
    return datetime.fromtimestamp(now + term.max_run_s, UTC).isoformat(timespec="seconds")


START_MARGIN_S = 60.0
"""From a lease until its pod's time begins: it has to be bound, and admitted by its node."""


def will_end_by(term: Term, now: float) -> float | None:
    if term.max_run_s is None:
        return None
    return now + START_MARGIN_S + term.max_run_s + term.grace_s + END_MARGIN_S


def expected_end(lease: Lease, learned_s: float | None = None) -> float | None:
    """Return the instant at which its pod should end, at the latest `ends_by`; or None.

    The author's expectation counts, then `learned_s`, then the maximum run time.
    """
    term = lease.term
    expected = term.expected_run_s if term.expected_run_s is not None else learned_s
    lengths = [length for length in (expected, term.max_run_s) if length is not None]
    return _start(lease) + min(lengths) if lengths else None


def _start(lease: Lease) -> float:
    return lease.activated_at or lease.created_at


def bookings(shares: Iterable[Share]) -> tuple[Booking, ...]:
    """Sum up what the shares take of each device, in order of first appearance.

    `shares` are in the order of the pod's containers, since init containers end before others.
    """
    beside: dict[DeviceUuid, list[Share]] = {}
    for share in shares:
        beside.setdefault(share.device, []).append(share)
    return tuple(_booking(device, held) for device, held in beside.items())


def allocated_shares(leases: Mapping[str, Lease]) -> tuple[Share, ...]:
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
        mode=_common_mode(shares),
    )


def _common_mode(shares: Iterable[Share]) -> SharingMode:
    modes = (share.mode for share in shares if share.mode != "exclusive")
    return next(modes, "exclusive")


def _strictest_sharing(shares: Iterable[Share]) -> SharingPolicy:
    manners = {share.sharing for share in shares}
    for manner in (SharingPolicy.EXCLUSIVE, SharingPolicy.IDLE_DEVICE, SharingPolicy.SHARED):
        if manner in manners:
            return manner
    return SharingPolicy.BEST_EFFORT


ShareKey = tuple[PodUid, str, DeviceUuid, int | None]
"""Pod, container, device, and position of a MIG instance."""
IDLE_AFTER_S = 600.0
"""After this time without use a share is idle, by default."""


def share_key(pod: PodUid, share: Share) -> ShareKey:
    position = None if share.mig is None else share.mig.position
    return pod, share.container, share.device, position


MOST_PROCESSES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    pid: Amount
    inner_pid: Amount = 0
    command: ShortText = ""
    memory_mib: Mib | None = None
    cores_percent: Percent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareMeasurement:
    pod: PodUid
    namespace: Namespace
    name: NameText
    container: ContainerText
    device: DeviceUuid
    memory_mib: Mib | None = None
    cores_percent: Percent | None = None
    position: Count | None = None
    processes: Amount = 0
    running: Annotated[tuple[ProcessUse, ...], Meta(max_length=MOST_PROCESSES)] = ()
    idle_since: Seconds | None = None
    """Unix seconds of the last kernel or change of memory; None while it is in use."""
    held_memory_mib: Mib | None = None
    """As read back; None where there is nothing to read."""
    held_cores_percent: Percent | None = None
    held_difference: LongText = ""
    read_back_at: Seconds = 0.0

    @property
    def key(self) -> ShareKey:
        return self.pod, self.container, self.device, self.position

    def is_idle(self, now: float, *, after_s: float = IDLE_AFTER_S) -> bool:
        return self.idle_since is not None and now - self.idle_since >= after_s

"""What the API returns: the types of `/api/v1`, of the page and of the commands' `-o json`; pure.

Amounts are MiB, percent of one device and Unix seconds. Of a namespace that the viewer may not see,
a share has its amounts and the state of its lease: no names, no times and no measured usage.
"""

from collections.abc import Iterable
from typing import Any, Self

import msgspec
from msgspec import UNSET, UnsetType

from shared.model.bounds import (
    Index,
    KeyText,
    MessageText,
    Mib,
    Percent,
    Priority,
    Seconds,
    ShortText,
    SignedAmount,
)
from shared.model.budgets.budget import BudgetHistory, BudgetSummary
from shared.model.devices.device import Hardware, Leftover
from shared.model.leases.lease import ClaimAllocation, MigPlacement, Share, ShareSize
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.quantity import timestamp
from shared.model.requests.placement import NodeVerdict, Refusal


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all types of this API."""

    @classmethod
    def from_attributes(cls, *sources: object, **others: Any) -> Self:
        """Return a view with `others`, and what `sources` have of its other fields by their names.

        Earlier sources come before later ones. What none has keeps its default.
        """
        fields = {
            name: getattr(source, name)
            for source in reversed(sources)
            for name in cls.__struct_fields__
            if hasattr(source, name)
        }
        return cls(**(fields | others))


class MeasuredView(View, frozen=True, kw_only=True):
    """The usage of a share, as the agent of its node measured it last."""

    memory_mib: int | None = None
    """Null if neither the driver nor HAMi-core reports it."""
    cores_percent: int | None = None
    processes: int = 0
    idle: bool = False
    """Whether it has not been used for longer than the request's `idle_after_s`."""
    idle_since: float | None = None
    """The last use; null while it is in use."""


class ShareView(View, frozen=True, kw_only=True):
    """One container's share of one device."""

    container: str = ""
    device: DeviceUuid
    index: int
    device_mib: int
    memory_mib: int
    cores_percent: int
    booked_cores: int
    """The cores that the share reserves; 0 for a MIG instance."""
    whole: bool = False
    slot: int | None = None
    mig: MigPlacement | None = None
    fence: int = 0
    init: bool = False
    share_id: str = ""
    requested_size: ShareSize | None = None
    measured: MeasuredView | None = None

    @property
    def part_of_device(self) -> float:
        """The larger part of the device's cores or memory, 0 to 1."""
        memory = self.memory_mib / max(self.device_mib, 1)
        return 1.0 if self.whole else min(1.0, max(self.booked_cores / 100, memory))


class HeldShare(ShareView, frozen=True, kw_only=True):
    """A share of a device, with the lease that holds it."""

    state: str
    pod: PodUid = PodUid("")
    namespace: Namespace = Namespace("")
    """Empty if the viewer may not see it."""
    name: str = ""
    claim: bool = False
    created_at: float = 0.0
    expires_at: float = 0.0
    dialect: str = msgspec.field(name="system", default="")
    gang: str = ""
    version: int = 0


class DeviceView(View, frozen=True, kw_only=True):
    """One device, its use, and its shares in the order of their slots."""

    uuid: DeviceUuid
    node: NodeName
    index: int
    model: str
    mode: str
    healthy: bool
    fault: str
    """Empty also if it names a pod that the viewer may not see."""
    excluded: str
    """Why annotations of the node close it to new shares; empty if none does, or if it is sick."""
    memory_mib: int
    unit_mib: int
    """MiB per unit of a memory request on this node."""
    used_memory_mib: int
    used_cores_percent: int
    slots: int
    used_shares: int
    fence: int
    layout: str
    instances: str
    """The instances of this layout, such as `3 x 2g.10gb + 1 x 1g.5gb`."""
    layouts: int
    """How many MIG layouts are possible."""
    numa: int | None
    leftovers: tuple[Leftover, ...] = ()
    """What earlier pods still hold of it, without the names that the viewer may not see."""
    shares: tuple[HeldShare, ...] = ()


class DeviceDetails(DeviceView, frozen=True, kw_only=True):
    """One device, with what its sensors read."""

    hardware: Hardware | None = None


class NodeView(View, frozen=True, kw_only=True):
    """A node with the UUIDs of its devices."""

    node: NodeName
    cordoned: str = ""
    """Why it gets no pods; empty if it does."""
    unschedulable: bool = False
    deleted: bool = False
    """The API server no longer has it; some of its leases have not ended yet."""
    devices: tuple[DeviceUuid, ...] = ()

    @property
    def closed_by(self) -> str:
        """Why it gets no new pods, also if `kubectl cordon` closed it; empty if it does."""
        return self.cordoned or ("kubectl cordon" if self.unschedulable else "")


class NodeDevices(View, frozen=True, kw_only=True):
    """A node with its devices, in the order of their indices."""

    node: NodeName
    cordoned: str = ""
    unschedulable: bool = False
    devices: tuple[DeviceDetails, ...] = ()


class GpusView(View, frozen=True, kw_only=True):
    """Every device and its shares."""

    read_at: float
    nodes: tuple[NodeDevices, ...] = ()
    unmeasured_nodes: tuple[NodeName, ...] = ()
    """Nodes with leases whose agents did not reply."""
    problems: tuple[str, ...] = ()
    """What is wrong, as text."""


class LeaseView(View, frozen=True, kw_only=True):
    """The right of a pod or a ResourceClaim to its shares."""

    pod: PodUid
    namespace: Namespace
    name: str
    claim: ClaimAllocation | None
    node: NodeName
    state: str
    version: int
    dialect: str = msgspec.field(name="system")
    gang: str
    created_at: float
    expires_at: float
    weighed: str = ""
    ends_by: float | None = None
    """When its devices are free at the latest: its pod has a maximum run time, which has begun."""
    expected_end: float | None = None
    """When its pod ends as its author, or the run times of pods before it, let expect."""
    unhealthy_devices: dict[DeviceUuid, str] = {}
    """The faults of its devices that are not healthy."""
    shares: tuple[ShareView, ...] = ()

    @property
    def users(self) -> tuple[PodUid, ...]:
        """The pods that have its shares: one, or the consumers of its claim."""
        return (self.pod,) if self.claim is None else self.claim.consumers

    @property
    def idle_since(self) -> float | None:
        """Since when none of its shares has been used, or None if it is not idle."""
        measured = [share.measured for share in self.shares if not share.init]
        since = [one.idle_since for one in measured if one and one.idle]
        known = [each for each in since if each is not None]
        return max(known) if known and len(known) == len(measured) else None


class StartView(View, frozen=True, kw_only=True):
    """The planned start of a waiting pod."""

    at: float
    """Unix seconds."""
    promised: bool
    """It starts by then at the latest, unless a node or device fails, a pod of higher priority
    comes, or an administrator acts; else it is expected to start then."""
    text: str

    @property
    def short(self) -> str:
        """The text in a column."""
        return f"{'by' if self.promised else 'about'} {timestamp(self.at)}"


class WaitingView(View, frozen=True, kw_only=True):
    """A waiting pod, and why it waits."""

    pod: PodUid
    namespace: Namespace
    name: str
    priority: int
    gang: str
    since: float
    position: int
    """Among all waiting pods, in the order in which freed capacity is offered."""
    reason: str
    hint: str
    permanent: bool
    code: str = ""
    """The reason of most nodes, such as `InsufficientCpu`; or `GpuQuota`, `Budget`, or
    `GangIncomplete`."""
    start: StartView | None = None
    """Null if no start is planned."""
    first_alike: PodUid
    """The first pod of its gang that waits for the same reason, or itself. Lists have one row for
    those of the same `first_alike`."""

    @property
    def text(self) -> str:
        """The reason, then what to try."""
        return Refusal(reason=self.reason, hint=self.hint).text


class LeasesView(View, frozen=True, kw_only=True):
    """The leases, oldest first, and the waiting pods."""

    read_at: float
    idle_after_s: float
    leases: tuple[LeaseView, ...] = ()
    waiting: tuple[WaitingView, ...] = ()
    unmeasured_nodes: tuple[NodeName, ...] = ()
    problems: tuple[str, ...] = ()


class ReasonCount(View, frozen=True, kw_only=True):
    """How many nodes refuse a pod for a reason."""

    reason: str
    nodes: int


class QueuePlace(View, frozen=True, kw_only=True):
    """The position of a waiting pod, and the usage of its namespace that determines it."""

    position: int
    of: int
    after: str = ""
    """Namespace and name of the pod before it; empty if there is none that the viewer may see."""
    after_reason: str = ""
    dominant_share: float
    """The largest part of all healthy devices' cores or memory that the namespace holds."""
    weighted_share: float
    weight: int
    has_budget: bool


class GangView(View, frozen=True, kw_only=True):
    """The pods of a gang that hold a lease or wait."""

    name: str
    min_member: int | None
    """Members that run together; null if no member waits."""
    holding: tuple[str, ...]
    waiting: tuple[str, ...]


class SpanView(View, frozen=True, kw_only=True):
    """One step of a pod."""

    span: str
    parent: str = ""
    service: str = ""
    name: str
    start_s: float
    duration_s: float
    ok: bool = True
    text: str = ""
    notes: tuple[str, ...] = ()
    """Events within it, each with the seconds since the start of the trace."""
    claim: str = ""
    """Name of the ResourceClaim that it is about."""


class TraceView(View, frozen=True, kw_only=True):
    """The spans of a pod that can be read here, or else the times of its steps."""

    trace: str
    url: str = ""
    """Its page at the collector of spans; empty without `--trace-url`."""
    spans: tuple[SpanView, ...] = ()


class WaitingDetails(WaitingView, frozen=True, kw_only=True):
    """A waiting pod, with the nodes that are nearest to fitting."""

    counts: tuple[ReasonCount, ...] = ()
    nearest: tuple[NodeVerdict, ...] = ()
    quota: Namespace = Namespace("")
    no_end: str = ""
    """Without a planned start: which leases would have to end, or when it could start."""
    queue: QueuePlace


class PodView(View, frozen=True, kw_only=True):
    """A pod with its lease, or why it waits, and its trace."""

    read_at: float
    pod: PodUid
    namespace: Namespace
    name: str
    lease: LeaseView | None = None
    waiting: WaitingDetails | None = None
    gang: GangView | None = None
    cordoned: str = ""
    devices: tuple[DeviceView, ...] = ()
    """The devices of its lease, without their shares."""
    finished: "FinishedPod | None" = None
    """Set if it finished within a day."""
    trace: TraceView


class QueueView(View, frozen=True, kw_only=True):
    """The waiting pods: how many, and the first ones that the viewer may see."""

    total: int
    hidden: int
    by_code: dict[str, int] = {}
    """How many of those that the viewer may see wait for each reason."""
    pods: tuple[WaitingView, ...] = ()


class EventView(View, frozen=True, kw_only=True):
    """One recent step of a pod."""

    number: int
    at: float
    kind: str
    namespace: Namespace
    name: str
    pod: PodUid | None
    node: str
    text: str
    latency_s: float | None
    beneficiary: str = ""
    """Namespace and name of the pod for which it was evicted."""

    @property
    def for_namespace(self) -> Namespace:
        """The namespace of the beneficiary; empty: there is none."""
        return Namespace(self.beneficiary.partition("/")[0])


class NamespaceView(View, frozen=True, kw_only=True):
    """A namespace's leases, waiting pods and budget."""

    namespace: Namespace
    leases: int = 0
    devices: int = 0
    memory_mib: int = 0
    cores_percent: int = 0
    waiting: int = 0
    budget: BudgetSummary | None = None


class NamespaceDetails(NamespaceView, frozen=True, kw_only=True):
    """A namespace, with the history of its budget in the open window."""

    budget_history: BudgetHistory | None = None


Column = tuple[float | None, ...]
"""One value for each instant; null where it is not known."""


class HistoryView(View, frozen=True, kw_only=True):
    """Amounts over time in columns: MiB, and percent of one device; the last ones are the latest.

    What is measured is absent if the viewer may not see it. Replicas have recorded their own.
    """

    range: str
    source: str
    """`memory`, or `prometheus`."""
    memory_capacity: int | None = None
    """Of the devices now; null of a pod and a namespace."""
    cores_capacity: int | None = None
    at: tuple[float, ...]
    memory: Column
    """Leased."""
    cores: Column
    used_memory: Column | UnsetType = UNSET
    """Measured."""
    used_cores: Column | UnsetType = UNSET
    idle: Column | UnsetType = UNSET
    """What idle shares hold: the larger part of a device's cores or memory."""
    temperature: Column | UnsetType = UNSET
    """Of a device, degrees Celsius."""
    power: Column | UnsetType = UNSET
    """Of a device, watts."""
    clock: Column | UnsetType = UNSET
    """Of a device's multiprocessors, MHz."""
    busy: Column | UnsetType = UNSET
    """Percent of the time in which a kernel ran on the device."""
    waiting: dict[str, Column] | UnsetType = UNSET
    """Of the cluster: waiting pods by reason."""


class FinishedPod(View, frozen=True, kw_only=True):
    """A pod whose lease has ended."""

    pod: PodUid
    namespace: Namespace
    name: str
    claim: bool = False
    """It is a ResourceClaim."""
    node: NodeName
    devices: tuple[DeviceUuid, ...]
    gpus: float
    """The larger part of each device's cores or memory, added up."""
    memory_mib: int
    cores_percent: int
    started: float
    """When the lease was created."""
    ended: float
    reason: str = ""
    """`Succeeded`, `Failed`, or why it was deleted; empty if it is not known."""
    gpu_hours: float
    used_memory_mib: int | None = None
    """The mean; null if it was not measured."""
    used_cores_percent: int | None = None
    idle_gpu_hours: float | None = None


class FinishedView(View, frozen=True, kw_only=True):
    """Pods that finished within a day while this replica of the API ran, the latest first."""

    read_at: float
    since: float
    total: int
    """All that were asked for; at most 500 are listed."""
    pods: tuple[FinishedPod, ...]


class ManifestView(View, frozen=True, kw_only=True):
    """The manifest of a pod to try, or null if no node serves a resource."""

    manifest: str | None


class PlannedShare(View, frozen=True, kw_only=True):
    """A share that a pod would get."""

    device: DeviceUuid
    index: Index
    memory_mib: Mib
    cores_percent: Percent

    @classmethod
    def of(cls, shares: Iterable[Share]) -> "tuple[PlannedShare, ...]":
        """Return the shares of a placement."""
        return tuple(map(cls.from_attributes, shares))


class PlannedVictim(View, frozen=True, kw_only=True):
    """A pod that would be evicted."""

    pod: KeyText
    cause: ShortText
    budget: ShortText
    priority: Priority
    bare: bool
    """No controller replaces it."""
    overdraft_permille: SignedAmount
    gpu_s_lost: Seconds
    devices: tuple[DeviceUuid, ...]


class PlanView(View, frozen=True, kw_only=True):
    """What a pod would get, and which pods would be evicted for it."""

    node: NodeName
    shares: tuple[PlannedShare, ...]
    victims: tuple[PlannedVictim, ...]


class ProtectedPod(View, frozen=True, kw_only=True):
    """A pod that ranks below the pending one and is not evicted, with the reason."""

    pod: KeyText
    reason: MessageText


class ResizeOrder(View, frozen=True, kw_only=True):
    """Another size for the shares of a running container."""

    container: ShortText = ""
    memory_mib: Mib | None = None
    cores_percent: Percent | None = None


class ResizeView(View, frozen=True, kw_only=True):
    """What a binder replied to a resize."""

    outcome: str
    """`resized`, `unchanged`, `refused`, or `unavailable` (it may succeed later)."""
    pod: PodUid
    namespace: Namespace
    name: str
    container: str
    node: str
    devices: tuple[int, ...]
    before: ShareSize | None
    after: ShareSize | None
    pending: tuple[str, ...]
    notes: tuple[str, ...]
    reason: str
    hint: str


class GrantOrder(View, frozen=True, kw_only=True):
    """GPU time to grant to a namespace."""

    minutes: ShortText
    reason: MessageText
    key: ShortText


class GrantView(View, frozen=True, kw_only=True):
    """What was granted, and what the namespace has left."""

    namespace: Namespace
    granted_minutes: str
    remaining_minutes: str | None
    """Null if the namespace has no limit."""
    missing_minutes: str | None = None
    """What must be granted until it is back in budget; null if it is."""


class VersionView(View, frozen=True, kw_only=True):
    """The versions of Leasehold that run."""

    version: str
    """That of the API."""
    services: dict[str, tuple[str, ...]]
    """Those of the replicas of each service: during an upgrade there may be two."""

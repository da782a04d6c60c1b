"""One pod with its lease, or why it waits, and its trace, as the API returns it; pure."""

from shared.model.change import Change
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.placement import NodeVerdict
from shared.model.views.gpus import DeviceView
from shared.model.views.leases import LeaseView, WaitingView
from shared.model.views.view import View


class ReasonCount(View, frozen=True, kw_only=True):
    reason: str
    nodes: int


class QueuePlace(View, frozen=True, kw_only=True):
    """The position of a waiting pod, and the usage of its namespace that determines it."""

    position: int
    of: int
    after: str = ""
    """Of the pod before it, with its namespace; empty if the viewer may not see it."""
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
    """Members that run together; None if no member waits."""
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
    """Each with the seconds since the start of the trace."""
    claim: str = ""


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
    """Which leases would have to end, or when it could start."""
    changes: tuple[Change, ...] = ()
    """Those that its hint has in words, if they were requested and are known."""
    queue: QueuePlace


class PodCost(View, frozen=True, kw_only=True):
    """GPU time of a pod, weighed as budgets weigh it, and what it costs at the prices now."""

    gpu_hours: float
    idle_gpu_hours: float | None
    """Of a running pod since the last use of each of its GPUs; None if it was not measured."""
    currency: str
    per_hour: float | None
    """None where a device has no price."""
    so_far: float | None
    power_w: float | None = None
    """Of what its devices draw, its part of what is leased."""


class ProcessView(View, frozen=True, kw_only=True):
    """A process of a pod on a GPU, as the driver lists it."""

    container: str
    index: int
    pid: int
    """On the node."""
    inner_pid: int
    """In its container, or 0 if it is not known."""
    command: str
    memory_mib: int | None
    cores_percent: int | None


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
    processes: tuple[ProcessView, ...] = ()
    """Those with the most memory, 8 of each share."""
    finished: "FinishedPod | None" = None
    cost: PodCost | None = None
    has_object: bool = False
    trace: TraceView
    problems: tuple[str, ...] = ()
    """Of components, as a result of which pods may not be placed, or what is shown is old."""


class FinishedPod(View, frozen=True, kw_only=True):
    """A pod whose lease has ended."""

    pod: PodUid
    namespace: Namespace
    name: str
    claim: bool = False
    node: NodeName
    devices: tuple[DeviceUuid, ...]
    gpus: float
    """The larger part of each device's cores or memory, added up."""
    memory_mib: int
    cores_percent: int
    started: float
    ended: float
    reason: str = ""
    """`Succeeded`, `Failed`, or why it was deleted."""
    gpu_hours: float
    used_memory_mib: int | None = None
    """The mean; None if it was not measured."""
    used_cores_percent: int | None = None
    idle_gpu_hours: float | None = None
    """While no container used the GPU; None if it was not measured."""

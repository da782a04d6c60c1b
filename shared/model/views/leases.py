"""Leases and waiting pods, as the API returns them; pure."""

import msgspec

from shared.model.devices.time_slices import Interval
from shared.model.leases.lease import RESIZE_WAITING, ClaimAllocation, WaitingSize
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.quantity import timestamp
from shared.model.requests.placement import Refusal
from shared.model.views.gpus import ShareView
from shared.model.views.view import View


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
    """Of its devices, at the latest: its pod has a maximum run time, which has begun."""
    expected_end: float | None = None
    """By what its author, or earlier pods' run times, let expect."""
    waiting_size: WaitingSize | None = None
    unhealthy_devices: dict[DeviceUuid, str] = msgspec.field(default_factory=dict)
    shares: tuple[ShareView, ...] = ()
    intervals: dict[str, Interval] = msgspec.field(default_factory=dict)

    @property
    def users(self) -> tuple[PodUid, ...]:
        return (self.pod,) if self.claim is None else self.claim.consumers

    @property
    def waiting_text(self) -> str:
        size = self.waiting_size
        if size is None:
            return ""
        measured = [share.measured for share in self.shares if share.container == size.container]
        used = [usage.memory_mib for usage in measured if usage and usage.memory_mib is not None]
        missing_mib = max(used, default=0) - size.memory_mib
        missing = f"{missing_mib} MiB less are in use"
        if missing_mib <= 0:
            missing = "the driver sets it" if used else "less memory is in use"
        gets = f"container {size.container} gets {size.memory_mib} MiB"
        return f"{RESIZE_WAITING}: {gets} when {missing}"

    @property
    def idle_since(self) -> float | None:
        measured = [share.measured for share in self.shares if not share.init]
        since = [usage.idle_since for usage in measured if usage and usage.idle]
        instants = [instant for instant in since if instant is not None]
        return max(instants) if instants and len(instants) == len(measured) else None


class StartView(View, frozen=True, kw_only=True):
    """The planned start of a waiting pod."""

    at: float
    promised: bool
    """It starts by then at the latest, unless a node or device fails, a pod of higher priority
    comes, or an administrator acts."""
    text: str

    @property
    def short(self) -> str:
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
    """Of most nodes, such as `InsufficientCpu`; or `GpuQuota`, `Budget`, `GangIncomplete`, or
    `KubeScheduler` if kube-scheduler places it and no extender refused it."""
    handed_over: str = ""
    """The fields for which kube-scheduler chooses its node, or `schedulerName`; empty if a placer
    does."""
    scheduler_reason: str = ""
    filter_reason: str = ""
    start: StartView | None = None
    first_alike: PodUid
    """Of its gang, for the same reason; lists have one row for these."""

    @property
    def text(self) -> str:
        return Refusal(reason=self.reason, hint=self.hint).text


class LeasesView(View, frozen=True, kw_only=True):
    """The leases, oldest first, and the waiting pods."""

    read_at: float
    idle_after_s: float
    leases: tuple[LeaseView, ...] = ()
    waiting: tuple[WaitingView, ...] = ()
    unmeasured_nodes: tuple[NodeName, ...] = ()
    problems: tuple[str, ...] = ()

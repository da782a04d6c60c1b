"""What only the page reads of the API; pure."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.views.leases import WaitingView
from shared.model.views.pods import FinishedPod
from shared.model.views.view import View


class LedgerPage(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of a namespace's budget, oldest first."""

    entries: tuple[dict[str, Any], ...]
    cursor: str | None
    """Null on the last page."""


class BudgetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace's budget: at `at`, as the timekeeper reported it last, or as read for details."""

    state: str
    lease_class: str
    new_pods: str
    window: str
    used_minutes: float
    remaining_minutes: float | None
    current_rate_milli_gpu: int
    exhausted_at: float | None
    at: float
    currency: str = ""
    """Of a budget in money: a unit of it is 60 GPU-minutes here."""


class BudgetPoint(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-minutes used until an instant."""

    at: float
    minutes: float


class BudgetHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU-minutes used in a budget's window, so far."""

    window: str
    start: float
    end: float | None
    limit_minutes: float | None
    points: tuple[BudgetPoint, ...]


class NodeView(View, frozen=True, kw_only=True):
    """A node with the UUIDs of its devices."""

    node: NodeName
    cordoned: str = ""
    """Why it gets no pods, or empty."""
    unschedulable: bool = False
    cordoned_by: str = ""
    other_manager: str = ""
    """What shows that another program gives out parts of its GPUs, too."""
    deleted: bool = False
    """The API server no longer has it; some of its leases have not ended yet."""
    devices: tuple[DeviceUuid, ...] = ()

    @property
    def closed_by(self) -> str:
        """Return why it gets no new pods, or an empty text."""
        by = f"cordoned by {self.cordoned_by}" if self.cordoned_by else "kubectl cordon"
        return self.cordoned or (by if self.unschedulable else "")


class QueueView(View, frozen=True, kw_only=True):
    """The waiting pods: how many, and the first ones that the viewer may see."""

    total: int
    hidden: int
    by_code: dict[str, int] = msgspec.field(default_factory=dict)
    """Only pods that the viewer may see."""
    pods: tuple[WaitingView, ...] = ()


class EventView(View, frozen=True, kw_only=True):
    """One recent step of a pod, change of a budget, or beginning or end of a problem."""

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
        return Namespace(self.beneficiary.partition("/")[0])


class NamespaceView(View, frozen=True, kw_only=True):
    """A namespace's leases, waiting pods and budget."""

    namespace: Namespace
    leases: int = 0
    devices: int = 0
    memory_mib: int = 0
    cores_percent: int = 0
    milli_gpu: int = 0
    """Of each device the larger part of its memory or cores, as `maxMilliGPU` of a GPUQuota."""
    waiting: int = 0
    budget: BudgetSummary | None = None


class NamespaceDetails(NamespaceView, frozen=True, kw_only=True):
    """A namespace, with the history of its budget in the open window."""

    budget_history: BudgetHistory | None = None


Column = tuple[float | None, ...]
"""Null where the value is not known."""


class HistoryView(View, frozen=True, kw_only=True):
    """Amounts over time in columns: MiB, and percent of one device; the last ones are the latest.

    What is measured is absent if the viewer may not see it. Replicas have recorded their own.
    """

    range: str
    """`period` if it has a beginning of its own."""
    start: float
    end: float
    source: str
    """`memory`, or `prometheus`."""
    memory_capacity: int | None = None
    """Null of a pod and a namespace."""
    cores_capacity: int | None = None
    at: tuple[float, ...]
    memory: Column
    """Leased."""
    cores: Column
    used_memory: Column | UnsetType = UNSET
    """Measured."""
    used_cores: Column | UnsetType = UNSET
    idle: Column | UnsetType = UNSET
    """The larger part of a device's cores or memory."""
    temperature: Column | UnsetType = UNSET
    """Degrees Celsius."""
    power: Column | UnsetType = UNSET
    """Watts."""
    clock: Column | UnsetType = UNSET
    """MHz of multiprocessors."""
    busy: Column | UnsetType = UNSET
    """Percent of the time in which a kernel ran."""
    waiting: dict[str, Column] | UnsetType = UNSET
    """By reason."""


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

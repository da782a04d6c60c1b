"""Events of pods, their leases and budgets."""

from dataclasses import dataclass
from typing import ClassVar

from shared.model.events.event import Delivery, Event
from shared.model.lease import Lease, ShareSize
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.placement import Refusal
from shared.model.quota import Quota
from shared.model.request import PodRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PodQueued(Event):
    """A pod waits for a node, and one of our scheduler names is on it."""

    subject: ClassVar[str] = "pod.queued.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    pod: PodUid
    namespace: Namespace
    name: str
    resource_version: str
    request: PodRequest
    trace: str = ""
    created_at: float = 0.0
    """Creation of the pod, Unix seconds."""
    offer: int = 0
    """0 when the watcher saw it; else the ledger's capacity number it is offered again for.

    Negative: the number of a telling that repeats what the watcher said before.
    """
    unexplained: bool = False
    """It has waited a while, and nobody has said why yet: what was said of it may be lost."""
    admitted: str = ""
    """The span in which the webhook admitted it, for its first span to link to."""

    @property
    def event_id(self) -> str:
        return f"{self.pod}:{self.resource_version}:{self.offer}"

    @property
    def waited(self) -> bool:
        return self.offer != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRejected(Event):
    """A pod's request can never be granted as it is written."""

    subject: ClassVar[str] = "pod.rejected.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    pod: PodUid
    namespace: Namespace
    name: str
    resource_version: str
    reason: str
    trace: str = ""
    admitted: str = ""
    """The span in which the webhook admitted it, for its first span to link to."""

    @property
    def event_id(self) -> str:
        return f"{self.pod}:{self.resource_version}:rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGated(Event):
    """A pod of ours is held by `BUDGET_GATE` until its namespace has budget again."""

    subject: ClassVar[str] = "pod.gated.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    pod: PodUid
    namespace: Namespace
    name: str
    resource_version: str
    priority: int = 0
    created_at: float = 0.0
    offer: int = 0
    """Numbers tellings of the same state."""

    @property
    def event_id(self) -> str:
        return f"{self.pod}:{self.resource_version}:gated:{self.offer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTerminated(Event):
    """A pod was deleted, or reached a phase in which its containers no longer run."""

    subject: ClassVar[str] = "pod.terminated.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    pod: PodUid
    namespace: Namespace
    name: str
    node: NodeName | None
    phase: str
    """`Succeeded` or `Failed` as its kubelet said; anything else: deleted without such a word."""
    trace: str = ""
    noticed_at: float = 0.0
    """0 when the watcher saw it; else when the listing began that showed a lease without a pod."""

    @property
    def event_id(self) -> str:
        return f"{self.pod}:gone:{self.phase}:{self.noticed_at or ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged(Event):
    """A node appeared or changed in what decides placing; the whole truth, not a difference."""

    subject: ClassVar[str] = "node.changed.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    node: NodeFacts
    deleted: bool = False
    observed_at: float = 0.0
    """When the watcher saw it, Unix seconds: what was seen earlier is passed over; 0: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPod:
    """A live pod with a node, under one of our scheduler names."""

    pod: PodUid
    namespace: Namespace
    name: str
    node: NodeName
    lease: str = ""
    """Value of the annotation `leasehold.dev/lease`, as found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsListed(Event):
    """The watcher has a complete list again: every live pod that is bound, and what it carries.

    Told in pieces; the ledger compares it with its leases, and rebuilds itself from it when empty.
    """

    subject: ClassVar[str] = "pods.listed.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    listing_id: str
    """Id of the listing, the same for all its pieces."""
    chunk: int
    chunks: int
    pods: tuple[BoundPod, ...]
    listed_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChosen(Event):
    """Shares are reserved for the pod until the lease's `expires_at`."""

    subject: ClassVar[str] = "placement.chosen.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    lease: Lease
    trace: str = ""

    @property
    def event_id(self) -> str:
        return f"{self.lease.pod}:{self.lease.version}:{self.lease.created_at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRefused(Event):
    """No node fits now; the pod waits, with this verdict, and is offered freed capacity."""

    subject: ClassVar[str] = "placement.refused.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    pod: PodUid
    namespace: Namespace
    name: str
    refusal: Refusal
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodBound(Event):
    """The API server accepted the binding."""

    subject: ClassVar[str] = "pod.bound.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    lease: Lease
    latency_s: float = 0.0
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingFailed(Event):
    """The API server refused the binding; the lease went back."""

    subject: ClassVar[str] = "binding.failed.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    pod: PodUid
    namespace: Namespace
    name: str
    reason: str
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseChanged(Event):
    """A lease on the node was granted, changed or ended: what its node agent must know."""

    subject: ClassVar[str] = "lease.changed.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    lease: Lease

    @property
    def route(self) -> str:
        return self.lease.node


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseResized(Event):
    """A container of a running pod has another size of each of its devices."""

    subject: ClassVar[str] = "lease.resized.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    lease: Lease
    container: str
    before: ShareSize
    after: ShareSize


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRebuilt(Event):
    """The ledger was empty and holds everything again; whoever knows of waiting pods says so."""

    subject: ClassVar[str] = "ledger.rebuilt.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    generation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResyncRequested(Event):
    """Somebody needs `PodsListed`, `NodeChanged` and `DeviceReported` of everything, now."""

    subject: ClassVar[str] = "resync.requested.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Event):
    """A replica of a service runs; told again and again, so that silence is noticed."""

    subject: ClassVar[str] = "heartbeat.sent.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    service: str
    instance: str
    """Name of the replica, the same as in its logs and spans."""
    node: str = ""
    """Where it looks after one node."""
    interval_s: float = 5.0
    """How long until it reports again."""
    stopping: bool = False
    """It was told to stop, and this is its last word."""
    unready_reasons: tuple[str, ...] = ()
    """What keeps it from being ready, in words."""
    version: str = ""
    """Of the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotasUpdated(Event):
    """All quotas on what namespaces may hold; the whole truth each time."""

    subject: ClassVar[str] = "quotas.updated.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    quotas: tuple[Quota, ...] = ()
    read_at: float = 0.0
    """When they were read, Unix seconds: what was read earlier is passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestDeviceReported(Event):
    """How much memory the largest device of the cluster has; told again every few seconds."""

    subject: ClassVar[str] = "largest_device.reported.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    memory_mib: int
    memory_units: int
    """The most units of a device, whose size its node says (Volcano: `gpuMemoryFactor`). It need
    not be the same device."""
    reported_at: float = 0.0
    """Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChanged(Event):
    """How a namespace's budget stands; told when that changes, and again every minute."""

    subject: ClassVar[str] = "budget.changed.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    namespace: Namespace
    state: str
    """ok, warning, exhausted or overdrawn."""
    previous: str
    """The state before; the same when this is only told again."""
    lease_class: str
    """Of all of the namespace's leases: guaranteed, reclaimable or expired."""
    new_pods: str = "admit"
    """admit, queue or deny."""
    evict_after_minutes: int | None = None
    """Running leases are to end so long after `since`; None: they are not."""
    warned_percent: int = 0
    share: int = 1
    since: float = 0.0
    """When the state was entered, Unix seconds."""
    at: float = 0.0
    window: str = ""
    used_units: int = 0
    """Milli-GPU-milliseconds."""
    remaining_units: int | None = None
    """None: there is no limit."""
    current_rate_milli_gpu: int = 0
    exhausted_at: float | None = None
    """When nothing will be left if nothing changes."""

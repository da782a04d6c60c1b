"""Requests from one service to another over NATS request-reply, and their replies; pure."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from shared.model.bounds import (
    MOST_ALLOCATIONS,
    MOST_DEVICES,
    MOST_ENTRIES,
    Amount,
    ContainerText,
    CopyText,
    Index,
    MessageText,
    Mib,
    NameText,
    Percent,
    Seconds,
    ShortText,
    TraceText,
)
from shared.model.budgets.quota import QuotaExcess
from shared.model.devices.device import Hardware
from shared.model.devices.node import AntiAffinityTerm
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.event import Event, NodeEvent
from shared.model.events.node_events import LeaseHolder
from shared.model.events.pod_events import PodQueued
from shared.model.leases.lease import Lease, ShareMeasurement, ShareSize, WaitingSize
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.placement import Placement
from shared.model.views.plans import PlanView, ProtectedPod

PodsOfNode = Annotated[tuple[PodUid, ...], Meta(max_length=MOST_ALLOCATIONS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesRequest(NodeEvent, subject="leases.request.v1", is_of_agent=True):
    """Any binder replies."""

    pods: PodsOfNode = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesReply(Event, subject="leases.reply.v1"):
    leases: tuple[Lease, ...] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRestoreRequest(NodeEvent, subject="claim_restore.request.v1", is_of_agent=True):
    """The ledger writes a claim's lease again if it was lost. The reply is a `LeasesReply`."""

    claim: LeaseHolder


@dataclass(frozen=True, slots=True, kw_only=True)
class BindRequest(NodeEvent, subject="bind.request.v1"):
    """A binder requests whether pods may be bound to the agent's node now."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BindReply(Event, subject="bind.reply.v1"):
    deferred_pods: PodsOfNode = ()
    """Those that the kubelet would refuse now; the binder requests them again."""
    reason: MessageText = ""
    window_open: bool = True
    """The binder need not request other pods for a moment."""
    retry_soon: bool = False
    """The deferred pods come next, after the kubelet has allocated those before them."""
    node_closed: bool = False
    unserved_pods: PodsOfNode = ()
    """More deferred pods: the kubelet cannot allocate a resource that they request."""
    unserved_reason: MessageText = ""
    unserved_s: Seconds = 0.0
    """For how long the kubelet has been unable to."""
    refusals: Annotated[Mapping[PodUid, MessageText], Meta(max_length=MOST_ALLOCATIONS)] = field(
        default_factory=dict
    )
    """More deferred pods: the agent's records contradict their leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationRequest(NodeEvent, subject="termination.request.v1"):
    """A binder requests which containers have terminated, and which claims are not prepared."""

    pod: PodUid
    more_pods: tuple[PodUid, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationReply(Event, subject="termination.reply.v1"):
    terminated: bool
    terminated_pods: PodsOfNode = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesRequest(NodeEvent, subject="slices.request.v1"):
    """A binder has a node agent write ResourceSlices by the ledger's current leases.

    Sent before a claim is refused, so that the scheduler does not allocate the same share again.
    The reply follows once the API server has the slices.
    """

    renewed: bool = False
    """Also without a change, so that kube-scheduler tries pods with ResourceClaims again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesReply(Event, subject="slices.reply.v1"):
    written: bool
    reason: MessageText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLeaseRequest(Event, subject="claim_lease.request.v1"):
    claim: AllocatedClaim
    trace: TraceText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLeaseReply(Event, subject="claim_lease.reply.v1"):
    """Empty if it is decided after the write."""

    devices: tuple[CopyText, ...] = ()
    """Entries for its `status.devices`, each a JSON object."""
    refusal: MessageText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsRequest(NodeEvent, subject="limits.request.v1"):
    """A binder has a node agent apply the limits of a lease to running containers.

    With `resize_id`, `lease` is a smaller size that the lease may get: its limits hold until the
    lease changes, or the resize is `finished` or has timed out.
    """

    lease: Lease
    resize_id: NameText = ""
    finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsReply(Event, subject="limits.reply.v1"):
    applied: bool
    reason: MessageText = ""
    in_use_mib: Mib = 0
    """On the device that prevents it: the smallest possible limit."""
    may_follow: bool = False
    """The driver keeps a larger limit now, and may set this one later."""
    container: ContainerText = ""
    kept: ShareSize | None = None
    """Other pods have been given the rest of its device."""

    def resize_back(self, pod: PodUid) -> "ResizeRequest | None":
        if self.kept is None:
            return None
        return ResizeRequest(
            pod=pod,
            container=self.container,
            memory_mib=self.kept.memory_mib,
            cores_percent=self.kept.cores_percent or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRequest(NodeEvent, subject="usage.request.v1"):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReply(Event, subject="usage.reply.v1"):
    measured_at: Seconds
    shares: Annotated[tuple[ShareMeasurement, ...], Meta(max_length=MOST_ALLOCATIONS)] = ()
    hardware: Annotated[tuple[Hardware, ...], Meta(max_length=MOST_DEVICES)] = ()


ReadUsage = Callable[[Iterable[NodeName]], Awaitable[Mapping[NodeName, UsageReply | None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequest(Event, subject="resize.request.v1"):
    pod: PodUid
    container: ContainerText = ""
    """Empty for the only container with a share."""
    memory_mib: Mib | None = None
    cores_percent: Percent | None = None
    actor: NameText = ""

    @classmethod
    def of_waiting(cls, pod: PodUid, size: WaitingSize) -> "ResizeRequest":
        return cls(
            pod=pod,
            container=size.container,
            memory_mib=size.memory_mib,
            cores_percent=size.cores_percent or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeReply(Event, subject="resize.reply.v1"):
    outcome: ShortText
    """`resized`, `unchanged`, `waiting` (for less memory in use), `refused`, or `unavailable`."""
    reason: MessageText = ""
    hint: MessageText = ""
    container: ContainerText = ""
    node: NameText = ""
    devices: tuple[Index, ...] = ()
    before: ShareSize | None = None
    after: ShareSize | None = None
    pending: tuple[MessageText, ...] = ()
    notes: tuple[MessageText, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodBindingRequest(Event, subject="pod_binding.request.v1"):
    """The extender has a binder lease the shares, and bind the pod to their node."""

    queued: PodQueued
    placement: Placement
    """Without shares: those that the pod has on this node, or that are claimed for it."""
    repels: Annotated[tuple[AntiAffinityTerm, ...], Meta(max_length=MOST_ENTRIES)] = ()
    """Its required anti-affinity, in all namespaces where it selects namespaces by labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodBindingReply(Event, subject="pod_binding.reply.v1"):
    bound: bool = False
    reason: MessageText = ""
    node: NodeName | None = None
    """Where the pod has a lease; it can be bound to no other node."""
    lease: Lease | None = None
    no_capacity: bool = False
    """The shares do not fit any more; others on the same node may."""
    quotas: tuple[QuotaExcess, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunRequest(Event, subject="preemption_plan.request.v1"):
    pod: PodUid
    min_runtime_s: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunReply(Event, subject="preemption_plan.reply.v1"):
    waits: bool = False
    plan: PlanView | None = None
    reason: MessageText = ""
    protected: tuple[ProtectedPod, ...] = ()
    protected_left_out: Amount = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRequest(Event, subject="grant.request.v1"):
    """The user's right was checked; any timekeeper replies."""

    namespace: Namespace
    minutes: ShortText
    """GPU-minutes, such as 120 or -0.5."""
    actor: NameText
    reason: MessageText
    key: ShortText
    """Grants with the same key are added once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantReply(Event, subject="grant.reply.v1"):
    refusal: MessageText = ""
    granted: ShortText = ""
    remaining: ShortText = ""
    """GPU-minutes; empty without a limit."""
    missing: ShortText = ""
    """Until the namespace is back in budget."""

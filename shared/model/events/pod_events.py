"""Events about pods, their leases and budgets; pure."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from shared.model.bounds import (
    MOST_ENTRIES,
    Amount,
    ContainerText,
    CopyText,
    Difference,
    GenerationText,
    Labels,
    LongText,
    MessageText,
    Mib,
    NameText,
    Priority,
    Revision,
    Seconds,
    ShortText,
    SignedAmount,
    TraceText,
    Units,
)
from shared.model.budgets.quota import Quota
from shared.model.devices.node import UNKNOWN_REVISION, NodeFacts, NodeRevision
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.event import Delivery, Event, PodEvent
from shared.model.leases.lease import Lease, ShareSize
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.placement import Refusal
from shared.model.requests.request import PodRequest

PLANNED_START = "Planned start: "
"""Follows the reason why a pod waits, in its condition."""

MUST_WAIT = ", but it must wait: "
"""Precedes the reason why a pod with a reservation is not bound, in its condition."""


def message_digest(message: str) -> int:
    """Return a number, never 0, that differs for different reasons."""
    reason, _, _ = message.partition(PLANNED_START)
    return zlib.crc32(reason.rstrip().encode()) or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PodQueued(PodEvent, subject="pod.queued.v1", delivery=Delivery.WORK):
    """A pod with one of our scheduler names has no node yet."""

    resource_version: NameText
    request: PodRequest
    trace: TraceText = ""
    created_at: Seconds = 0.0
    requeue_number: SignedAmount = 0
    """0 at first; positive: the ledger's capacity number for which it is queued again; negative:
    the number of the resync."""
    shown: Amount = 0
    """In a resync, the digest of the reason in the pod's condition."""
    labels: Labels = field(default_factory=dict)
    by_kube_scheduler: bool = False
    """A kube-scheduler chooses its node: no placer does."""
    handed_over: LongText = ""
    """The fields for which kube-scheduler chooses its node."""
    scheduler: NameText = ""
    """The `schedulerName` of a pod that waits for ResourceClaims and is not Leasehold's."""

    @property
    def follows_wait(self) -> bool:
        return self.requeue_number != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRejected(PodEvent, subject="pod.rejected.v1", delivery=Delivery.WORK):
    resource_version: NameText
    reason: MessageText
    trace: TraceText = ""
    foreign: bool = False
    """Of another scheduler, which may request GPUs by resources that nothing serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGated(PodEvent, subject="pod.gated.v1", delivery=Delivery.WORK):
    """A pod has the scheduling gate `BUDGET_GATE` until its namespace has budget again."""

    resource_version: NameText
    priority: Priority = 0
    created_at: Seconds = 0.0
    requeue_number: SignedAmount = 0
    """0, or the negative number of the resync that repeats it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTerminated(PodEvent, subject="pod.terminated.v1", delivery=Delivery.WORK):
    node: NodeName | None
    phase: ShortText
    """`Succeeded` or `Failed` as the kubelet reported; empty if the pod was deleted before."""
    rejection: LongText = ""
    """`REASON: MESSAGE` of the kubelet that rejected the pod."""
    trace: TraceText = ""

    @property
    def follows_start(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged(Event, subject="node.changed.v1", delivery=Delivery.WORK):
    node: NodeFacts
    deleted: bool = False
    revision: NodeRevision = UNKNOWN_REVISION
    """Lower revisions than a recent one are ignored; of equal ones the later event counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesListed(Event, subject="nodes.listed.v1", delivery=Delivery.WORK):
    """Published with every complete list of pods."""

    nodes: tuple[NodeName, ...]
    revision: Revision = 0
    """The highest of the watch of nodes; 0 if unknown."""


LEASE_PRESENT = "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPod:
    """A pod with one of our scheduler names, or an allocated ResourceClaim."""

    pod: PodUid
    namespace: Namespace
    name: NameText
    node: NodeName
    lease: CopyText = ""
    """Value of the annotation `leasehold.dev/lease`, or `LEASE_PRESENT`."""
    generation: GenerationText = ""
    """Of a claim's allocation; empty for a pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPods:
    bound: tuple[BoundPod, ...] = ()
    unbound: tuple[PodUid, ...] = ()
    claims: tuple[AllocatedClaim, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsListed(Event, subject="pods.listed.v1", delivery=Delivery.WORK):
    """All pods that have not terminated, in chunks.

    The binder compares it with leases and waiting pods, and rebuilds an empty ledger from it.
    """

    listing_id: NameText
    chunk: Amount
    chunks: Amount
    pods: ListedPods
    request_ids: tuple[NameText, ...] = ()
    """Of the `ResyncRequested` that had arrived when the list began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChosen(Event, subject="placement.chosen.v1", delivery=Delivery.WORK):
    lease: Lease
    trace: TraceText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRefused(PodEvent, subject="placement.refused.v1", delivery=Delivery.WORK):
    """No node fits now. The pod waits with this verdict until capacity is freed."""

    refusal: Refusal
    trace: TraceText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodHandedOver(Event, subject="pod.handed_over.v1", delivery=Delivery.WORK):
    queued: PodQueued
    reason: MessageText = ""
    """Of the condition PodScheduled; empty before kube-scheduler has tried it."""
    bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFilteredOut(Event, subject="pod.filtered_out.v1", delivery=Delivery.WORK):
    """The extender refused the nodes that kube-scheduler had left."""

    queued: PodQueued
    refusal: Refusal
    capacity: SignedAmount
    """The ledger's capacity number that the verdict is based on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodBound(Event, subject="pod.bound.v1", delivery=Delivery.COPY):
    lease: Lease
    latency_s: Difference = 0.0
    """Since the reservation, by the ledger's clock."""
    trace: TraceText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingFailed(PodEvent, subject="binding.failed.v1"):
    reason: MessageText
    trace: TraceText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseChanged(Event, subject="lease.changed.v1"):
    lease: Lease

    @property
    def route(self) -> str:
        return self.lease.node


def lease_changes(leases: Iterable[Lease]) -> list[LeaseChanged]:
    return [LeaseChanged(lease=lease) for lease in leases]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseResized(Event, subject="lease.resized.v1"):
    lease: Lease
    container: ContainerText
    before: ShareSize
    after: ShareSize
    actor: NameText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRebuilt(Event, subject="ledger.rebuilt.v1"):
    generation: NameText


@dataclass(frozen=True, slots=True, kw_only=True)
class ResyncRequested(Event, subject="resync.requested.v1"):
    """`PodsListed`, `NodeChanged`, `DeviceReported` and `BudgetChanged` are published again."""

    reason: MessageText
    request_id: NameText = ""
    """Returned in the `PodsListed` of lists that begin after this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Event, subject="heartbeat.sent.v1"):
    service: ShortText
    instance: NameText
    node: NameText = ""
    interval_s: Seconds = 5.0
    stopping: bool = False
    unready_reasons: Annotated[tuple[LongText, ...], Meta(max_length=16)] = ()
    version: ShortText = ""
    settings: Annotated[Mapping[NameText, ShortText], Meta(max_length=MOST_ENTRIES)] = field(
        default_factory=dict
    )
    """Digest of each setting in the environment of a pod, by the variable; empty elsewhere."""
    sent_at: Seconds = 0.0
    """0 of earlier versions."""

    @property
    def route(self) -> str:
        """Its sender: its user at NATS."""
        return f"{self.service}.{self.node}" if self.node else self.service


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotasUpdated(Event, subject="quotas.updated.v1", delivery=Delivery.WORK):
    quotas: tuple[Quota, ...] = ()
    read_at: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestDeviceReported(Event, subject="largest_device.reported.v1"):
    """The largest device of the cluster; published every few seconds."""

    memory_mib: Mib
    memory_units: Mib
    """By the unit of its node (Volcano: `gpuMemoryFactor`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChanged(Event, subject="budget.changed.v1"):
    """The state of a namespace's budget; published when it changes, every minute and on request."""

    namespace: Namespace
    state: ShortText
    """ok, warning, exhausted, overdrawn or invalid."""
    previous_state: ShortText
    """Equal to `state` in a repetition."""
    lease_class: ShortText
    """Of all its leases: guaranteed, reclaimable or expired."""
    new_pods: ShortText = "admit"
    """admit, queue or deny."""
    evict_after_minutes: Amount | None = None
    """After `since`; None if running pods are not evicted."""
    warned_percent: Amount = 0
    weight: Amount = 1
    state_since: Seconds = 0.0
    reported_at: Seconds = 0.0
    window: LongText = ""
    used_units: Units = 0
    remaining_units: Units | None = None
    current_rate_milli_gpu: Amount = 0
    exhausted_at: Seconds | None = None
    """In the past, or at the current rate."""
    currency: ShortText = ""
    """Empty for a budget in GPU-minutes."""

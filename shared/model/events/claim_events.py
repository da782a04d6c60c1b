"""Events about ResourceClaims whose devices are ours; pure.

A node agent reports a prepared claim as a container's allocation: `Allocation.pod` is the claim's
uid, `container` the request.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from shared.model.bounds import (
    MOST_CONSUMERS,
    Amount,
    ContainerText,
    CopyText,
    GenerationText,
    KeyText,
    MessageText,
    NameText,
    ShortText,
    TraceText,
)
from shared.model.devices.time_slices import Interval
from shared.model.events.event import Delivery, Event
from shared.model.names import Namespace, NodeName, PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedDevice:
    request: ContainerText
    device: KeyText
    share_id: ShortText = ""
    memory_mib: Amount | None = None
    """Consumed capacity, rounded up; None for the whole device."""
    cores_percent: Amount = 0
    interval: Interval | None = None


Results = Annotated[tuple[AllocatedDevice, ...], Meta(max_length=32)]
"""AllocationResultsMaxSize."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedClaim:
    """A ResourceClaim with devices of our driver, all on one node."""

    claim: PodUid
    namespace: Namespace
    name: NameText
    node: NodeName
    generation: GenerationText
    devices: Results
    admin_devices: Results = ()
    """For administrative access, which takes nothing, with a binding condition of ours."""
    consumers: Annotated[tuple[PodUid, ...], Meta(max_length=MOST_CONSUMERS)] = ()
    consumer_names: Annotated[tuple[NameText, ...], Meta(max_length=MOST_CONSUMERS)] = ()
    is_of_one_pod: bool = False
    """Made from a template for one pod, which owns it."""
    resource_version: NameText = ""
    answer: KeyText = ""
    """The condition that is True for all devices: `leasehold.dev/Leased` or
    `leasehold.dev/Refused`."""
    lease: CopyText = ""
    refusal: MessageText = ""
    warning: MessageText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAllocated(Event, subject="claim.allocated.v1", delivery=Delivery.WORK):
    claim: AllocatedClaim
    trace: TraceText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimDeallocated(Event, subject="claim.deallocated.v1", delivery=Delivery.WORK):
    claim: PodUid
    namespace: Namespace
    name: NameText
    node: NodeName
    generation: GenerationText
    trace: TraceText = ""

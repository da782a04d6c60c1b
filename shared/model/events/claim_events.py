"""Events about ResourceClaims whose devices are ours; pure.

A node agent reports a prepared claim as it reports a container's allocation (`ShareActivated`, and
`DeviceReported.allocations`): `Allocation.pod` is the claim's uid, `container` the request. It
confirms in `TerminationReply` that a claim is not prepared.
"""

from dataclasses import dataclass
from typing import ClassVar

from shared.model.events.event import Delivery, Event
from shared.model.names import Namespace, NodeName, PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedDevice:
    """One result of our driver in `status.allocation.devices.results`."""

    request: str
    device: str
    """Name of the device in its ResourceSlice; see `shared.model.claim.device_name`."""
    share_id: str = ""
    memory_mib: int | None = None
    """Consumed capacity, rounded up; None: the whole device, which no other claim can share."""
    cores_percent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedClaim:
    """A ResourceClaim with devices of our driver allocated, all on one node."""

    claim: PodUid
    """The uid of the claim."""
    namespace: Namespace
    name: str
    node: NodeName
    generation: str
    """See `shared.model.claim.generation_of`."""
    devices: tuple[AllocatedDevice, ...]
    """What the lease covers; empty: the claim needs none."""
    admin_devices: tuple[AllocatedDevice, ...] = ()
    """Devices for administrative access, which takes nothing, with a binding condition of ours."""
    consumers: tuple[PodUid, ...] = ()
    """Pods in `status.reservedFor`, sorted."""
    consumer_names: tuple[str, ...] = ()
    """Their names, in the same order."""
    resource_version: str = ""
    answer: str = ""
    """The condition that is True for all devices: `leasehold.dev/Leased`, `leasehold.dev/Refused`,
    or empty."""
    lease: str = ""
    """The copy of the lease in `status.devices`, as found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAllocated(Event):
    """A ResourceClaim was allocated devices of our driver, or its consumers have changed."""

    subject: ClassVar[str] = "claim.allocated.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    claim: AllocatedClaim
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimDeallocated(Event):
    """The allocation of a ResourceClaim was removed, or the claim was deleted."""

    subject: ClassVar[str] = "claim.deallocated.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    claim: PodUid
    """The uid of the claim."""
    namespace: Namespace
    name: str
    node: NodeName
    generation: str
    """Of the allocation that was removed."""
    trace: str = ""

"""Events that a node agent publishes; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta

from shared.model.bounds import (
    MOST_ALLOCATIONS,
    MOST_DEVICES,
    ChoiceText,
    ContainerText,
    Fence,
    Index,
    KeyText,
    LongText,
    MessageText,
    NameText,
    Seconds,
    ShortText,
    TraceText,
)
from shared.model.devices.device import Device, UnreadDevice
from shared.model.events.event import Delivery, NodeEvent
from shared.model.leases.lease import Lease
from shared.model.names import DeviceUuid, Namespace, PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    pod: PodUid
    """Of the lease's holder: a pod, or a prepared ResourceClaim."""
    namespace: Namespace
    name: NameText
    container: ContainerText
    resource: KeyText
    device_ids: Annotated[tuple[ChoiceText, ...], Meta(max_length=4096)]
    lease: Lease
    """As of the call of Allocate or Prepare."""
    activated_at: Seconds = 0.0


Fences = Annotated[Mapping[DeviceUuid, Fence], Meta(max_length=MOST_ALLOCATIONS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReported(
    NodeEvent, subject="device.reported.v1", delivery=Delivery.WORK, is_of_agent=True
):
    devices: Annotated[tuple[Device, ...], Meta(max_length=MOST_DEVICES)]
    served: Annotated[tuple[KeyText, ...], Meta(max_length=64)]
    newly_served: Annotated[tuple[KeyText, ...], Meta(max_length=64)] = ()
    """Resources that the kubelet has just received, and does not show in node status yet."""
    allocations: Annotated[tuple[Allocation, ...], Meta(max_length=MOST_ALLOCATIONS)] = ()
    reported_at: Seconds = 0.0
    pods_unreadable: bool = False
    """Leases are matched by their requests."""
    other_plugin: ClassVar[bool] = False
    fences: Fences = field(default_factory=dict)
    """Also for pods that ended."""
    config_errors: MessageText = ""
    unread: Annotated[tuple[UnreadDevice, ...], Meta(max_length=MOST_DEVICES)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesRegistered(DeviceReported, subject="devices.registered.v1", delivery=Delivery.WORK):
    """The devices of a node that runs another device plugin instead of our agent.

    The watcher publishes it, so that what an agent reports is never taken for it.
    """

    other_plugin: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareActivated(
    NodeEvent, subject="share.activated.v1", delivery=Delivery.WORK, is_of_agent=True
):
    allocation: Allocation
    trace: TraceText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRefused(NodeEvent, subject="share.refused.v1", delivery=Delivery.WORK, is_of_agent=True):
    """The agent refused an Allocate call of the kubelet, or to prepare a ResourceClaim."""

    reason: MessageText
    pod: PodUid | None = None
    namespace: Namespace | None = None
    name: NameText = ""
    container: ContainerText = ""
    claim: bool = False
    version: Fence | None = None
    """Of a claim's lease: another may have replaced it before this is handled."""


class ViolationReason(StrEnum):
    UNLEASED = "GpuUsedWithoutLease"
    VISIBLE = "GpuVisibleWithoutLease"
    PRIVILEGED = "GpuVisibleToPrivileged"
    OVERRUN = "GpuMemoryOverLease"
    TAMPERED = "GpuLimitTampered"
    ISOLATION_LOST = "GpuIsolationLost"
    STUCK = "GpuRegionStuck"
    CORES_NOT_LIMITED = "GpuCoresNotLimited"
    LIMIT_MISSING = "GpuLimitMissing"
    LIMIT_DIFFERS = "GpuLimitDiffers"
    LIMIT_CHAIN_BROKEN = "GpuLimitChainBroken"
    LIMIT_TOO_LATE = "GpuLimitTooLate"
    LIMIT_REFUSED = "GpuLimitHookRefused"
    LIMIT_FOREIGN = "GpuLimitForeign"
    MPS_BYPASSED = "GpuMpsBypassed"
    MPS_WEDGED = "GpuMpsWedged"


ViolationKey = tuple[str, PodUid, str, DeviceUuid | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViolationFound(
    NodeEvent, subject="violation.found.v1", delivery=Delivery.WORK, is_of_agent=True
):
    pod: PodUid
    namespace: Namespace
    name: NameText
    container: ContainerText
    reason: ShortText
    message: MessageText
    device: DeviceUuid | None = None
    """None for all devices of the container."""
    found_at: Seconds = 0.0
    claim: bool = False
    """`pod` and `name` are of a ResourceClaim, and `container` is its request."""

    @property
    def key(self) -> ViolationKey:
        """What distinguishes it; its message may change while it lasts."""
        return self.reason, self.pod, self.container, self.device


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    pod: PodUid
    namespace: Namespace
    name: NameText
    claim: bool = False

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged(
    NodeEvent, subject="health.changed.v1", delivery=Delivery.WORK, is_of_agent=True
):
    device: DeviceUuid
    index: Index
    healthy: bool
    fault: LongText = ""
    holders: Annotated[tuple[LeaseHolder, ...], Meta(max_length=MOST_ALLOCATIONS)] = ()
    changed_at: Seconds = 0.0

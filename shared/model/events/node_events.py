"""Events that a node agent says: what its node has, what it gave out, what went wrong."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from shared.model.device import Device
from shared.model.events.event import Delivery, Event
from shared.model.lease import Lease
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a node agent told the kubelet for one container, as its checkpoint keeps it."""

    pod: PodUid
    namespace: Namespace
    name: str
    container: str
    resource: str
    device_ids: tuple[str, ...]
    lease: Lease
    """The lease as it was when Allocate was answered."""
    activated_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReported(Event):
    """All devices of a node, and what its agent has told the kubelet; the whole truth each time."""

    subject: ClassVar[str] = "device.reported.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    node: NodeName
    devices: tuple[Device, ...]
    served: tuple[str, ...]
    """Resources that the agent's device plugin serves."""
    allocations: tuple[Allocation, ...] = ()
    reported_at: float = 0.0
    pods_unreadable: bool = False
    """The kubelet's list of pods cannot be read: leases are matched by what they ask for."""
    other_plugin: bool = False
    """No agent of ours speaks for the node: this is what another device plugin registered."""

    @property
    def route(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareActivated(Event):
    """The kubelet was given one container's shares."""

    subject: ClassVar[str] = "share.activated.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    node: NodeName
    allocation: Allocation
    trace: str = ""

    @property
    def route(self) -> str:
        return self.node

    @property
    def event_id(self) -> str:
        return f"{self.allocation.pod}:{self.allocation.container}:{self.allocation.activated_at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRefused(Event):
    """The kubelet asked for a container, and the agent refused."""

    subject: ClassVar[str] = "share.refused.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    node: NodeName
    reason: str
    pod: PodUid | None = None
    namespace: Namespace | None = None
    name: str = ""
    container: str = ""

    @property
    def route(self) -> str:
        return self.node


class ViolationReason(StrEnum):
    """What can be broken: the reason of the Kubernetes Event."""

    UNLEASED = "GpuUsedWithoutLease"
    OVERRUN = "GpuMemoryOverLease"
    TAMPERED = "GpuLimitTampered"
    ISOLATION_LOST = "GpuIsolationLost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViolationFound(Event):
    """A container uses a device beyond its lease, or does not keep to how it is held."""

    subject: ClassVar[str] = "violation.found.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    node: NodeName
    pod: PodUid
    namespace: Namespace
    name: str
    container: str
    reason: str
    """A `Rule`."""
    message: str
    found_at: float = 0.0

    @property
    def route(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    """A pod that holds a lease."""

    pod: PodUid
    namespace: Namespace
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged(Event):
    """A device was cordoned, or is healthy again; told to the owners of what is leased of it."""

    subject: ClassVar[str] = "health.changed.v1"
    delivery: ClassVar[Delivery] = Delivery.WORK

    node: NodeName
    device: DeviceUuid
    index: int
    healthy: bool
    fault: str = ""
    """Why it was cordoned."""
    holders: tuple[LeaseHolder, ...] = ()
    changed_at: float = 0.0

    @property
    def route(self) -> str:
        return self.node

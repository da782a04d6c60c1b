"""The data of schedulers' and node monitors' metrics, and the tables of vendors' metrics; pure.

A vendor's metrics are a table of `PublishedMetric`s, with the names, labels and units that users'
dashboards know. Where a value is a label, or a percentage is called a ratio, that is the vendor's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shared.dialects.nvidia.annotations import device_type
from shared.model.leases.lease import MIB, Booking, Lease, Share
from shared.model.views import DeviceView, MeasuredView

Labels = dict[str, str]


@dataclass(frozen=True)
class PublishedMetric:
    """One metric about every subject of a kind; without a value, there is no series."""

    name: str
    help: str
    attribute: str
    """The subject's attribute with the value; `memory.total` is that of its attribute `memory`."""
    label_attributes: Mapping[str, str]
    """The attribute of each label."""

    def value(self, subject: object) -> float | None:
        """Return the value."""
        value: float | None = _read(subject, self.attribute)
        return value

    def labels(self, subject: object) -> Labels:
        """Return the labels; one that is not known is empty."""
        labels = ((name, _read(subject, path)) for name, path in self.label_attributes.items())
        return {name: "" if value is None else str(value) for name, value in labels}


def _read(subject: Any, path: str) -> Any:
    for name in path.split("."):
        subject = None if subject is None else getattr(subject, name)
    return subject


class DeviceAllocation(DeviceView, frozen=True, kw_only=True):
    """One device and how much of it is leased, as schedulers publish it."""

    all_cores: ClassVar[int] = 100

    @property
    def type(self) -> str:
        """HAMi's name of the model."""
        return device_type(self.model)

    @property
    def memory_bytes(self) -> int:
        """Its memory."""
        return self.memory_mib * MIB

    @property
    def memory_units(self) -> int:
        """Its memory in units."""
        return self.memory_mib // self.unit_mib

    @property
    def allocated_bytes(self) -> int:
        """The memory that is leased."""
        return self.used_memory_mib * MIB

    @property
    def allocated_units(self) -> int:
        """The memory that is leased, in units."""
        return self.used_memory_mib // self.unit_mib

    @property
    def allocated_part(self) -> float:
        """The part of its memory that is leased, 0 to 1."""
        return self.used_memory_mib / max(self.memory_mib, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareAllocation:
    """How much of one device a container, or all of a pod, leases."""

    device: DeviceAllocation
    lease: Lease
    held: Share | Booking
    """The container's share, or what all of the pod takes."""
    measured: MeasuredView | None = None
    """What the agent of its node measures of a share, or None if it is not known."""

    @property
    def container_index(self) -> int:
        """The position of its container among those with shares; 0 for all of the pod."""
        held = self.held
        return self.lease.containers.index(held.container) if isinstance(held, Share) else 0

    @property
    def memory_bytes(self) -> int:
        """Its memory."""
        return self.held.memory_mib * MIB

    @property
    def memory_units(self) -> int:
        """Its memory in the units of its node."""
        return self.held.memory_mib // self.device.unit_mib

    @property
    def used_bytes(self) -> int | None:
        """The measured usage of its memory."""
        used_mib = self.measured.memory_mib if self.measured else None
        return None if used_mib is None else used_mib * MIB

    @property
    def cores_percent(self) -> int:
        """Its cores, percent of the device."""
        held = self.held
        return held.booked_cores if isinstance(held, Share) else held.cores_percent

    @property
    def cores_part(self) -> float:
        """Its cores, 1 is all of the device."""
        return self.cores_percent / 100

    @property
    def used_cores_part(self) -> float | None:
        """The measured usage of the device's cores, 0 to 1."""
        used_percent = self.measured.cores_percent if self.measured else None
        return None if used_percent is None else used_percent / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """How much of one device is in use, as node monitors publish it."""

    zone: ClassVar[str] = "vGPU"

    node: str
    uuid: str
    index: int
    model: str
    used_bytes: int
    busy_percent: int | None
    memory_busy_percent: int | None
    """Utilization of its memory controller, percent."""

    @property
    def type(self) -> str:
        """HAMi's name of the model."""
        return device_type(self.model)

    @property
    def short_uuid(self) -> str:
        """The UUID as Volcano's monitor cuts it off."""
        return self.uuid[:40]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """One container's memory on one device as HAMi-core counts it, in bytes."""

    context: int = 0
    module: int = 0
    buffer: int = 0
    offset: int = 0
    total: int = 0
    sm_percent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceUsage:
    """The MIG instance that a share is."""

    present: ClassVar[int] = 1

    uuid: str
    profile: str
    gpu_instance_id: int
    compute_instance_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareUsage:
    """How much of one device a container uses."""

    zone: ClassVar[str] = "vGPU"

    namespace: str
    pod: str
    container: str
    position: int
    """The device's number inside the container."""
    device_uuid: str
    limit_bytes: int | None
    memory: MemoryUsage | None
    since_kernel_s: float | None
    """Seconds since the container started its last kernel."""
    instance: InstanceUsage | None

    @property
    def short_uuid(self) -> str:
        """The device's UUID as Volcano's monitor cuts it off."""
        return self.device_uuid[:40]

"""Metrics of schedulers and node monitors, in the form of vendors' tables; pure.

Names, labels and units are those of users' dashboards: a value may be a label, and a percentage
called a ratio.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shared.dialects.nvidia.annotations import device_type
from shared.model.leases.lease import MIB, Booking, Lease, Share
from shared.model.views.gpus import DeviceView, MeasuredView

Labels = dict[str, str]


@dataclass(frozen=True)
class PublishedMetric:
    """A metric of every subject of a kind; a subject without the value has no series."""

    name: str
    help: str
    attribute: str
    """The path of the value, such as `memory.total`."""
    label_attributes: Mapping[str, str]
    """The path of each label's value."""

    def value(self, subject: object) -> float | None:
        value: float | None = _read(subject, self.attribute)
        return value

    def labels(self, subject: object) -> Labels:
        labels = ((name, _read(subject, path)) for name, path in self.label_attributes.items())
        return {name: "" if value is None else str(value) for name, value in labels}


def _read(subject: Any, path: str) -> Any:
    for name in path.split("."):
        subject = None if subject is None else getattr(subject, name)
    return subject


class DeviceAllocation(DeviceView, frozen=True, kw_only=True):
    all_cores: ClassVar[int] = 100

    @property
    def type(self) -> str:
        return device_type(self.model)

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * MIB

    @property
    def memory_units(self) -> int:
        return self.memory_mib // self.unit_mib

    @property
    def allocated_bytes(self) -> int:
        return self.used_memory_mib * MIB

    @property
    def allocated_units(self) -> int:
        return self.used_memory_mib // self.unit_mib

    @property
    def allocated_part(self) -> float:
        """0 to 1."""
        return self.used_memory_mib / max(self.memory_mib, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareAllocation:
    device: DeviceAllocation
    lease: Lease
    held: Share | Booking
    """The container's share, or all that the pod takes of the device."""
    measured: MeasuredView | None = None
    """None if it is not known."""

    @property
    def container_index(self) -> int:
        """0 for all of the pod."""
        held = self.held
        return self.lease.containers.index(held.container) if isinstance(held, Share) else 0

    @property
    def memory_bytes(self) -> int:
        return self.held.memory_mib * MIB

    @property
    def memory_units(self) -> int:
        return self.held.memory_mib // self.device.unit_mib

    @property
    def used_bytes(self) -> int | None:
        used_mib = self.measured.memory_mib if self.measured else None
        return None if used_mib is None else used_mib * MIB

    @property
    def cores_percent(self) -> int:
        held = self.held
        return held.booked_cores if isinstance(held, Share) else held.cores_percent

    @property
    def cores_part(self) -> float:
        return self.cores_percent / 100

    @property
    def used_cores_part(self) -> float | None:
        used_percent = self.measured.cores_percent if self.measured else None
        return None if used_percent is None else used_percent / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    zone: ClassVar[str] = "vGPU"

    node: str
    uuid: str
    index: int
    model: str
    used_bytes: int
    busy_percent: int | None
    memory_busy_percent: int | None

    @property
    def type(self) -> str:
        return device_type(self.model)

    @property
    def short_uuid(self) -> str:
        return self.uuid[:40]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """In bytes, as HAMi-core counts it."""

    context: int = 0
    module: int = 0
    buffer: int = 0
    offset: int = 0
    total: int = 0
    sm_percent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceUsage:
    present: ClassVar[int] = 1

    uuid: str
    profile: str
    gpu_instance_id: int
    compute_instance_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareUsage:
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
    """Since the container started its last kernel."""
    instance: InstanceUsage | None

    @property
    def short_uuid(self) -> str:
        return self.device_uuid[:40]

"""The data of schedulers' and node monitors' metrics, and the tables of vendors' metrics; pure.

A vendor's metrics are a table of `PublishedMetric`s, with the names, labels and units that users'
dashboards know. Where a value is a label, or a percentage is called a ratio, that is the vendor's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Labels = dict[str, str]
Subject = TypeVar("Subject")


@dataclass(frozen=True)
class PublishedMetric(Generic[Subject]):
    """One metric about every `Subject`; no value, no series."""

    name: str
    help: str
    value: Callable[[Subject], float | None]
    labels: Callable[[Subject], Labels]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAllocation:
    """One device and how much of it is leased, as schedulers publish it."""

    node: str
    uuid: str
    index: int
    model: str
    memory_mib: int
    unit_mib: int
    """MiB per unit in which pods on its node request memory."""
    allocated_mib: int
    allocated_cores_percent: int
    shares: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareAllocation:
    """How much of one device a container, or all of a pod, leases."""

    device: DeviceAllocation
    namespace: str
    pod: str
    pod_uid: str
    container: str = ""
    """Empty: all of the pod."""
    container_index: int = 0
    memory_mib: int
    cores_percent: int
    used_mib: int | None = None
    """Measured by the agent of its node; None: not known, or all of a pod."""
    used_cores_percent: int | None = None
    is_idle: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """How much of one device is in use, as node monitors publish it."""

    node: str
    uuid: str
    index: int
    model: str
    used_bytes: int
    busy_percent: int | None
    memory_busy_percent: int | None
    """Utilization of its memory controller, percent."""


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

    uuid: str
    profile: str
    gpu_instance_id: int
    compute_instance_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareUsage:
    """How much of one device a container uses."""

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

"""The node's usage metrics: those of vendors' node monitors, and Leasehold's own.

Vendors' names are in tables of the dialects. A time series exists as long as its lease.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import Metric

from services.node_agent.gpus.inventory import DeviceSample
from services.node_agent.isolation.region import Region, Tampered
from services.node_agent.usage.measurements import MeasuredContainer, MeasuredShare
from services.node_agent.usage.snapshot import UsageSnapshot
from shared.dialects.metrics import (
    DeviceUsage,
    InstanceUsage,
    Labels,
    PublishedMetric,
    ShareUsage,
)
from shared.dialects.nvidia import metrics as hami
from shared.dialects.volcano import metrics as volcano
from shared.model.device import Hardware
from shared.model.lease import ShareKey
from shared.model.names import NodeName

WHOLE, MEGA = 100, 1_000_000


@dataclass(frozen=True, slots=True)
class _ShareSample:
    """One share of one container at the time of the scrape."""

    container: MeasuredContainer
    share: MeasuredShare
    now: float
    idle_since: float | None = None


def _share_labels(of: _ShareSample) -> Labels:
    return {**_container_labels(of.container), "device_uuid": of.share.share.device}


def _since_kernel(of: _ShareSample) -> float | None:
    region = of.container.region
    if not isinstance(region, Region) or region.last_kernel_at is None:
        return None
    return max(0.0, of.now - region.last_kernel_at)


def _drift(of: _ShareSample) -> float | None:
    share = of.share
    if share.region is None or share.driver_bytes is None:
        return None
    return share.driver_bytes - share.region.total


def _idle(of: _ShareSample) -> float | None:
    return 0.0 if of.idle_since is None else max(0.0, of.now - of.idle_since)


def _busy(of: _ShareSample) -> float | None:
    percent = of.share.driver_percent
    return None if percent is None else percent / WHOLE


_SHARE_METRICS: Mapping[str, tuple[str, Callable[[_ShareSample], float | None]]] = {
    "leasehold_container_memory_leased_bytes": (
        "Device memory that the container leases.",
        lambda of: of.share.share.limit_bytes,
    ),
    "leasehold_container_memory_measured_bytes": (
        "Device memory in use: the larger of what HAMi-core and the driver report.",
        lambda of: of.share.measured_bytes,
    ),
    "leasehold_container_memory_overrun_bytes": (
        "Device memory in use beyond the lease.",
        lambda of: of.share.overrun_bytes,
    ),
    "leasehold_container_memory_enforced_bytes": (
        "Device memory that HAMi-core compares with the limit; may include ended processes.",
        lambda of: None if of.share.region is None else of.share.region.enforced,
    ),
    "leasehold_container_memory_drift_bytes": (
        "Device memory in use as the driver reports it, minus what HAMi-core reports.",
        _drift,
    ),
    "leasehold_container_cores_leased_ratio": (
        "Share of a device's cores that the container leases, 0 to 1.",
        lambda of: of.share.share.cores_percent / WHOLE,
    ),
    "leasehold_container_gpus_leased": (
        "The larger part of a device's cores or memory that the container leases, 0 to 1.",
        lambda of: of.share.share.part_of_device,
    ),
    "leasehold_container_cores_measured_ratio": (
        "Share of a device's cores in use, 0 to 1, as the driver reports it.",
        _busy,
    ),
    "leasehold_container_idle_seconds": (
        "Time since the container last used its part of the device; 0 while it uses it.",
        _idle,
    ),
}

_CONTAINER_METRICS: Mapping[str, tuple[str, Callable[[MeasuredContainer], float | None]]] = {
    "leasehold_container_isolation_lost": (
        "1 while HAMi-core should limit the container and does not limit all its processes.",
        lambda use: None if use.container.region_path is None else use.isolation_lost,
    ),
    "leasehold_container_region_tampered": (
        "1 while the container's region file is invalid.",
        lambda use: None if use.container.region_path is None else isinstance(use.region, Tampered),
    ),
    "leasehold_container_region_faults": (
        "Values in the region that wrapped below zero, and are left out.",
        lambda use: _of_region(
            use, lambda _: sum(one.region.wrapped for one in use.shares if one.region)
        ),
    ),
    "leasehold_container_region_torn_slots": (
        "Processes whose values could not be read consistently.",
        lambda use: _of_region(use, lambda region: region.torn),
    ),
    "leasehold_container_region_orphan_slots": (
        "Processes whose new allocations HAMi-core does not count.",
        lambda use: _of_region(use, lambda _: len(use.lost_pids)),
    ),
    "leasehold_container_uncounted_processes": (
        "Processes on leased GPUs that HAMi-core does not count.",
        lambda use: None if use.container.region_path is None else len(use.uncounted_pids),
    ),
}


_DEVICE_METRICS: Mapping[str, tuple[str, Callable[[DeviceSample], float | None]]] = {
    "hw_gpu_memory_usage_bytes": ("Memory in use.", lambda of: of.used_bytes),
    "hw_gpu_memory_limit_bytes": ("Memory of the device.", lambda of: of.memory_bytes),
    "hw_gpu_memory_utilization_ratio": (
        "Part of the memory in use, 0 to 1.",
        lambda of: of.used_bytes / of.memory_bytes if of.memory_bytes else None,
    ),
    "hw_gpu_utilization_ratio": (
        "Part of the time in which a kernel ran, 0 to 1.",
        lambda of: None if of.busy_percent is None else of.busy_percent / WHOLE,
    ),
}
"""OpenTelemetry's names, as Prometheus maps them.

https://opentelemetry.io/docs/specs/semconv/hardware/gpu/
"""
_HARDWARE_METRICS: Mapping[str, tuple[str, Callable[[Hardware], float | None]]] = {
    "hw_temperature_celsius": ("Temperature.", lambda of: of.temperature_c),
    "hw_power_watts": ("Power draw.", lambda of: of.power_w),
    "leasehold_gpu_power_limit_watts": ("Power limit in force.", lambda of: of.power_limit_w),
    "leasehold_gpu_sm_clock_hertz": (
        "Clock of the multiprocessors.",
        lambda of: None if of.sm_clock_mhz is None else of.sm_clock_mhz * MEGA,
    ),
    "leasehold_gpu_memory_clock_hertz": (
        "Clock of the memory.",
        lambda of: None if of.memory_clock_mhz is None else of.memory_clock_mhz * MEGA,
    ),
}


def _of_region(use: MeasuredContainer, value: Callable[[Region], float]) -> float | None:
    return value(use.region) if isinstance(use.region, Region) else None


def usage_metrics(
    snapshot: UsageSnapshot,
    node: NodeName,
    *,
    now: float,
    idle_since: Mapping[ShareKey, float],
    restored: int = 0,
) -> Iterator[Metric]:
    """Return every metric of the node, from the snapshot alone."""
    build = hami.build_labels(f"leasehold-{version('leasehold')}")
    yield _family(hami.BUILD_INFO, "Build.", [(build, 1)])
    devices = [_device_usage(sample, node) for sample in snapshot.devices]
    for of_devices in (*hami.MONITOR_DEVICES, *volcano.MONITOR_DEVICES):
        yield _published(of_devices, devices)
    shares = [
        _ShareSample(use, share, now, idle_since.get(use.key_of(share)))
        for use in snapshot.containers
        for share in use.shares
    ]
    usages = [_share_usage(of) for of in shares]
    for of_shares in (*hami.MONITOR_SHARES, *volcano.MONITOR_SHARES):
        yield _published(of_shares, usages)
    for name, (about, of_share) in _SHARE_METRICS.items():
        yield _family(name, about, ((_share_labels(of), of_share(of)) for of in shares))
    for name, (about, of_container) in _CONTAINER_METRICS.items():
        values = ((_container_labels(use), of_container(use)) for use in snapshot.containers)
        yield _family(name, about, values)
    yield from _device_metrics(snapshot.devices)
    yield from _node_metrics(snapshot, restored)


def _device_metrics(devices: Sequence[DeviceSample]) -> Iterator[Metric]:
    hardware = [(one, one.hardware) for one in devices if one.hardware]
    for name, (about, of_sample) in _DEVICE_METRICS.items():
        yield _family(name, about, ((_device_labels(name, one), of_sample(one)) for one in devices))
    for name, (about, of_hardware) in _HARDWARE_METRICS.items():
        values = ((_device_labels(name, one), of_hardware(read)) for one, read in hardware)
        yield _family(name, about, values)
    yield _family(
        "leasehold_gpu_throttled",
        "1 for each reason why the clocks of a device are lower than they could be.",
        (
            ({"device_uuid": one.device, "reason": reason}, 1)
            for _, one in hardware
            for reason in one.throttle
        ),
    )


def _device_labels(metric: str, of: DeviceSample) -> Labels:
    if metric.startswith("hw_"):
        return {"hw_id": of.device, "hw_type": "gpu", "hw_model": of.model}
    return {"device_uuid": of.device}


def _device_usage(sample: DeviceSample, node: NodeName) -> DeviceUsage:
    return DeviceUsage(
        node=node,
        uuid=sample.device,
        index=sample.index,
        model=sample.model,
        used_bytes=sample.used_bytes,
        busy_percent=sample.busy_percent,
        memory_busy_percent=sample.memory_busy_percent,
    )


def _share_usage(of: _ShareSample) -> ShareUsage:
    lease, used, instance = of.container.container.lease, of.share.region, of.share.instance
    return ShareUsage(
        namespace=lease.namespace,
        pod=lease.name,
        container=of.container.container.name,
        position=of.share.position,
        device_uuid=of.share.share.device,
        limit_bytes=of.share.limit_bytes,
        memory=used,
        since_kernel_s=_since_kernel(of),
        instance=None
        if instance is None
        else InstanceUsage(
            uuid=instance.uuid,
            profile=instance.profile,
            gpu_instance_id=instance.gi,
            compute_instance_id=next(iter(instance.compute_ids), None),
        ),
    )


def _node_metrics(snapshot: UsageSnapshot, restored: int) -> Iterator[Metric]:
    rules = Counter(violation.reason for violation in snapshot.violations)
    yield _family(
        "leasehold_violations",
        "Rules that containers of the node currently break.",
        (({"reason": str(rule)}, count) for rule, count in rules.items()),
    )
    yield _family(
        "leasehold_gpu_unleased_processes",
        "Processes on a device without a lease.",
        (({"device_uuid": device}, count) for device, count in snapshot.unleased.items()),
    )
    yield _family(
        "leasehold_gpu_unknown_processes",
        "Processes whose container is not known.",
        [({}, snapshot.unattributed)],
    )
    yield _family(
        "leasehold_limits_restored",
        "Number of times that altered limits were restored.",
        [({}, restored)],
        kind="counter",
        suffix="_total",
    )
    yield _family(
        "leasehold_usage_scanned_timestamp_seconds",
        "Time of the latest scan.",
        [({}, snapshot.scanned_at)],
    )
    yield _family(
        "leasehold_usage_scan_seconds", "Duration of the latest scan.", [({}, snapshot.scan_s)]
    )


def _published(metric: PublishedMetric, subjects: Iterable[object]) -> Metric:
    values = ((metric.labels(subject), metric.value(subject)) for subject in subjects)
    return _family(metric.name, metric.help, values)


def _family(
    name: str,
    about: str,
    values: Iterable[tuple[Labels, float | None]],
    *,
    kind: str = "gauge",
    suffix: str = "",
) -> Metric:
    family = Metric(name, about, kind)
    for labels, value in values:
        if value is not None:
            family.add_sample(f"{name}{suffix}", dict(labels), float(value))
    return family


def _container_labels(use: MeasuredContainer) -> Labels:
    lease = use.container.lease
    return {"namespace": lease.namespace, "pod": lease.name, "container": use.container.name}

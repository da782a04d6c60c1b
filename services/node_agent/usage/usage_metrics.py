"""The node's usage metrics, under the names of vendors' node monitors and of Leasehold.

A time series exists as long as its lease.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TypeVar

from prometheus_client import Metric

from services.node_agent.enforcers.limit_audit import ReadKey, ReadShare
from services.node_agent.gpus.inventory import DeviceSample
from services.node_agent.isolation.region import InvalidRegion, Region
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
from shared.model.budgets.weights import gpus_of_share
from shared.model.devices.device import Hardware
from shared.model.leases.lease import ShareKey
from shared.model.names import DeviceUuid, NodeName

WHOLE = 100
MEGA = 1_000_000

S = TypeVar("S")
_Table = Mapping[str, tuple[str, Callable[[S], float | None]]]


def _drift(of: MeasuredShare) -> float | None:
    if of.region is None or of.driver_bytes is None:
        return None
    return of.driver_bytes - of.region.total


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / WHOLE


def _hertz(mhz: float | None) -> float | None:
    return None if mhz is None else mhz * MEGA


_SHARE_METRICS: _Table[MeasuredShare] = {
    "leasehold_container_memory_leased_bytes": (
        "Device memory that the container leases.",
        lambda of: of.share.limit_bytes,
    ),
    "leasehold_container_memory_measured_bytes": (
        "Device memory in use: the larger of what HAMi-core and the driver report.",
        lambda of: of.measured_bytes,
    ),
    "leasehold_container_memory_overrun_bytes": (
        "Device memory in use beyond the lease.",
        lambda of: of.overrun_bytes,
    ),
    "leasehold_container_memory_enforced_bytes": (
        "Device memory that HAMi-core compares with the limit; may include ended processes.",
        lambda of: None if of.region is None else of.region.enforced,
    ),
    "leasehold_container_memory_drift_bytes": (
        "Device memory in use as the driver reports it, minus what HAMi-core reports.",
        _drift,
    ),
    "leasehold_container_cores_leased_ratio": (
        "Share of a device's cores that the container leases, 0 to 1; 0 of a MIG instance.",
        lambda of: _ratio(of.share.booked_cores),
    ),
    "leasehold_container_cores_measured_ratio": (
        "Share of a device's cores in use, 0 to 1, as the driver reports it.",
        lambda of: _ratio(of.driver_percent),
    ),
}

_READ_METRICS: _Table[ReadShare] = {
    "leasehold_container_memory_held_bytes": (
        "Device memory to which the container was held when its limits were last read back.",
        lambda of: of.memory_bytes,
    ),
    "leasehold_container_cores_held_ratio": (
        "Share of a device's cores to which the container was held when its limits were last read "
        "back, 0 to 1; 0: not limited.",
        lambda of: _ratio(of.cores_percent),
    ),
    "leasehold_container_limits_differ": (
        "1 if the container's limits differed from its lease when they were last read back.",
        lambda of: bool(of.difference),
    ),
    "leasehold_container_limits_read_timestamp_seconds": (
        "Time when the container's limits were last read back.",
        lambda of: of.at,
    ),
}

_CONTAINER_METRICS: _Table[MeasuredContainer] = {
    "leasehold_container_isolation_lost": (
        "1 while HAMi-core should limit the container and does not limit all its processes.",
        lambda use: None if use.container.region_path is None else use.isolation_lost,
    ),
    "leasehold_container_region_tampered": (
        "1 while the container's file with its limits is invalid.",
        lambda use: (
            None if use.container.region_path is None else isinstance(use.region, InvalidRegion)
        ),
    ),
    "leasehold_container_region_faults": (
        "Values of HAMi-core that fell below zero, and are left out.",
        lambda use: _of_region(
            use, lambda _: sum(share.region.wrapped for share in use.shares if share.region)
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


_DEVICE_METRICS: _Table[DeviceSample] = {
    "hw_gpu_memory_usage_bytes": ("Memory in use.", lambda of: of.used_bytes),
    "hw_gpu_memory_limit_bytes": ("Memory of the device.", lambda of: of.memory_bytes),
    "hw_gpu_memory_utilization_ratio": (
        "Part of the memory in use, 0 to 1.",
        lambda of: of.used_bytes / of.memory_bytes if of.memory_bytes else None,
    ),
    "hw_gpu_utilization_ratio": (
        "Part of the time in which a kernel ran, 0 to 1.",
        lambda of: _ratio(of.busy_percent),
    ),
}
"""https://opentelemetry.io/docs/specs/semconv/hardware/gpu/"""
_HARDWARE_METRICS: _Table[Hardware] = {
    "hw_temperature_celsius": ("Temperature.", lambda of: of.temperature_c),
    "hw_power_watts": ("Power draw.", lambda of: of.power_w),
}
_OWN_HARDWARE_METRICS: _Table[Hardware] = {
    "leasehold_gpu_power_limit_watts": ("Power limit in force.", lambda of: of.power_limit_w),
    "leasehold_gpu_sm_clock_hertz": (
        "Clock of the multiprocessors.",
        lambda of: _hertz(of.sm_clock_mhz),
    ),
    "leasehold_gpu_memory_clock_hertz": (
        "Clock of the memory.",
        lambda of: _hertz(of.memory_clock_mhz),
    ),
}
_NODE_METRICS: _Table[UsageSnapshot] = {
    "leasehold_gpu_unknown_processes": (
        "Processes whose container is not known.",
        lambda of: of.unattributed,
    ),
    "leasehold_node_containers_seen": (
        "Containers, sandboxes included, whose devices are known from the container runtime.",
        lambda of: of.seen_containers,
    ),
    "leasehold_usage_scanned_timestamp_seconds": (
        "Time of the latest scan.",
        lambda of: of.scanned_at,
    ),
    "leasehold_usage_scan_seconds": ("Duration of the latest scan.", lambda of: of.scan_s),
}


def _of_region(use: MeasuredContainer, value: Callable[[Region], float]) -> float | None:
    return value(use.region) if isinstance(use.region, Region) else None


def usage_metrics(
    snapshot: UsageSnapshot,
    node: NodeName,
    *,
    now: float,
    idle_since: Mapping[ShareKey, float],
    read: Mapping[ReadKey, ReadShare],
    restored: int = 0,
) -> Iterator[Metric]:
    build = hami.build_labels(f"leasehold-{version('leasehold')}")
    yield _family(hami.BUILD_INFO, "Build.", [(build, 1)])
    yield from _device_metrics(snapshot.devices, node)
    yield from _share_metrics(snapshot.containers, now, idle_since)
    yield from _enforcer_metrics(snapshot.containers, read)
    containers = [(_container_labels(use), use) for use in snapshot.containers]
    yield from _families(_CONTAINER_METRICS, containers)
    yield from _families(_NODE_METRICS, [({}, snapshot)])
    rules = Counter(violation.reason for violation in snapshot.violations)
    yield _family(
        "leasehold_violations",
        "Rules that containers of the node currently break.",
        (({"reason": str(rule)}, count) for rule, count in rules.items()),
    )
    yield _family(
        "leasehold_gpu_unleased_processes",
        "Processes on a device without a lease.",
        ((_of_device(device), count) for device, count in snapshot.unleased.items()),
    )
    yield _family(
        "leasehold_limits_restored",
        "Number of times that altered limits were restored.",
        [({}, restored)],
        kind="counter",
        suffix="_total",
    )


def _device_metrics(samples: Iterable[DeviceSample], node: NodeName) -> Iterator[Metric]:
    named = [
        ({"hw_id": sample.device, "hw_type": "gpu", "hw_model": sample.model}, sample)
        for sample in samples
    ]
    usages = [_device_usage(sample, node) for _, sample in named]
    for metric in (*hami.MONITOR_DEVICES, *volcano.MONITOR_DEVICES):
        yield _published(metric, usages)
    hardware = [(labels, sample.hardware) for labels, sample in named if sample.hardware]
    own = [(_of_device(values.device), values) for _, values in hardware]
    yield from _families(_DEVICE_METRICS, named)
    yield from _families(_HARDWARE_METRICS, hardware)
    yield from _families(_OWN_HARDWARE_METRICS, own)
    yield _family(
        "leasehold_gpu_throttled",
        "1 for each reason why the clocks of a device are lower than they could be.",
        ((labels | {"reason": reason}, 1) for labels, values in own for reason in values.throttle),
    )


def _share_metrics(
    containers: Iterable[MeasuredContainer], now: float, idle_since: Mapping[ShareKey, float]
) -> Iterator[Metric]:
    shares = [(use, share) for use in containers for share in use.shares]
    usages = [_share_usage(use, share, now) for use, share in shares]
    for metric in (*hami.MONITOR_SHARES, *volcano.MONITOR_SHARES):
        yield _published(metric, usages)
    own = [
        (_container_labels(use) | _of_device(share.share.device), share) for use, share in shares
    ]
    yield from _families(_SHARE_METRICS, own)
    yield _family(
        "leasehold_container_gpus_leased",
        "The container's part of what its pod leases of the device, in GPUs, as budgets weigh it.",
        (
            (labels, gpus_of_share(use.container.lease, share.share))
            for (labels, _), (use, share) in zip(own, shares, strict=True)
        ),
    )
    used_at = [
        (labels, idle_since.get(use.key_of(share), now))
        for (labels, _), (use, share) in zip(own, shares, strict=True)
        if not share.share.init
    ]
    yield _family(
        "leasehold_container_idle_seconds",
        "Time since the container last used its part of the device; 0 while it uses it. Init "
        "containers have none.",
        ((labels, max(0.0, now - at)) for labels, at in used_at),
    )


def _enforcer_metrics(
    containers: Iterable[MeasuredContainer], read: Mapping[ReadKey, ReadShare]
) -> Iterator[Metric]:
    shares = [(use, of.share) for use in containers for of in use.shares]
    labelled = [(_container_labels(use) | _of_device(share.device), share) for use, share in shares]
    yield _family(
        "leasehold_container_enforcers_info",
        "1 for what holds the container's memory and its cores, by its lease; none: nothing does.",
        (
            (labels | {"memory": share.memory, "compute": share.compute}, 1)
            for labels, share in labelled
        ),
    )
    keys = [(use.container.lease.pod, use.container.name, share.device) for use, share in shares]
    yield from _families(
        _READ_METRICS,
        [
            (labels, read[key])
            for (labels, _), key in zip(labelled, keys, strict=True)
            if key in read and not (read[key].unread and not read[key].at)
        ],
    )


def _of_device(device: DeviceUuid) -> Labels:
    return {"device_uuid": device}


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


def _share_usage(use: MeasuredContainer, of: MeasuredShare, now: float) -> ShareUsage:
    lease = use.container.lease
    instance = of.instance
    last_kernel_at = use.region.last_kernel_at if isinstance(use.region, Region) else None
    return ShareUsage(
        namespace=lease.namespace,
        pod=lease.name,
        container=use.container.name,
        position=of.position,
        device_uuid=of.share.device,
        limit_bytes=of.limit_bytes,
        memory=of.region,
        since_kernel_s=None if last_kernel_at is None else max(0.0, now - last_kernel_at),
        instance=None
        if instance is None
        else InstanceUsage(
            uuid=instance.uuid,
            profile=instance.profile,
            gpu_instance_id=instance.gi,
            compute_instance_id=next(iter(instance.compute_ids), None),
        ),
    )


def _published(metric: PublishedMetric, subjects: Iterable[object]) -> Metric:
    values = ((metric.labels(subject), metric.value(subject)) for subject in subjects)
    return _family(metric.name, metric.help, values)


def _families(table: _Table[S], subjects: Sequence[tuple[Labels, S]]) -> Iterator[Metric]:
    for name, (about, value_of) in table.items():
        yield _family(name, about, ((labels, value_of(subject)) for labels, subject in subjects))


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

"""The node's usage metrics: those of vendors' node monitors, and Leasehold's own.

Vendors' names are in tables of the dialects. A time series exists as long as its lease.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.registry import Collector

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

METRICS_PATH = "/metrics"


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
    return None if percent is None else percent / 100


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
        lambda of: of.share.share.cores_percent / 100,
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


_HARDWARE_METRICS: Mapping[str, tuple[str, Callable[[Hardware], float | None]]] = {
    "leasehold_gpu_temperature_celsius": ("Temperature.", lambda of: of.temperature_c),
    "leasehold_gpu_power_watts": ("Power draw.", lambda of: of.power_w),
    "leasehold_gpu_power_limit_watts": ("Power limit in force.", lambda of: of.power_limit_w),
    "leasehold_gpu_sm_clock_mhz": ("Clock of the multiprocessors.", lambda of: of.sm_clock_mhz),
    "leasehold_gpu_memory_clock_mhz": ("Clock of the memory.", lambda of: of.memory_clock_mhz),
    "leasehold_gpu_busy_percent": (
        "Time in which a kernel ran, percent.",
        lambda of: of.busy_percent,
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
    yield _published(volcano.MONITOR_COUNTER, usages, kind="counter")
    for name, (about, of_share) in _SHARE_METRICS.items():
        yield _family(name, about, ((_share_labels(of), of_share(of)) for of in shares))
    for name, (about, of_container) in _CONTAINER_METRICS.items():
        values = ((_container_labels(use), of_container(use)) for use in snapshot.containers)
        yield _family(name, about, values)
    yield from _hardware_metrics([one.hardware for one in snapshot.devices if one.hardware])
    yield from _node_metrics(snapshot, restored)


def _hardware_metrics(hardware: Sequence[Hardware]) -> Iterator[Metric]:
    for name, (about, of_device) in _HARDWARE_METRICS.items():
        values = [({"device_uuid": str(one.device)}, of_device(one)) for one in hardware]
        yield _family(name, about, values)
    yield _family(
        "leasehold_gpu_throttled",
        "1 for each reason why the clocks of a device are lower than they could be.",
        (
            ({"device_uuid": one.device, "reason": reason}, 1)
            for one in hardware
            for reason in one.throttle
        ),
    )


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


def _published(
    metric: PublishedMetric, subjects: Iterable[object], *, kind: str = "gauge"
) -> Metric:
    values = ((metric.labels(subject), metric.value(subject)) for subject in subjects)
    return _family(metric.name, metric.help, values, kind=kind)


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


def render_metrics(collector: Collector) -> bytes:
    """Write the metrics page; the one counter of Volcano keeps its published name."""
    text, name = generate_latest(collector), volcano.MONITOR_COUNTER.name
    return text.replace(f"{name}_total ".encode(), f"{name} ".encode())


def metrics_app(collector: Collector) -> web.Application:
    """Return the web application that serves the metrics page."""

    async def metrics(_: web.Request) -> web.Response:
        body = render_metrics(collector)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.router.add_get(METRICS_PATH, metrics)
    return application

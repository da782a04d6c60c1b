"""The node's series, made from one picture: those of HAMi and Volcano under their names, and ours.

The names, labels and types of the first two are published, and dashboards know them; where a value
is a label, or a percentage is called a ratio, that is theirs. A series lives as long as its lease.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily

from services.node_agent.isolation.region import DeviceSums, Region, Tampered
from services.node_agent.usage.usage_model import ContainerUse, DeviceSample, Picture, ShareUse
from shared.model.names import NodeName

ZONE = {"zone": "vGPU"}
DESCRIPTION = "Device_memory_desc_of_container"
"""Published as a counter without the ending that counters have."""

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class _Of:
    """One share of one container at the time of the scrape."""

    container: ContainerUse
    share: ShareUse
    now: float


@dataclass(frozen=True, slots=True)
class _Series:
    """One family of series of shares; no value, no series."""

    name: str
    about: str
    value: Callable[[_Of], float | None]
    labels: Callable[[_Of], Labels]


@dataclass(frozen=True, slots=True)
class _DeviceSeries:
    """One family of series of devices."""

    name: str
    about: str
    value: Callable[[DeviceSample], float | None]
    labels: Callable[[DeviceSample, NodeName], Labels]


def _hami(of: _Of) -> Labels:
    lease = of.container.tenant.lease
    return ZONE | {
        "namespace": lease.namespace,
        "pod": lease.name,
        "container": of.container.tenant.container,
        "vdevice_index": str(of.share.position),
        "device_uuid": of.share.share.device,
    }


def _volcano(of: _Of) -> Labels:
    lease = of.container.tenant.lease
    return ZONE | {
        "podnamespace": lease.namespace,
        "podname": lease.name,
        "ctrname": of.container.tenant.container,
        "vdeviceid": str(of.share.position),
        "deviceuuid": of.share.share.device[:40],
    }


def _mig(of: _Of) -> Labels:
    there = of.share.instance
    if there is None:
        return {}
    return _hami(of) | {
        "mig_uuid": there.uuid,
        "profile": there.profile,
        "gpu_instance_id": str(there.gi),
        "compute_instance_id": str(there.computes[0]) if there.computes else "",
    }


def _mig_legacy(of: _Of) -> Labels:
    there = of.share.instance
    return {} if there is None else _volcano(of) | {"instanceid": str(there.gi)}


def _is_instance(of: _Of) -> float | None:
    return None if of.share.instance is None else 1


def _described(of: _Of) -> Labels:
    used = of.share.region
    if used is None:
        return {}
    return _volcano(of) | {
        "context": str(used.context),
        "module": str(used.module),
        "data": str(used.buffer),
        "offset": str(used.offset),
    }


def _ours(of: _Of) -> Labels:
    lease = of.container.tenant.lease
    return {
        "namespace": lease.namespace,
        "pod": lease.name,
        "container": of.container.tenant.container,
        "device_uuid": of.share.share.device,
    }


def _amount(of_sums: Callable[[DeviceSums], int]) -> Callable[[_Of], float | None]:
    """Return an amount that the region tells."""

    def value(of: _Of) -> float | None:
        return None if of.share.region is None else of_sums(of.share.region)

    return value


_used = _amount(lambda used: used.total)
_sm = _amount(lambda used: used.sm_percent)


def _limit(of: _Of) -> float | None:
    return of.share.limit_bytes


def _since_kernel(of: _Of) -> float | None:
    region = of.container.region
    if not isinstance(region, Region) or region.last_kernel_at is None:
        return None
    return max(0.0, of.now - region.last_kernel_at)


def _drift(of: _Of) -> float | None:
    share = of.share
    if share.region is None or share.driver_bytes is None:
        return None
    return share.driver_bytes - share.region.total


def _busy(of: _Of) -> float | None:
    percent = of.share.driver_percent
    return None if percent is None else percent / 100


_DESCRIBED = _Series(DESCRIPTION, "Container device memory description.", _used, _described)

_SHARES: Sequence[_Series] = (
    _Series("hami_vgpu_memory_used_bytes", "Memory that processes use.", _used, _hami),
    _Series("hami_vgpu_memory_limit_bytes", "Memory limit.", _limit, _hami),
    _Series("hami_container_device_memory_bytes", "Memory that processes use.", _used, _hami),
    _Series(
        "hami_vgpu_memory_context_bytes",
        "Memory used by contexts.",
        _amount(lambda used: used.context),
        _hami,
    ),
    _Series(
        "hami_vgpu_memory_module_bytes",
        "Memory used by modules.",
        _amount(lambda used: used.module),
        _hami,
    ),
    _Series(
        "hami_vgpu_memory_buffer_bytes",
        "Memory used by buffers.",
        _amount(lambda used: used.buffer),
        _hami,
    ),
    _Series("hami_container_device_utilization_ratio", "SM use in percent.", _sm, _hami),
    _Series(
        "hami_container_last_kernel_elapsed_seconds", "Time since a kernel.", _since_kernel, _hami
    ),
    _Series("hami_mig_device_info", "The MIG instance that a device is.", _is_instance, _mig),
    _Series("MigInfo", "The MIG instance that a device is.", _is_instance, _mig_legacy),
    _Series("vGPU_device_memory_usage_in_bytes", "Memory that processes use.", _used, _volcano),
    _Series("vGPU_device_memory_limit_in_bytes", "Memory limit.", _limit, _volcano),
    _Series("Device_utilization_desc_of_container", "SM use in percent.", _sm, _volcano),
    _Series("Device_last_kernel_of_container", "Time since a kernel.", _since_kernel, _volcano),
    _Series(
        "leasehold_container_memory_leased_bytes",
        "Memory of a device that the container's lease is for.",
        lambda of: of.share.share.limit_bytes,
        _ours,
    ),
    _Series(
        "leasehold_container_memory_measured_bytes",
        "Memory of a device in use: what HAMi-core or the driver says, whichever is more.",
        lambda of: of.share.measured_bytes,
        _ours,
    ),
    _Series(
        "leasehold_container_memory_overrun_bytes",
        "Memory in use beyond the lease.",
        lambda of: of.share.overrun_bytes,
        _ours,
    ),
    _Series(
        "leasehold_container_memory_enforced_bytes",
        "Memory that HAMi-core compares with the limit; ended processes may still count in it.",
        _amount(lambda used: used.enforced),
        _ours,
    ),
    _Series(
        "leasehold_container_memory_drift_bytes",
        "What the driver says is in use, less what HAMi-core says.",
        _drift,
        _ours,
    ),
    _Series(
        "leasehold_container_cores_leased_ratio",
        "Part of a device's cores that the container's lease is for, 0 to 1.",
        lambda of: of.share.share.cores_percent / 100,
        _ours,
    ),
    _Series(
        "leasehold_container_cores_measured_ratio",
        "Part of a device's cores in use, 0 to 1, as the driver says.",
        _busy,
        _ours,
    ),
)


def _host(sample: DeviceSample, node: NodeName) -> Labels:
    return {"node": node} | _memory_controller(sample, node)


def _memory_controller(sample: DeviceSample, _: NodeName) -> Labels:
    return ZONE | {
        "device_index": str(sample.index),
        "device_uuid": sample.device,
        "device_type": sample.model,
    }


def _volcano_host(sample: DeviceSample, _: NodeName) -> Labels:
    return ZONE | {"deviceidx": str(sample.index), "deviceuuid": sample.device[:40]}


_DEVICES: Sequence[_DeviceSeries] = (
    _DeviceSeries(
        "hami_host_gpu_memory_used_bytes", "Memory in use.", lambda one: one.used_bytes, _host
    ),
    _DeviceSeries(
        "hami_host_gpu_utilization_ratio", "Use in percent.", lambda one: one.busy_percent, _host
    ),
    _DeviceSeries(
        "hami_host_gpu_memory_controller_utilization_ratio",
        "Use of the memory controller in percent.",
        lambda one: one.memory_busy_percent,
        _memory_controller,
    ),
    _DeviceSeries(
        "HostGPUMemoryUsage", "Memory in use, bytes.", lambda one: one.used_bytes, _volcano_host
    ),
    _DeviceSeries(
        "HostCoreUtilization", "Use in percent.", lambda one: one.busy_percent, _volcano_host
    ),
)

_CONTAINERS: Sequence[tuple[str, str, Callable[[ContainerUse], float | None]]] = (
    (
        "leasehold_container_isolation_lost",
        "1 while HAMi-core should hold the container and does not hold all of its processes.",
        lambda use: None if use.tenant.place is None else use.isolation_lost,
    ),
    (
        "leasehold_container_region_tampered",
        "1 while the container's region file is none.",
        lambda use: None if use.tenant.place is None else isinstance(use.region, Tampered),
    ),
    (
        "leasehold_container_region_faults",
        "Amounts in the region that were counted down below zero, and are left out.",
        lambda use: _of_region(
            use, lambda _: sum(one.region.wrapped for one in use.shares if one.region)
        ),
    ),
    (
        "leasehold_container_region_torn_slots",
        "Processes that were writing their amounts each time they were read.",
        lambda use: _of_region(use, lambda region: region.torn),
    ),
    (
        "leasehold_container_region_orphan_slots",
        "Processes whose memory HAMi-core itself does not count any more.",
        lambda use: _of_region(use, lambda region: len(region.orphans)),
    ),
    (
        "leasehold_container_uncounted_processes",
        "Processes on leased GPUs that HAMi-core does not know of.",
        lambda use: None if use.tenant.place is None else len(use.unseen),
    ),
)


def _of_region(use: ContainerUse, value: Callable[[Region], float]) -> float | None:
    return value(use.region) if isinstance(use.region, Region) else None


def families(seen: Picture, node: NodeName, *, now: float, restored: int = 0) -> Iterator[Metric]:
    """Return every family of the node's page; none of them asks anybody anything."""
    yield _family("hami_build_info", "Build.", [(_build(), 1)])
    for row in _DEVICES:
        values = ((row.labels(one, node), row.value(one)) for one in seen.devices)
        yield _family(row.name, row.about, values)
    shares = [_Of(use, share, now) for use in seen.containers for share in use.shares]
    for series in _SHARES:
        values = ((series.labels(of), series.value(of)) for of in shares)
        yield _family(series.name, series.about, values)
    described = Metric(_DESCRIBED.name, _DESCRIBED.about, "counter")
    for of in shares:
        if (value := _DESCRIBED.value(of)) is not None:
            described.add_sample(_DESCRIBED.name, dict(_DESCRIBED.labels(of)), value)
    yield described
    for name, about, value_of in _CONTAINERS:
        yield _family(name, about, ((_container(use), value_of(use)) for use in seen.containers))
    yield from _own(seen, restored)


def _own(seen: Picture, restored: int) -> Iterator[Metric]:
    rules: dict[str, int] = {}
    for violation in seen.violations:
        rules[violation.rule] = rules.get(violation.rule, 0) + 1
    yield _family(
        "leasehold_violations",
        "Rules that containers of the node break now.",
        (({"reason": rule}, count) for rule, count in rules.items()),
    )
    yield _family(
        "leasehold_gpu_unleased_processes",
        "Processes on a device that no lease is for.",
        (({"device_uuid": device}, count) for device, count in seen.unleased.items()),
    )
    yield _family(
        "leasehold_gpu_unknown_processes",
        "Processes whose container could not be told.",
        [({}, seen.unknown)],
    )
    done = Metric(
        "leasehold_limits_restored", "Times that altered limits were set again.", "counter"
    )
    done.add_sample("leasehold_limits_restored_total", {}, restored)
    yield done
    yield _family(
        "leasehold_usage_scanned_timestamp_seconds",
        "When all of this was looked at.",
        [({}, seen.seen_at)],
    )
    yield _family("leasehold_usage_scan_seconds", "How long that took.", [({}, seen.took_s)])


def _family(
    name: str, about: str, values: Iterable[tuple[Labels, float | None]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, about)
    for labels, value in values:
        if value is not None:
            family.add_sample(name, dict(labels), float(value))
    return family


def _container(use: ContainerUse) -> Labels:
    lease = use.tenant.lease
    return {
        "namespace": lease.namespace,
        "pod": lease.name,
        "container": use.tenant.container,
    }


def _build() -> Labels:
    return ZONE | {
        "version": f"leasehold-{version('leasehold')}",
        "revision": "",
        "build_date": "",
        "go_version": "",
        "compiler": "",
        "platform": "",
    }

"""`/metrics` under the names of Volcano's and HAMi's schedulers, made from leases at each scrape.

Names, labels and units are published, and users' dashboards know them: Volcano counts memory in the
units in which pods ask on the node, HAMi in bytes. Volcano names pods without their namespace, so
pods of one name on one device are added up there; `leasehold_share_*` tells them apart. A series
ends with its lease, its device or its node, and is never zero because somebody is just counting.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily

from services.dashboard.projection import DeviceShown, Projection
from shared.model.lease import MIB, Lease, Share, bookings

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class _OfDevice:
    name: str
    about: str
    value: Callable[[DeviceShown], float]
    labels: Callable[[DeviceShown], Labels]


@dataclass(frozen=True, slots=True)
class _Held:
    """What one container, or all of a pod, holds of one device."""

    lease: Lease
    shown: DeviceShown
    container: str
    container_index: int
    memory_mib: int
    cores_percent: int


@dataclass(frozen=True, slots=True)
class _OfShare:
    name: str
    about: str
    value: Callable[[_Held], float]
    labels: Callable[[_Held], Labels]


def _volcano(shown: DeviceShown) -> Labels:
    return {"devID": shown.device.uuid, "NodeName": shown.node}


def _hami(shown: DeviceShown) -> Labels:
    return {
        "node": shown.node,
        "device_uuid": shown.device.uuid,
        "device_index": str(shown.device.index),
        "device_type": f"NVIDIA-{shown.device.model}",
    }


def _hami_with_cores(shown: DeviceShown) -> Labels:
    return _hami(shown) | {"device_cores": str(shown.use.cores_percent)}


def _hami_overview(shown: DeviceShown) -> Labels:
    return _hami_with_cores(shown) | {"device_memory_limit": str(shown.device.memory_mib)}


def _hami_old(shown: DeviceShown) -> Labels:
    return {
        "nodeid": shown.node,
        "deviceuuid": shown.device.uuid,
        "deviceidx": str(shown.device.index),
    }


def _hami_old_with_cores(shown: DeviceShown) -> Labels:
    return _hami_old(shown) | {"devicecores": str(shown.use.cores_percent)}


def _hami_old_overview(shown: DeviceShown) -> Labels:
    return _hami_old_with_cores(shown) | {
        "sharedcontainers": str(shown.use.shares),
        "devicememorylimit": str(shown.device.memory_mib),
        "devicetype": f"NVIDIA-{shown.device.model}",
    }


def _all_bytes(shown: DeviceShown) -> float:
    return shown.device.memory_mib * MIB


def _used_bytes(shown: DeviceShown) -> float:
    return shown.use.memory_mib * MIB


def _used_fraction(shown: DeviceShown) -> float:
    return shown.use.memory_mib / max(shown.device.memory_mib, 1)


def _used_cores(shown: DeviceShown) -> float:
    return shown.use.cores_percent


def _all_cores(_: DeviceShown) -> float:
    return 100


def _shares(shown: DeviceShown) -> float:
    return shown.use.shares


_DEVICES = (
    _OfDevice("volcano_vgpu_device_shared_number", "Shares on the card.", _shares, _volcano),
    _OfDevice(
        "volcano_vgpu_device_allocated_memory",
        "Units of memory leased.",
        lambda shown: shown.use.memory_mib // shown.device.unit_mib,
        _volcano,
    ),
    _OfDevice(
        "volcano_vgpu_device_allocated_cores", "Percent of cores leased.", _used_cores, _volcano
    ),
    _OfDevice(
        "volcano_vgpu_device_memory_limit",
        "Units of memory that the card has.",
        lambda shown: shown.device.memory_mib // shown.device.unit_mib,
        _volcano,
    ),
    _OfDevice("hami_gpu_memory_limit_bytes", "Memory of the device.", _all_bytes, _hami),
    _OfDevice("hami_gpu_core_limit_ratio", "Percent of cores there are.", _all_cores, _hami),
    _OfDevice("hami_gpu_memory_allocated_bytes", "Memory leased.", _used_bytes, _hami_with_cores),
    _OfDevice("hami_gpu_shared_count", "Shares on the device.", _shares, _hami),
    _OfDevice("hami_gpu_core_allocated_ratio", "Percent of cores leased.", _used_cores, _hami),
    _OfDevice(
        "hami_node_gpu_memory_allocated_ratio",
        "Part of the memory that is leased, 0 to 1.",
        _used_fraction,
        _hami,
    ),
    _OfDevice("hami_node_gpu_overview", "Memory leased, in bytes.", _used_bytes, _hami_overview),
    _OfDevice("GPUDeviceMemoryLimit", "Memory of the device, in bytes.", _all_bytes, _hami_old),
    _OfDevice("GPUDeviceCoreLimit", "Percent of cores there are.", _all_cores, _hami_old),
    _OfDevice(
        "GPUDeviceMemoryAllocated", "Memory leased, in bytes.", _used_bytes, _hami_old_with_cores
    ),
    _OfDevice("GPUDeviceSharedNum", "Shares on the device.", _shares, _hami_old),
    _OfDevice("GPUDeviceCoreAllocated", "Percent of cores leased.", _used_cores, _hami_old),
    _OfDevice("nodeGPUOverview", "Memory leased, in bytes.", _used_bytes, _hami_old_overview),
    _OfDevice(
        "nodeGPUMemoryPercentage", "Part of the memory leased, 0 to 1.", _used_fraction, _hami_old
    ),
)


def _volcano_pod(held: _Held) -> Labels:
    return _volcano(held.shown) | {"podName": held.lease.name}


def _hami_container(held: _Held) -> Labels:
    return {
        "namespace": held.lease.namespace,
        "node": held.shown.node,
        "pod": held.lease.name,
        "container_index": str(held.container_index),
        "device_uuid": held.shown.device.uuid,
    }


def _hami_old_container(held: _Held) -> Labels:
    return {
        "podnamespace": held.lease.namespace,
        "nodename": held.shown.node,
        "podname": held.lease.name,
        "containeridx": str(held.container_index),
        "deviceuuid": held.shown.device.uuid,
    }


def _ours(held: _Held) -> Labels:
    return {
        "namespace": held.lease.namespace,
        "pod": held.lease.name,
        "pod_uid": held.lease.pod,
        "container": held.container,
        "node": held.shown.node,
        "device_uuid": held.shown.device.uuid,
    }


def _bytes(held: _Held) -> float:
    return held.memory_mib * MIB


def _cores(held: _Held) -> float:
    return held.cores_percent


_PODS = (
    _OfShare(
        "volcano_vgpu_device_memory_allocation_for_a_certain_pod",
        "Units of the card's memory that pods of this name have leased.",
        lambda held: held.memory_mib // held.shown.device.unit_mib,
        _volcano_pod,
    ),
    _OfShare(
        "volcano_vgpu_device_core_allocation_for_a_certain_pod",
        "Percent of the card's cores that pods of this name have leased.",
        _cores,
        _volcano_pod,
    ),
)
_CONTAINERS = (
    _OfShare("hami_vgpu_memory_allocated_bytes", "Memory leased.", _bytes, _hami_container),
    _OfShare("hami_vgpu_core_allocated_ratio", "Percent leased.", _cores, _hami_container),
    _OfShare("vGPUMemoryAllocated", "Memory leased, in bytes.", _bytes, _hami_old_container),
    _OfShare("vGPUCoreAllocated", "Percent leased.", _cores, _hami_old_container),
    _OfShare("leasehold_share_memory_bytes", "Memory leased.", _bytes, _ours),
    _OfShare("leasehold_share_cores_percent", "Percent of cores leased.", _cores, _ours),
)


def families(projection: Projection) -> Iterator[Metric]:
    """Return every family; values of equal labels are added up."""
    devices = list(projection.devices.values())
    for device in _DEVICES:
        values = ((device.labels(shown), device.value(shown)) for shown in devices)
        yield _family(device.name, device.about, values)
    leases = [lease for held in projection.leases.values() for lease in held]
    for rows, found in (
        (_PODS, [held for lease in leases for held in _of_pod(lease, projection)]),
        (_CONTAINERS, [held for lease in leases for held in _of_containers(lease, projection)]),
    ):
        for row in rows:
            values = ((row.labels(held), row.value(held)) for held in found)
            yield _family(row.name, row.about, values)


def _of_pod(lease: Lease, projection: Projection) -> Iterator[_Held]:
    for booking in bookings(lease.shares):
        shown = projection.devices.get(booking.device)
        if shown is not None:
            yield _Held(lease, shown, "", 0, booking.memory_mib, booking.cores_percent)


def _of_containers(lease: Lease, projection: Projection) -> Iterator[_Held]:
    names = list(dict.fromkeys(share.container for share in lease.shares))
    for share in lease.shares:
        shown = projection.devices.get(share.device)
        if shown is not None:
            yield _of_share(lease, share, shown, names.index(share.container))


def _of_share(lease: Lease, share: Share, shown: DeviceShown, index: int) -> _Held:
    return _Held(lease, shown, share.container, index, share.memory_mib, share.booked_cores)


def _family(name: str, about: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in values:
        key = tuple(labels.items())
        sums[key] = sums.get(key, 0.0) + value
    family = GaugeMetricFamily(name, about)
    for key, value in sums.items():
        family.add_sample(name, dict(key), value)
    return family


class _Collector:
    def __init__(self, projection: Projection) -> None:
        self.projection = projection

    def collect(self) -> Iterable[Metric]:
        """Return everything as it is now."""
        return families(self.projection)


def old_metrics(projection: Projection) -> web.Application:
    """Build the page that scrapes of the old schedulers find, on /metrics."""
    registry = CollectorRegistry()
    registry.register(_Collector(projection))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    pages = web.Application()
    pages.router.add_get("/metrics", metrics)
    return pages

"""Metrics of HAMi's scheduler and of its node monitor, in new and old names; pure."""

from collections.abc import Callable

from shared.dialects.metrics import (
    DeviceAllocation,
    DeviceUsage,
    Labels,
    MemoryUsage,
    PublishedMetric,
    ShareAllocation,
    ShareUsage,
)
from shared.dialects.nvidia.annotations import device_type
from shared.model.lease import MIB

ALL_CORES = 100
ZONE = {"zone": "vGPU"}
BUILD_INFO = "hami_build_info"

_DeviceMetric = PublishedMetric[DeviceAllocation]
_ShareMetric = PublishedMetric[ShareAllocation]
_DeviceUsageMetric = PublishedMetric[DeviceUsage]
_ShareUsageMetric = PublishedMetric[ShareUsage]


def build_labels(version: str) -> Labels:
    """Return the labels of `BUILD_INFO`, whose value is 1."""
    unknown = ("revision", "build_date", "go_version", "compiler", "platform")
    return ZONE | {"version": version} | dict.fromkeys(unknown, "")


def _device(device: DeviceAllocation) -> Labels:
    return {
        "node": device.node,
        "device_uuid": device.uuid,
        "device_index": str(device.index),
        "device_type": device_type(device.model),
    }


def _device_with_cores(device: DeviceAllocation) -> Labels:
    return _device(device) | {"device_cores": str(device.allocated_cores_percent)}


def _overview(device: DeviceAllocation) -> Labels:
    return _device_with_cores(device) | {"device_memory_limit": str(device.memory_mib)}


def _old_device(device: DeviceAllocation) -> Labels:
    return {
        "nodeid": device.node,
        "deviceuuid": device.uuid,
        "deviceidx": str(device.index),
        "devicetype": device_type(device.model),
    }


def _old_device_without_type(device: DeviceAllocation) -> Labels:
    labels = _old_device(device)
    del labels["devicetype"]
    return labels


def _old_device_with_cores(device: DeviceAllocation) -> Labels:
    return _old_device(device) | {"devicecores": str(device.allocated_cores_percent)}


def _old_overview(device: DeviceAllocation) -> Labels:
    return _old_device_with_cores(device) | {
        "sharedcontainers": str(device.shares),
        "devicememorylimit": str(device.memory_mib),
    }


def _memory_bytes(device: DeviceAllocation) -> float:
    return device.memory_mib * MIB


def _allocated_bytes(device: DeviceAllocation) -> float:
    return device.allocated_mib * MIB


def _allocated_fraction(device: DeviceAllocation) -> float:
    return device.allocated_mib / max(device.memory_mib, 1)


def _allocated_cores(device: DeviceAllocation) -> float:
    return device.allocated_cores_percent


def _all_cores(_: DeviceAllocation) -> float:
    return ALL_CORES


def _shares(device: DeviceAllocation) -> float:
    return device.shares


SCHEDULER_DEVICES = (
    _DeviceMetric("hami_gpu_memory_limit_bytes", "Memory of the device.", _memory_bytes, _device),
    _DeviceMetric("hami_gpu_core_limit_ratio", "Percent of cores there are.", _all_cores, _device),
    _DeviceMetric(
        "hami_gpu_memory_allocated_bytes",
        "Memory leased.",
        _allocated_bytes,
        _device_with_cores,
    ),
    _DeviceMetric("hami_gpu_shared_count", "Shares on the device.", _shares, _device),
    _DeviceMetric(
        "hami_gpu_core_allocated_ratio", "Percent of cores leased.", _allocated_cores, _device
    ),
    _DeviceMetric(
        "hami_node_gpu_memory_allocated_ratio",
        "Part of the memory that is leased, 0 to 1.",
        _allocated_fraction,
        _device,
    ),
    _DeviceMetric(
        "hami_node_gpu_overview", "Memory leased, in bytes.", _allocated_bytes, _overview
    ),
    _DeviceMetric(
        "GPUDeviceMemoryLimit", "Memory of the device, in bytes.", _memory_bytes, _old_device
    ),
    _DeviceMetric("GPUDeviceCoreLimit", "Percent of cores there are.", _all_cores, _old_device),
    _DeviceMetric(
        "GPUDeviceMemoryAllocated",
        "Memory leased, in bytes.",
        _allocated_bytes,
        _old_device_with_cores,
    ),
    _DeviceMetric("GPUDeviceSharedNum", "Shares on the device.", _shares, _old_device),
    _DeviceMetric(
        "GPUDeviceCoreAllocated", "Percent of cores leased.", _allocated_cores, _old_device
    ),
    _DeviceMetric("nodeGPUOverview", "Memory leased, in bytes.", _allocated_bytes, _old_overview),
    _DeviceMetric(
        "nodeGPUMemoryPercentage",
        "Part of the memory that is leased, 0 to 1.",
        _allocated_fraction,
        _old_device_without_type,
    ),
)


def _container(share: ShareAllocation) -> Labels:
    return {
        "namespace": share.namespace,
        "node": share.device.node,
        "pod": share.pod,
        "container_index": str(share.container_index),
        "device_uuid": share.device.uuid,
    }


def _old_container(share: ShareAllocation) -> Labels:
    return {
        "podnamespace": share.namespace,
        "nodename": share.device.node,
        "podname": share.pod,
        "containeridx": str(share.container_index),
        "deviceuuid": share.device.uuid,
    }


def _share_bytes(share: ShareAllocation) -> float:
    return share.memory_mib * MIB


def _share_cores(share: ShareAllocation) -> float:
    return share.cores_percent


SCHEDULER_CONTAINERS = (
    _ShareMetric("hami_vgpu_memory_allocated_bytes", "Memory leased.", _share_bytes, _container),
    _ShareMetric(
        "hami_vgpu_core_allocated_ratio", "Percent of cores leased.", _share_cores, _container
    ),
    _ShareMetric("vGPUMemoryAllocated", "Memory leased, in bytes.", _share_bytes, _old_container),
    _ShareMetric("vGPUCoreAllocated", "Percent of cores leased.", _share_cores, _old_container),
)


def _monitored_device(device: DeviceUsage) -> Labels:
    return ZONE | {
        "node": device.node,
        "device_index": str(device.index),
        "device_uuid": device.uuid,
        "device_type": device_type(device.model),
    }


MONITOR_DEVICES = (
    _DeviceUsageMetric(
        "hami_host_gpu_memory_used_bytes",
        "Memory in use.",
        lambda device: device.used_bytes,
        _monitored_device,
    ),
    _DeviceUsageMetric(
        "hami_host_gpu_utilization_ratio",
        "Use in percent.",
        lambda device: device.busy_percent,
        _monitored_device,
    ),
    _DeviceUsageMetric(
        "hami_host_gpu_memory_controller_utilization_ratio",
        "Use of the memory controller in percent.",
        lambda device: device.memory_busy_percent,
        _monitored_device,
    ),
)


def _monitored_share(share: ShareUsage) -> Labels:
    return ZONE | {
        "namespace": share.namespace,
        "pod": share.pod,
        "container": share.container,
        "vdevice_index": str(share.position),
        "device_uuid": share.device_uuid,
    }


def _instance(share: ShareUsage) -> Labels:
    found = share.instance
    if found is None:
        return {}
    compute = found.compute_instance_id
    return _monitored_share(share) | {
        "mig_uuid": found.uuid,
        "profile": found.profile,
        "gpu_instance_id": str(found.gpu_instance_id),
        "compute_instance_id": "" if compute is None else str(compute),
    }


def _counted(part: Callable[[MemoryUsage], int]) -> Callable[[ShareUsage], float | None]:
    """Return an amount that HAMi-core counts, if it counts for the container."""
    return lambda share: None if share.memory is None else part(share.memory)


_used_bytes = _counted(lambda memory: memory.total)

MONITOR_SHARES = (
    _ShareUsageMetric(
        "hami_vgpu_memory_used_bytes",
        "Memory that processes use.",
        _used_bytes,
        _monitored_share,
    ),
    _ShareUsageMetric(
        "hami_vgpu_memory_limit_bytes",
        "Memory limit.",
        lambda share: share.limit_bytes,
        _monitored_share,
    ),
    _ShareUsageMetric(
        "hami_container_device_memory_bytes",
        "Memory that processes use.",
        _used_bytes,
        _monitored_share,
    ),
    _ShareUsageMetric(
        "hami_vgpu_memory_context_bytes",
        "Memory used by contexts.",
        _counted(lambda memory: memory.context),
        _monitored_share,
    ),
    _ShareUsageMetric(
        "hami_vgpu_memory_module_bytes",
        "Memory used by modules.",
        _counted(lambda memory: memory.module),
        _monitored_share,
    ),
    _ShareUsageMetric(
        "hami_vgpu_memory_buffer_bytes",
        "Memory used by buffers.",
        _counted(lambda memory: memory.buffer),
        _monitored_share,
    ),
    _ShareUsageMetric(
        "hami_container_device_utilization_ratio",
        "SM use in percent.",
        _counted(lambda memory: memory.sm_percent),
        _monitored_share,
    ),
    _ShareUsageMetric(
        "hami_container_last_kernel_elapsed_seconds",
        "Seconds since the last kernel.",
        lambda share: share.since_kernel_s,
        _monitored_share,
    ),
    _ShareUsageMetric(
        "hami_mig_device_info",
        "1 for each share that is a MIG instance.",
        lambda share: None if share.instance is None else 1,
        _instance,
    ),
)

"""Metrics of Volcano's scheduler and of its vGPU device plugin's monitor; pure.

The scheduler counts memory in the units in which pods on the node request it, and names pods
without their namespace: shares with equal labels are to be added up.
"""

from shared.dialects.metrics import (
    DeviceAllocation,
    DeviceUsage,
    Labels,
    PublishedMetric,
    ShareAllocation,
    ShareUsage,
)
from shared.dialects.nvidia.annotations import device_type

UUID_LENGTH = 40
"""The monitor cuts UUIDs off after so many characters."""
ZONE = {"zone": "vGPU"}


_DeviceMetric = PublishedMetric[DeviceAllocation]
_ShareMetric = PublishedMetric[ShareAllocation]
_DeviceUsageMetric = PublishedMetric[DeviceUsage]
_ShareUsageMetric = PublishedMetric[ShareUsage]


def _device(device: DeviceAllocation) -> Labels:
    return {"devID": device.uuid, "NodeName": device.node}


def _pod(share: ShareAllocation) -> Labels:
    return _device(share.device) | {"podName": share.pod}


SCHEDULER_DEVICES = (
    _DeviceMetric(
        "volcano_vgpu_device_shared_number",
        "Shares on the device.",
        lambda device: device.shares,
        _device,
    ),
    _DeviceMetric(
        "volcano_vgpu_device_allocated_memory",
        "Units of memory leased.",
        lambda device: device.allocated_mib // device.unit_mib,
        _device,
    ),
    _DeviceMetric(
        "volcano_vgpu_device_allocated_cores",
        "Percent of cores leased.",
        lambda device: device.allocated_cores_percent,
        _device,
    ),
    _DeviceMetric(
        "volcano_vgpu_device_memory_limit",
        "Units of memory that the device has.",
        lambda device: device.memory_mib // device.unit_mib,
        _device,
    ),
)
SCHEDULER_PODS = (
    _ShareMetric(
        "volcano_vgpu_device_memory_allocation_for_a_certain_pod",
        "Units of the device's memory leased by pods of this name.",
        lambda share: share.memory_mib // share.device.unit_mib,
        _pod,
    ),
    _ShareMetric(
        "volcano_vgpu_device_core_allocation_for_a_certain_pod",
        "Percent of the device's cores leased by pods of this name.",
        lambda share: share.cores_percent,
        _pod,
    ),
)


def _monitored_device(device: DeviceUsage) -> Labels:
    """Return the labels of Volcano's monitor, and those of HAMi's metrics of the same names."""
    return ZONE | {
        "nodeid": device.node,
        "deviceidx": str(device.index),
        "deviceuuid": device.uuid[:UUID_LENGTH],
        "devicetype": device_type(device.model),
    }


def _monitored_share(share: ShareUsage) -> Labels:
    return ZONE | {
        "podnamespace": share.namespace,
        "podname": share.pod,
        "ctrname": share.container,
        "vdeviceid": str(share.position),
        "deviceuuid": share.device_uuid[:UUID_LENGTH],
    }


def _instance(share: ShareUsage) -> Labels:
    found = share.instance
    return (
        {}
        if found is None
        else _monitored_share(share) | {"instanceid": str(found.gpu_instance_id)}
    )


def _memory_by_kind(share: ShareUsage) -> Labels:
    used = share.memory
    return (
        {}
        if used is None
        else _monitored_share(share)
        | {
            "context": str(used.context),
            "module": str(used.module),
            "data": str(used.buffer),
            "offset": str(used.offset),
        }
    )


def _used_bytes(share: ShareUsage) -> float | None:
    return None if share.memory is None else share.memory.total


MONITOR_DEVICES = (
    _DeviceUsageMetric(
        "HostGPUMemoryUsage",
        "Memory in use, in bytes.",
        lambda device: device.used_bytes,
        _monitored_device,
    ),
    _DeviceUsageMetric(
        "HostCoreUtilization",
        "Use in percent.",
        lambda device: device.busy_percent,
        _monitored_device,
    ),
)
MONITOR_SHARES = (
    _ShareUsageMetric(
        "MigInfo",
        "1 for each share that is a MIG instance.",
        lambda share: None if share.instance is None else 1,
        _instance,
    ),
    _ShareUsageMetric(
        "vGPU_device_memory_usage_in_bytes",
        "Memory that processes use.",
        _used_bytes,
        _monitored_share,
    ),
    _ShareUsageMetric(
        "vGPU_device_memory_limit_in_bytes",
        "Memory limit.",
        lambda share: share.limit_bytes,
        _monitored_share,
    ),
    _ShareUsageMetric(
        "Device_utilization_desc_of_container",
        "SM use in percent.",
        lambda share: None if share.memory is None else share.memory.sm_percent,
        _monitored_share,
    ),
    _ShareUsageMetric(
        "Device_last_kernel_of_container",
        "Seconds since the last kernel.",
        lambda share: share.since_kernel_s,
        _monitored_share,
    ),
)
MONITOR_COUNTER = _ShareUsageMetric(
    "Device_memory_desc_of_container",
    "Memory that processes use, with its kinds as labels.",
    _used_bytes,
    _memory_by_kind,
)
"""Published as a counter without the ending `_total` that counters have."""

"""Metrics of Volcano's scheduler and of its vGPU device plugin's monitor; pure.

The scheduler names pods without their namespace: shares with equal labels are added up.
"""

from shared.dialects.metrics import PublishedMetric

_DEVICE = {"devID": "uuid", "NodeName": "node"}
_POD = {"devID": "device.uuid", "NodeName": "device.node", "podName": "lease.name"}
_CORES, _MEMORY = "Percent of cores leased.", "Units of memory leased."
_ALL_MEMORY = "Units of memory that the device has."
_MEMORY_OF_POD = "volcano_vgpu_device_memory_allocation_for_a_certain_pod"
_CORES_OF_POD = "volcano_vgpu_device_core_allocation_for_a_certain_pod"

SCHEDULER_DEVICES = tuple(
    PublishedMetric(*row, _DEVICE)
    for row in (
        ("volcano_vgpu_device_shared_number", "Shares on the device.", "used_shares"),
        ("volcano_vgpu_device_allocated_memory", _MEMORY, "allocated_units"),
        ("volcano_vgpu_device_allocated_cores", _CORES, "used_cores_percent"),
        ("volcano_vgpu_device_memory_limit", _ALL_MEMORY, "memory_units"),
    )
)
SCHEDULER_PODS = tuple(
    PublishedMetric(name, f"{text} leased by pods of this name.", attribute, _POD)
    for name, text, attribute in (
        (_MEMORY_OF_POD, "Units of the device's memory", "memory_units"),
        (_CORES_OF_POD, "Percent of the device's cores", "cores_percent"),
    )
)

_MONITORED = {
    "zone": "zone",
    "nodeid": "node",
    "deviceidx": "index",
    "deviceuuid": "short_uuid",
    "devicetype": "type",
}
"""Of Volcano's monitor, and of HAMi's metrics of the same names."""
MONITOR_DEVICES = (
    PublishedMetric("HostGPUMemoryUsage", "Memory in use, in bytes.", "used_bytes", _MONITORED),
    PublishedMetric("HostCoreUtilization", "Use in percent.", "busy_percent", _MONITORED),
)

_SHARE = {
    "zone": "zone",
    "podnamespace": "namespace",
    "podname": "pod",
    "ctrname": "container",
    "vdeviceid": "position",
    "deviceuuid": "short_uuid",
}
_INSTANCE = _SHARE | {"instanceid": "instance.gpu_instance_id"}
_BY_KIND = _SHARE | {
    "context": "memory.context",
    "module": "memory.module",
    "data": "memory.buffer",
    "offset": "memory.offset",
}
_USED = "Memory that processes use"
_SM_USE = "SM use in percent."
_MIG_INFO = "1 for each share that is a MIG instance."
_LAST_KERNEL = "Device_last_kernel_of_container"
_MEMORY_KINDS = "Device_memory_desc_of_container"
"""Volcano publishes it as a counter, which it is not."""
MONITOR_SHARES = tuple(
    PublishedMetric(*row)
    for row in (
        ("MigInfo", _MIG_INFO, "instance.present", _INSTANCE),
        ("vGPU_device_memory_usage_in_bytes", f"{_USED}.", "memory.total", _SHARE),
        ("vGPU_device_memory_limit_in_bytes", "Memory limit.", "limit_bytes", _SHARE),
        ("Device_utilization_desc_of_container", _SM_USE, "memory.sm_percent", _SHARE),
        (_LAST_KERNEL, "Seconds since the last kernel.", "since_kernel_s", _SHARE),
        (_MEMORY_KINDS, f"{_USED}, with its kinds as labels.", "memory.total", _BY_KIND),
    )
)

"""Metrics of HAMi's scheduler and of its node monitor, in new and old names; pure."""

from shared.dialects.metrics import Labels, PublishedMetric

BUILD_INFO = "hami_build_info"


def build_labels(version: str) -> Labels:
    unknown = ("revision", "build_date", "go_version", "compiler", "platform")
    return {"zone": "vGPU", "version": version} | dict.fromkeys(unknown, "")


_DEVICE = {"node": "node", "device_uuid": "uuid", "device_index": "index", "device_type": "type"}
_WITH_CORES = _DEVICE | {"device_cores": "used_cores_percent"}
_OVERVIEW = _WITH_CORES | {"device_memory_limit": "memory_mib"}
_OLD_WITHOUT_TYPE = {"nodeid": "node", "deviceuuid": "uuid", "deviceidx": "index"}
_OLD = _OLD_WITHOUT_TYPE | {"devicetype": "type"}
_OLD_WITH_CORES = _OLD | {"devicecores": "used_cores_percent"}
_OLD_OVERVIEW = _OLD_WITH_CORES | {
    "sharedcontainers": "used_shares",
    "devicememorylimit": "memory_mib",
}

_LEASED_PART = "Part of the memory that is leased, 0 to 1."
_CORES, _MEMORY = "Percent of cores leased.", "Memory leased, in bytes."
SCHEDULER_DEVICES = tuple(
    PublishedMetric(*row)
    for row in (
        ("hami_gpu_memory_limit_bytes", "Memory of the device.", "memory_bytes", _DEVICE),
        ("hami_gpu_core_limit_ratio", "Percent of cores there are.", "all_cores", _DEVICE),
        ("hami_gpu_memory_allocated_bytes", "Memory leased.", "allocated_bytes", _WITH_CORES),
        ("hami_gpu_shared_count", "Shares on the device.", "used_shares", _DEVICE),
        ("hami_gpu_core_allocated_ratio", _CORES, "used_cores_percent", _DEVICE),
        ("hami_node_gpu_memory_allocated_ratio", _LEASED_PART, "allocated_part", _DEVICE),
        ("hami_node_gpu_overview", _MEMORY, "allocated_bytes", _OVERVIEW),
        ("GPUDeviceMemoryLimit", "Memory of the device, in bytes.", "memory_bytes", _OLD),
        ("GPUDeviceCoreLimit", "Percent of cores there are.", "all_cores", _OLD),
        (
            "GPUDeviceMemoryAllocated",
            "Memory leased, in bytes.",
            "allocated_bytes",
            _OLD_WITH_CORES,
        ),
        ("GPUDeviceSharedNum", "Shares on the device.", "used_shares", _OLD),
        ("GPUDeviceCoreAllocated", _CORES, "used_cores_percent", _OLD),
        ("nodeGPUOverview", _MEMORY, "allocated_bytes", _OLD_OVERVIEW),
        ("nodeGPUMemoryPercentage", _LEASED_PART, "allocated_part", _OLD_WITHOUT_TYPE),
    )
)

_CONTAINER = {
    "namespace": "lease.namespace",
    "node": "device.node",
    "pod": "lease.name",
    "container_index": "container_index",
    "device_uuid": "device.uuid",
}
_OLD_CONTAINER = {
    "podnamespace": "lease.namespace",
    "nodename": "device.node",
    "podname": "lease.name",
    "containeridx": "container_index",
    "deviceuuid": "device.uuid",
}
SCHEDULER_CONTAINERS = tuple(
    PublishedMetric(*row)
    for row in (
        ("hami_vgpu_memory_allocated_bytes", "Memory leased.", "memory_bytes", _CONTAINER),
        ("hami_vgpu_core_allocated_ratio", _CORES, "cores_percent", _CONTAINER),
        ("vGPUMemoryAllocated", _MEMORY, "memory_bytes", _OLD_CONTAINER),
        ("vGPUCoreAllocated", _CORES, "cores_percent", _OLD_CONTAINER),
    )
)

_MONITORED = {"zone": "zone"} | _DEVICE
_CONTROLLER_USE = "hami_host_gpu_memory_controller_utilization_ratio"
_OF_CONTROLLER = "Use of the memory controller in percent."
MONITOR_DEVICES = tuple(
    PublishedMetric(*row)
    for row in (
        ("hami_host_gpu_memory_used_bytes", "Memory in use.", "used_bytes", _MONITORED),
        ("hami_host_gpu_utilization_ratio", "Use in percent.", "busy_percent", _MONITORED),
        (_CONTROLLER_USE, _OF_CONTROLLER, "memory_busy_percent", _MONITORED),
    )
)

_SHARE = {
    "zone": "zone",
    "namespace": "namespace",
    "pod": "pod",
    "container": "container",
    "vdevice_index": "position",
    "device_uuid": "device_uuid",
}
_INSTANCE = _SHARE | {
    "mig_uuid": "instance.uuid",
    "profile": "instance.profile",
    "gpu_instance_id": "instance.gpu_instance_id",
    "compute_instance_id": "instance.compute_instance_id",
}
_USED = "Memory that processes use."
_SM_USE = "SM use in percent."
_LAST_KERNEL = "hami_container_last_kernel_elapsed_seconds"
_MIG_INFO = "1 for each share that is a MIG instance."
MONITOR_SHARES = tuple(
    PublishedMetric(*row)
    for row in (
        ("hami_vgpu_memory_used_bytes", _USED, "memory.total", _SHARE),
        ("hami_vgpu_memory_limit_bytes", "Memory limit.", "limit_bytes", _SHARE),
        ("hami_container_device_memory_bytes", _USED, "memory.total", _SHARE),
        ("hami_vgpu_memory_context_bytes", "Memory used by contexts.", "memory.context", _SHARE),
        ("hami_vgpu_memory_module_bytes", "Memory used by modules.", "memory.module", _SHARE),
        ("hami_vgpu_memory_buffer_bytes", "Memory used by buffers.", "memory.buffer", _SHARE),
        ("hami_container_device_utilization_ratio", _SM_USE, "memory.sm_percent", _SHARE),
        (_LAST_KERNEL, "Seconds since the last kernel.", "since_kernel_s", _SHARE),
        ("hami_mig_device_info", _MIG_INFO, "instance.present", _INSTANCE),
    )
)

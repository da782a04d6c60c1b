"""Why the devices of one node do not fit; pure."""

from collections.abc import Mapping, Sequence

from shared.model.denial import Denial
from shared.model.devices.device import DeviceMode, DeviceUse, device_refusal
from shared.model.requests.request import GpuRequest, PodRequest, TopologyScope
from shared.placing.choice.container_choice import (
    CONTAINER_CHOOSERS,
    NO_POD_USE,
    PodDeviceUse,
    PodDeviceUses,
    add_pod_uses,
    instance_availability,
    share_mib,
    topology_location,
)
from shared.placing.choice.device_choice import (
    allowed_modes,
    allows_instances,
    allows_replicas,
    cpus_refusal,
    device_excluded,
    devices_in_mode,
    is_selective,
    with_numa_scope,
)
from shared.placing.mig_instances import instance_mib, instance_refusal
from shared.placing.mirror.node_mirror import MirroredDevice, MirroredNode
from shared.placing.node_filters import UNHEALTHY, NodeFilterFailure

NODE_TEXTS: Mapping[str, str] = {
    "NoGpus": "node(s) had no GPU",
    "NotEnoughGpus": "node(s) had fewer GPUs than the pod requests",
    "GpuModeMismatch": "node(s) had GPUs in another mode",
    "GpuReplicasOnly": "node(s) offered GPUs as replicas, which have no amounts",
    "GpuUuidExcluded": "node(s) had no GPU with an allowed UUID",
    "GpuTypeExcluded": "node(s) had no GPU of an allowed type",
    "GpuExcluded": "node(s) had cordoned GPUs",
    "GpuPlaceUnknown": "node(s) had GPUs whose NUMA node or PCIe root is not known",
    UNHEALTHY[0]: UNHEALTHY[1],
    "GpuIsolationStrict": "node(s) had no MIG instance and no whole GPU for strict isolation",
    "GpuNotShared": "node(s) had GPUs that are not shared",
    "GpuNotIsolated": "node(s) had no GPU on which limits would be enforced",
    "GpuEnforcerMissing": "node(s) had no GPU with the enforcer that the pod demands",
    "GpuSharingMode": "node(s) had GPUs that are shared in another mode",
    "GpuSlotsTaken": "node(s) had the maximum number of shares on each GPU",
    "GpuReplicasTaken": "node(s) had no free replica of a GPU",
    "GpuReplicasTogether": "node(s) gave a container one replica of a GPU at most",
    "GpuGroupSpread": "node(s) had GPUs with a pod of the same group",
    "NoGpuInstances": "node(s) had GPUs in MIG mode without a known layout",
    "GpuInstanceTooSmall": "node(s) had GPUs whose MIG instances are too small",
    "GpuNotPartitioned": "node(s) had GPUs that shares in use keep from being partitioned",
    "GpuInstancesTaken": "node(s) had no free MIG instance that is large enough",
    "InsufficientNumaCpus": "node(s) had too few free CPUs on the NUMA nodes of its GPUs",
    "InsufficientGpuMemory": "Insufficient GPU memory",
    "InsufficientGpuCores": "Insufficient GPU cores",
    "GpuNotIdle": "node(s) had no idle GPU",
    "GpuInstancesLive": "node(s) had GPUs whose MIG instances are in use",
    "GpuClaimed": "node(s) had GPUs that are reserved for another pod",
    "GpuCoresReserved": "node(s) had GPUs whose cores are all reserved",
    "GpuInExclusiveUse": "node(s) had GPUs that other pods use exclusively",
}
"""By code, in the order of the checks: devices that the pod could never use come first."""
_STEPS = {code: step for step, code in enumerate(NODE_TEXTS)}

SCOPES: Mapping[TopologyScope, str] = {
    TopologyScope.NUMA: "NUMA node",
    TopologyScope.PCIE: "PCIe root",
}

EXCLUDED = Denial("GpuExcluded", "it is cordoned by an annotation of its node")


DeviceRefusals = Mapping[MirroredDevice, Denial]


def explain_no_devices(
    request: PodRequest, node: MirroredNode, refusals: DeviceRefusals | None = None
) -> NodeFilterFailure:
    request = with_numa_scope(request, node)
    if not node.devices:
        return NodeFilterFailure("NoGpus", NODE_TEXTS["NoGpus"])
    most = max(container.gpus for container in request.containers)
    if most > len(node.devices):
        numbers = f"{most} different GPUs requested, {len(node.devices)} present"
        return NodeFilterFailure("NotEnoughGpus", NODE_TEXTS["NotEnoughGpus"], numbers)
    if refusals is None:
        refusals = device_refusals(request, node)
    fitting = len(node.devices) - len(refusals)
    if fitting >= most:
        scope = SCOPES.get(request.topology_scope)
        where = f" on one {scope}" if scope else ""
        text = f"node(s) had no GPUs for all containers at once{where}"
        return NodeFilterFailure("GpusDoNotFitTogether", text)
    codes = sorted((refusal.code for refusal in refusals.values()), key=_STEPS.__getitem__)
    code = codes[min(len(node.devices) - most, len(codes) - 1)]
    return NodeFilterFailure(
        code, NODE_TEXTS[code], f"{most} GPU{'s' * (most > 1)} requested, {fitting} fit"
    )


def device_refusals(request: PodRequest, node: MirroredNode) -> dict[MirroredDevice, Denial]:
    request = with_numa_scope(request, node)
    refusals = _exclusions(request, node)
    allowed = [device for device in node.devices if device not in refusals]
    for mode in DeviceMode if node.has_divided else (DeviceMode.HAMI_CORE,):
        in_mode = devices_in_mode(allowed, mode)
        for devices in [(d,) for d in in_mode] if request.same_device else [in_mode]:
            refusals |= _refusals_together(request, devices, mode)
    return {device: refusals[device] for device in node.devices if device in refusals}


def _exclusions(request: PodRequest, node: MirroredNode) -> dict[MirroredDevice, Denial]:
    selective = is_selective(request.selection)
    if not (selective or node.facts.excluded_devices or node.aligns_numa):
        return {}
    reasons = {device: _exclusion(request, node, device) for device in node.devices}
    return {device: reason for device, reason in reasons.items() if reason is not None}


def _exclusion(request: PodRequest, node: MirroredNode, device: MirroredDevice) -> Denial | None:
    excluded = device_excluded(request.selection, device.device)
    # The node agent lists unhealthy devices in that annotation, too.
    is_excluded = device.index in node.facts.excluded_devices and device.device.healthy
    if excluded is None and is_excluded:
        return EXCLUDED
    return excluded or cpus_refusal(request, device)


def _refusals_together(
    request: PodRequest, devices: Sequence[MirroredDevice], mode: DeviceMode
) -> dict[MirroredDevice, Denial]:
    unserved: tuple[GpuRequest, PodDeviceUses] | None = request.containers[0], {}
    if len(request.containers) > 1 and mode in allowed_modes(request):
        unserved = _first_unserved(request, devices, mode)
    if unserved is None:
        return {}
    container, pod_uses = unserved
    refusals = {device: _refusal(container, request, device, pod_uses) for device in devices}
    return {device: refusal for device, refusal in refusals.items() if refusal is not None}


def _first_unserved(
    request: PodRequest, devices: Sequence[MirroredDevice], mode: DeviceMode
) -> tuple[GpuRequest, PodDeviceUses] | None:
    pod_uses: dict[MirroredDevice, PodDeviceUse] = {}
    for container in request.containers:
        chosen = CONTAINER_CHOOSERS[mode](container, request, devices, pod_uses)
        if chosen is None:
            return container, pod_uses
        add_pod_uses(chosen, pod_uses)
    return None


def _refusal(
    container: GpuRequest,
    request: PodRequest,
    device: MirroredDevice,
    pod_uses: PodDeviceUses,
) -> Denial | None:
    scope = request.topology_scope
    if scope is not TopologyScope.NODE and topology_location(device, scope) is None:
        text = f"its {SCOPES[scope]} is not known, and the pod requires all its GPUs on one"
        return Denial("GpuPlaceUnknown", text)
    if device.in_mig_mode and allows_instances(request):
        return _instance_refusal(container, request, device, pod_uses)
    if device.replicas is not None and not allows_replicas(request):
        container = next((c for c in request.containers if not c.number_of), container)
    pod_use = pod_uses.get(device, NO_POD_USE)
    return device_refusal(
        container,
        device.device,
        device.use(),
        own=DeviceUse(
            memory_mib=pod_use.memory_mib,
            cores_percent=pod_use.cores_percent,
            shares=pod_use.shares,
            exclusive=pod_use.exclusive,
        ),
        memory_mib=share_mib(container, device),
        anti_affinity_groups=request.anti_affinity_groups,
    )


def _instance_refusal(
    container: GpuRequest,
    request: PodRequest,
    device: MirroredDevice,
    pod_uses: PodDeviceUses,
) -> Denial | None:
    groups = sorted(device.anti_affinity_groups.intersection(request.anti_affinity_groups))
    if not device.healthy:
        return Denial("GpuUnhealthy", device.device.health_text)
    if groups:
        text = f"it already has a pod of group {', '.join(groups)}"
        return Denial("GpuGroupSpread", text)
    if device.shares and not device.layout:
        text = f"{device.shares} shares from before MIG mode prevent it from being partitioned"
        return Denial("GpuNotPartitioned", text)
    layout, taken, free_mib = instance_availability(device, container, request, pod_uses)
    need_mib = instance_mib(container, device.device, device.largest_instance_mib)
    return instance_refusal(
        device.layout_shapes, layout, taken, need_mib=need_mib, free_mib=free_mib
    )

"""Advice for a pod that fits nowhere; pure."""

from collections.abc import Callable, Mapping, Sequence

from shared.dialects import DIALECTS
from shared.dialects.advertised import TRIGGER
from shared.dialects.pod_requests import amount_changes
from shared.model.request import PodRequest
from shared.placing.choice.container_choice import share_mib
from shared.placing.device_filters import device_excluded, is_selective
from shared.placing.mirror.node_mirror import MirroredDevice, MirroredNode
from shared.placing.node_filters import NodeFilterFailure

NAMED_FAULTS = 3
BlockedNodes = Sequence[tuple[MirroredNode, NodeFilterFailure]]


def hint_for(request: PodRequest, nearest: BlockedNodes) -> str:
    """Return advice for what blocks the nearest node, and others for the same reason."""
    if not nearest:
        return "no node is known: is a watcher running, and does it reach the API server?"
    code = nearest[0][1].code
    if code in _HINTS:
        return _HINTS[code](request, [near for near in nearest if near[1].code == code])
    if code.startswith(("Insufficient", "TooMany")):
        return f"request less, or wait: {nearest[0][1].numbers} on the nearest node"
    return f"check node {nearest[0][0].name}"


def _for_memory(request: PodRequest, nearest: BlockedNodes) -> str:
    allowed = [(node, device) for node, _ in nearest for device in _allowed(request, node)]
    if not allowed:
        return _for_health(request, nearest)
    node, device = max(allowed, key=lambda pair: _free_mib(pair[1]))
    free = _free_mib(device)
    where = f"node {node.name} device {device.index}"
    wanted = max(share_mib(container, device) for container in request.containers)
    gpus = max(container.gpus for container in request.containers)
    if len(request.containers) > 1 and free >= 1:
        return (
            f"wait until a pod on these nodes ends: {where} has the most free memory, {free} MiB, "
            "and the pod's containers need more together"
        )
    if free >= wanted and gpus > 1:
        return (
            f"not enough GPUs have that much free memory: request fewer than {gpus} GPUs, or wait"
        )
    if free >= wanted:
        return f"wait until a pod on these nodes ends: {where} has the memory, and is in use"
    if free < 1:
        return "wait until a pod on these nodes ends: none of their devices has free memory"
    return f"request at most {free} MiB: {where} has the most free memory"


def _free_mib(device: MirroredDevice) -> int:
    return device.free_instance_mib if device.in_mig_mode else device.total_mib - device.used_mib


def _for_health(request: PodRequest, nearest: BlockedNodes) -> str:
    """Name the faults of the devices on the first of the nodes that has any."""
    for node, _ in nearest:
        faults = [
            f"device {device.index}: {device.device.public_fault or 'it is unhealthy'}"
            for device in node.devices
            if not device.healthy and device_excluded(request.selection, device.device) is None
        ]
        if faults:
            more = f"; and {len(faults) - NAMED_FAULTS} more" if len(faults) > NAMED_FAULTS else ""
            return f"check node {node.name}: {'; '.join(faults[:NAMED_FAULTS])}{more}"
    return "no device that the pod can use is healthy"


def _for_count(request: PodRequest, nearest: BlockedNodes) -> str:
    node = max((node for node, _ in nearest), key=lambda node: len(node.devices))
    return f"request at most {len(node.devices)} GPUs in one container, as node {node.name} has"


def _for_cores(request: PodRequest, nearest: BlockedNodes) -> str:
    allowed = [device for node, _ in nearest for device in _allowed(request, node)]
    free = max((100 - device.used_cores for device in allowed), default=0)
    if free < 1 or len(request.containers) > 1:
        return "wait until more cores of a device are free"
    return f"request at most {free} % of a device's cores, or wait"


def _for_instance(request: PodRequest, nearest: BlockedNodes) -> str:
    allowed = [device for node, _ in nearest for device in _allowed(request, node)]
    largest = max((device.largest_instance_mib for device in allowed), default=0)
    if largest < 1:
        return _for_health(request, nearest)
    return f"request at most {largest} MiB, the largest MIG instance of these nodes, or for none"


def _allowed(request: PodRequest, node: MirroredNode) -> list[MirroredDevice]:
    """Return the node's healthy devices that the pod may use."""
    devices = [device for device in node.devices if device.healthy]
    if is_selective(request.selection):
        devices = [d for d in devices if device_excluded(request.selection, d.device) is None]
    return devices


def _for_trigger(request: PodRequest, nearest: BlockedNodes) -> str:
    node = nearest[0][0]
    name = next((name for name in request.triggers if name not in node.serving), "the resource")
    dialect = DIALECTS.get(request.dialect)
    if name == TRIGGER and dialect is not None and dialect.served & node.serving:
        return (
            f"start the node agent of node {node.name} with --gpu-strategy auto: it serves other "
            f"resources than {TRIGGER}, for clusters without the webhook"
        )
    if name in node.facts.unserved_resources:
        return (
            f"check the node agent of node {node.name}: the node shows no allocatable {name}, "
            "which a kubelet updates within 10 s after the agent has registered"
        )
    if TRIGGER in node.serving and amount_changes({name: 1}).get(TRIGGER):
        return (
            f"also request {TRIGGER}: 1 in each container with {name}: the webhook adds it to new "
            "pods, so check that the webhook runs"
        )
    return (
        f"run a node agent whose --dialects and --gpu-strategy serve {name}; if one should, its "
        "log names what its kubelet cannot allocate"
    )


def _fixed_hint(text: str) -> Callable[[PodRequest, BlockedNodes], str]:
    return lambda _request, nearest: text.format(node=nearest[0][0].name)


_HINTS: Mapping[str, Callable[[PodRequest, BlockedNodes], str]] = {
    "InsufficientGpuMemory": _for_memory,
    "InsufficientGpuCores": _for_cores,
    "NotEnoughGpus": _for_count,
    "TooManyPods": _fixed_hint(
        "wait until a pod on node {node} ends: it runs as many pods as its kubelet allows"
    ),
    "GpusDoNotFitTogether": _fixed_hint(
        "wait until pods on these nodes end: the pod's containers need their GPUs at once"
    ),
    "ResourceNotServed": _for_trigger,
    "NodeAgentNotReady": _fixed_hint("check the node agent of node {node}, and its kubelet"),
    "NoGpus": _fixed_hint("no node that the pod may use has a GPU: is a node agent running there?"),
    "GpuSlotsTaken": _fixed_hint(
        "wait for a share to end, or raise --device-split-count of the node agents"
    ),
    "GpuGroupSpread": _fixed_hint("add a device, or remove the spread policy from the pod group"),
    "GpuNotIdle": _fixed_hint(
        "request less than 100 % of the cores, or wait for a device to be idle"
    ),
    "GpuClaimed": _fixed_hint("wait until the pods that are being evicted have ended"),
    "GpuInExclusiveUse": _fixed_hint("wait until a device that is used exclusively is free"),
    "GpuExcluded": _fixed_hint(
        "remove the devices of node {node} from its annotation of excluded devices"
    ),
    "GpuUnhealthy": _for_health,
    "GpuTypeExcluded": _fixed_hint("allow more types of GPU, or add a node that has one of these"),
    "GpuUuidExcluded": _fixed_hint("allow more UUIDs, or do not list any"),
    "GpuInstanceTooSmall": _for_instance,
    "GpuInstancesTaken": _fixed_hint(
        "request less memory, or wait until an instance or a whole device is free"
    ),
    "NoGpuInstances": _fixed_hint(
        "configure MIG layouts for this GPU model in the agent of node {node}"
    ),
    "GpuNotPartitioned": _fixed_hint("wait for the shares on the devices of node {node} to end"),
    "GpuInstancesLive": _fixed_hint("wait for the instances on the devices of node {node} to end"),
    "GpuPlaceUnknown": _fixed_hint(
        "remove the topology from the pod: the agent of node {node} does not know where GPUs are"
    ),
    "GpuModeMismatch": _fixed_hint(
        "remove the required mode from the pod, or add a node in that mode"
    ),
    "GpuIsolationStrict": _fixed_hint(
        "add a device in MIG mode, request whole GPUs, or remove strict isolation from the pod"
    ),
    "GpuNotShared": _fixed_hint(
        "request whole GPUs, with all of the cores or the annotation leasehold.dev/isolation: "
        "strict beside all of the memory, or start the agent of node {node} without --isolation"
    ),
    "GpuNotIsolated": _fixed_hint(
        "run `leasehold doctor` on node {node}: its checks of the library report what to do"
    ),
    "UntoleratedTaint": _fixed_hint("tolerate the taint of node {node}, or remove it"),
    "NodeUnschedulable": _fixed_hint("uncordon node {node}"),
    "ExistingAntiAffinity": _fixed_hint(
        "wait for the pods in that domain of node {node} whose required anti-affinity selects the "
        "pod to end, or change the pod's labels"
    ),
    "NodeAffinity": _fixed_hint("change the pod's node selector or affinity, or label node {node}"),
    "UnsupportedConstraint": _fixed_hint(
        "remove the fields, or create the pod again while the webhook runs, which hands it over to "
        "kube-scheduler where the extender is installed"
    ),
}

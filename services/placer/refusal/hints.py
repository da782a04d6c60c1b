"""The next thing to try, for a pod that fits nowhere."""

from collections.abc import Callable, Mapping, Sequence

from services.placer.choice.device_choice import share_mib
from services.placer.mirror.node_mirror import DeviceState, NodeState
from shared.dialects.advertised import TRIGGER
from shared.model.request import PodRequest
from shared.placing.device_filters import device_excluded
from shared.placing.node_filters import NodeFilterFailure

Near = Sequence[tuple[NodeState, NodeFilterFailure]]


def hint_for(request: PodRequest, nearest: Near) -> str:
    """Return advice for what blocks the nearest node, and others for the same reason."""
    if not nearest:
        return "no node is known: is a watcher running, and does it reach the API server?"
    code = nearest[0][1].code
    if code in _HINTS:
        return _HINTS[code](request, [near for near in nearest if near[1].code == code])
    if code.startswith(("Insufficient", "TooMany")):
        return f"ask for less: {nearest[0][1].numbers} on the nearest node"
    return f"look at node {nearest[0][0].name} first"


def _for_memory(request: PodRequest, nearest: Near) -> str:
    widest: tuple[int, NodeState, DeviceState] | None = None
    for node, _ in nearest:
        for device in node.devices:
            free = device.instance if device.mig else device.total - device.memory
            if _allowed(request, device) and (widest is None or free > widest[0]):
                widest = (free, node, device)
    if widest is None:
        return "no device that the pod allows is healthy"
    free, node, device = widest
    where = f"node {node.name} device {device.index}"
    wanted = max(share_mib(container, device) for container in request.containers)
    if free >= wanted:
        gpus = max(container.gpus for container in request.containers)
        return f"too few devices have such a gap: ask for fewer than {gpus} GPUs, or wait"
    return f"ask for at most {max(free, 0)} MiB: the largest gap is on {where}"


def _for_count(request: PodRequest, nearest: Near) -> str:
    node = max((node for node, _ in nearest), key=lambda node: len(node.devices))
    return f"ask for at most {len(node.devices)} GPUs in one container, as node {node.name} has"


def _for_cores(request: PodRequest, nearest: Near) -> str:
    allowed = [d for node, _ in nearest for d in node.devices if _allowed(request, d)]
    free = max((100 - device.cores for device in allowed), default=0)
    if free < 1:
        return "wait for a device's cores to be given back"
    return f"ask for at most {free} % of a device's cores, or wait"


def _for_instance(request: PodRequest, nearest: Near) -> str:
    allowed = [d for node, _ in nearest for d in node.devices if _allowed(request, d)]
    largest = max((device.largest for device in allowed), default=0)
    return f"ask for at most {largest} MiB, the largest MIG instance of these nodes, or for none"


def _allowed(request: PodRequest, device: DeviceState) -> bool:
    return device.healthy and device_excluded(request.selection, device.device) is None


def _for_trigger(request: PodRequest, nearest: Near) -> str:
    missing = [name for name in request.triggers if name not in nearest[0][0].served]
    name = missing[0] if missing else "the resource"
    if missing and TRIGGER in nearest[0][0].served:
        return (
            f"ask for {TRIGGER}: 1 beside it: node {nearest[0][0].name} has so much that a list of "
            f"all its {name} would be too long for its kubelet"
        )
    return (
        f"run a node agent whose --dialects and --gpu-strategy serve {name}: no fitting node does"
    )


def _saying(text: str) -> Callable[[PodRequest, Near], str]:
    return lambda _request, nearest: text.format(node=nearest[0][0].name)


_HINTS: Mapping[str, Callable[[PodRequest, Near], str]] = {
    "InsufficientGpuMemory": _for_memory,
    "InsufficientGpuCores": _for_cores,
    "NotEnoughGpus": _for_count,
    "ResourceNotServed": _for_trigger,
    "NodeAgentNotReady": _saying("look at the node agent of node {node}, and at its kubelet"),
    "NoGpus": _saying("no node that the pod may use has a GPU: is a node agent running there?"),
    "GpuSlotsTaken": _saying(
        "wait for a share to end, or raise --device-split-count of the node agents"
    ),
    "GpuGroupSpread": _saying("add a device, or take the spread policy off the pod group"),
    "GpuNotIdle": _saying("ask for less than 100 % of the cores, or wait for a device to be idle"),
    "GpuClaimed": _saying("wait until the pods that are being evicted have made room"),
    "GpuHeldAlone": _saying("wait for a device that is held alone to be given back"),
    "GpuClosed": _saying("take the devices of node {node} off its annotation of closed ones"),
    "GpuUnhealthy": _saying("look at the devices of node {node}: its agent reports them ill"),
    "GpuTypeExcluded": _saying("allow more types of GPU, or add a node that has one of these"),
    "GpuUuidExcluded": _saying("allow more UUIDs, or leave the choice to the placer"),
    "GpuInstanceTooSmall": _for_instance,
    "GpuInstancesTaken": _saying(
        "ask for less memory, or wait until an instance, or all of a device, is given back"
    ),
    "NoGpuInstances": _saying("give the agent of node {node} layouts for this model of GPU"),
    "GpuNotPartitioned": _saying("wait for the shares on the devices of node {node} to end"),
    "GpuInstancesLive": _saying("wait for the instances on the devices of node {node} to end"),
    "GpuPlaceUnknown": _saying(
        "take the topology off the pod: the agent of node {node} cannot tell where its GPUs lie"
    ),
    "GpuModeMismatch": _saying("drop the demanded mode, or add a node in that mode"),
    "GpuIsolationStrict": _saying(
        "add a device in mig mode, ask for whole GPUs, or take the strict isolation off the pod"
    ),
    "GpuNotShared": _saying(
        "ask for whole GPUs, with all of the cores or the annotation leasehold.dev/isolation: "
        "strict beside all of the memory, or start the agent of node {node} without --isolation"
    ),
    "GpuNotIsolated": _saying(
        "run `leasehold doctor` on node {node}: its checks of the library say what to do"
    ),
    "UntoleratedTaint": _saying("tolerate the taint of node {node}, or take it away"),
    "NodeUnschedulable": _saying("uncordon node {node}"),
    "NodeAffinity": _saying("change the pod's node selector or affinity, or label node {node}"),
    "HostPortTaken": _saying("use another host port, or wait for the pod on node {node} to end"),
    "UnsupportedConstraint": _saying("take the constraint off the pod, or use another scheduler"),
}

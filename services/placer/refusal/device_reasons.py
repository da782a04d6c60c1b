"""Why the devices of one node do not do: the node's reason in short, each device's with numbers."""

from collections import Counter
from collections.abc import Mapping, Sequence

from services.placer.choice.device_choice import (
    FINDERS,
    held_of,
    modes_of,
    note_given,
    of_mode,
    share_mib,
    takes_instances,
)
from services.placer.choice.device_order import Own, Owns
from services.placer.choice.device_topology import place_in
from services.placer.mirror.node_mirror import DeviceState, NodeState
from shared.model.device import DeviceMode, DeviceRefusal, DeviceUse, device_refusal
from shared.model.placement import DeviceVerdict
from shared.model.request import GpuRequest, PodRequest, TopologyScope
from shared.placing.device_filters import device_excluded
from shared.placing.mig_instances import instance_mib, instance_refusal
from shared.placing.node_filters import NodeFilterFailure

NODE_TEXTS: Mapping[str, str] = {
    "InsufficientGpuMemory": "Insufficient GPU memory",
    "InsufficientGpuCores": "Insufficient GPU cores",
    "GpuSlotsTaken": "node(s) had no free GPU share slot",
    "GpuGroupSpread": "node(s) had only GPUs that carry the pod's group already",
    "GpuNotIdle": "node(s) had no idle GPU",
    "GpuClaimed": "node(s) had only GPUs that are kept for a pod for which others make room",
    "GpuHeldAlone": "node(s) had only GPUs that other pods hold alone",
    "GpuClosed": "node(s) had GPUs closed to new shares",
    "GpuUnhealthy": "node(s) had unhealthy GPUs",
    "GpuModeMismatch": "node(s) had only GPUs in another mode",
    "GpuIsolationStrict": "node(s) had no MIG instance and no whole GPU for strict isolation",
    "GpuNotShared": "node(s) had only GPUs that are not shared",
    "GpuNotIsolated": "node(s) had no working isolation library",
    "GpuTypeExcluded": "node(s) had no GPU of an allowed type",
    "GpuUuidExcluded": "node(s) had no GPU with an allowed UUID",
    "GpuInstancesTaken": "node(s) had no free MIG instance that is large enough",
    "GpuInstanceTooSmall": "node(s) had only GPUs whose MIG instances are too small",
    "NoGpuInstances": "node(s) had GPUs in mig mode without a known layout",
    "GpuInstancesLive": "node(s) had only GPUs with live MIG instances",
    "GpuNotPartitioned": "node(s) had GPUs that shares keep from being partitioned",
    "GpuPlaceUnknown": "node(s) had GPUs of which nobody knows where they lie",
}

SCOPES: Mapping[TopologyScope, str] = {
    TopologyScope.NUMA: "NUMA node",
    TopologyScope.PCIE: "PCIe root",
}

EXCLUSIONS = frozenset({"GpuTypeExcluded", "GpuUuidExcluded", "GpuModeMismatch", "GpuClosed"})
"""Why a device was never in question: named only where no device was."""

CLOSED = DeviceRefusal("GpuClosed", "an annotation of its node closes it to new shares")


def why_no_devices(request: PodRequest, node: NodeState) -> NodeFilterFailure:
    """Return the reason that most of the node's devices in question share."""
    if not node.devices:
        return NodeFilterFailure("NoGpus", "node(s) had no GPU")
    most = max(container.gpus for container in request.containers)
    if most > len(node.devices):
        numbers = f"{most} different GPUs wanted, {len(node.devices)} there"
        return NodeFilterFailure(
            "NotEnoughGpus", "node(s) had fewer GPUs than the pod asks for", numbers
        )
    refusals = device_refusals(request, node)
    counts = Counter(refusal.code for refusal in refusals.values())
    if not counts:
        where = (
            f" on one {SCOPES[request.topology_scope]}" if request.topology_scope in SCOPES else ""
        )
        text = f"node(s) had no GPUs for all containers at once{where}"
        return NodeFilterFailure("GpusDoNotFitTogether", text)
    in_question = Counter({code: n for code, n in counts.items() if code not in EXCLUSIONS})
    code = (in_question or counts).most_common(1)[0][0]
    fitting = len(node.devices) - len(refusals)
    return NodeFilterFailure(
        code, NODE_TEXTS[code], f"{most} GPU{'s' * (most > 1)} wanted, {fitting} of those there fit"
    )


def verdicts_on(request: PodRequest, node: NodeState) -> tuple[DeviceVerdict, ...]:
    """Spell out why each device that refuses does so."""
    return tuple(
        DeviceVerdict(device=device.uuid, index=device.index, reason=refusal.text)
        for device, refusal in device_refusals(request, node).items()
    )


def device_refusals(request: PodRequest, node: NodeState) -> dict[DeviceState, DeviceRefusal]:
    """Return why devices refuse the first container that cannot be served."""
    refusals: dict[DeviceState, DeviceRefusal] = {}
    allowed = []
    for device in node.devices:
        excluded = device_excluded(request.selection, device.device)
        if excluded is None and device.index in node.facts.excluded_devices:
            excluded = CLOSED
        if excluded is None:
            allowed.append(device)
        else:
            refusals[device] = excluded
    modes = modes_of(request)
    for mode in DeviceMode:
        inside = of_mode(allowed, mode)
        for devices in [(d,) for d in inside] if request.same_device else [tuple(inside)]:
            unserved: tuple[GpuRequest, Owns] | None = request.containers[0], {}
            if mode in modes:
                unserved = _first_unserved(request, devices, mode)
            if unserved is None:
                continue
            container, owns = unserved
            for device in devices:
                refusal = _refusal(container, request, device, owns)
                if refusal is not None:
                    refusals[device] = refusal
    return dict(sorted(refusals.items(), key=lambda entry: entry[0].index))


def _first_unserved(
    request: PodRequest, devices: Sequence[DeviceState], mode: DeviceMode
) -> tuple[GpuRequest, Owns] | None:
    """Return the container and what those before it were given, None if all are served."""
    owns: dict[DeviceState, Own] = {}
    for container in request.containers:
        chosen = FINDERS[mode](container, request, devices, owns)
        if chosen is None:
            return container, owns
        note_given(chosen, owns)
    return None


def _refusal(
    container: GpuRequest, request: PodRequest, device: DeviceState, owns: Owns
) -> DeviceRefusal | None:
    if request.topology_scope in SCOPES and place_in(device, request.topology_scope) is None:
        place = SCOPES[request.topology_scope]
        text = f"its {place} is not known, and the pod wants all its GPUs on one"
        return DeviceRefusal("GpuPlaceUnknown", text)
    own, use = Own() if container.init else owns.get(device, Own()), device.use()
    seen = DeviceUse(
        memory_mib=use.memory_mib + own.memory,
        cores_percent=use.cores_percent + own.cores,
        shares=use.shares + own.shares,
        fence=use.fence,
        anti_affinity_groups=use.anti_affinity_groups,
        exclusive=use.exclusive or own.alone,
        layout=use.layout,
        claimed_by=use.claimed_by,
    )
    if device.mig and takes_instances(request):
        return _instance_refusal(container, request, device, owns)
    memory_mib = share_mib(container, device)
    return device_refusal(
        container, device.device, seen, memory_mib=memory_mib, tags=request.anti_affinity_groups
    )


def _instance_refusal(
    container: GpuRequest, request: PodRequest, device: DeviceState, owns: Owns
) -> DeviceRefusal | None:
    met = sorted(device.tags.intersection(request.anti_affinity_groups))
    if not device.healthy:
        return DeviceRefusal("GpuUnhealthy", "it is unhealthy")
    if met:
        text = f"it already carries a pod of group {', '.join(met)}"
        return DeviceRefusal("GpuGroupSpread", text)
    if device.shares and not device.layout:
        text = f"{device.shares} shares from before mig mode keep it from being partitioned"
        return DeviceRefusal("GpuNotPartitioned", text)
    layout, taken, free_mib = held_of(device, container, owns)
    need_mib = instance_mib(container, device.device, device.largest)
    return instance_refusal(device.tables, layout, taken, need_mib=need_mib, free_mib=free_mib)

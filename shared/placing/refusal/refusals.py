"""Refusals: reasons counted over all nodes, detailed for the nearest nodes, with a hint; pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from shared.dialects import DIALECTS
from shared.dialects.advertised import TRIGGER
from shared.dialects.pod_requests import amount_changes
from shared.model.device import IDLE_BEFORE, required_cores_percent, slot_limit
from shared.model.placement import DeviceVerdict, NodeVerdict, Refusal
from shared.model.quantity import amount_text, peak
from shared.model.request import GpuRequest, PodRequest, TopologyScope
from shared.placing.choice.container_choice import share_mib
from shared.placing.choice.device_choice import (
    allowed_devices,
    choose_devices,
    device_excluded,
    is_selective,
)
from shared.placing.choice.device_refusals import (
    SCOPES,
    DeviceRefusals,
    device_refusals,
    explain_no_devices,
)
from shared.placing.index.node_index import NearNode, NodeIndex, RefusalMemo, placement_key
from shared.placing.index.node_sets import Excluded
from shared.placing.index.threshold_column import NodeSet, positions_in, store
from shared.placing.mirror.node_mirror import MirroredDevice, MirroredNode
from shared.placing.node_filters import NodeFilterFailure, check_all

BlockedNodes = Sequence[tuple[MirroredNode, NodeFilterFailure]]
NEAREST = 3
COMPARED_NODES = 32
"""Nodes per reason among which the nearest are found."""
CACHED_REFUSALS = 8192
CACHED_COPIES = 64

_STAGES = (
    "UnsupportedConstraint",
    "NodeAffinity",
    "NodeUnschedulable",
    "UntoleratedTaint",
    "ExistingAntiAffinity",
)
"""Codes of nodes that are far from fitting, the farthest first; codes of devices come last."""

NodeDetails = Mapping[NearNode, tuple[NodeFilterFailure, NodeVerdict]]


def cached_refusal(request: PodRequest, index: NodeIndex) -> Refusal | None:
    """Return the refusal of an equal request, if the mirror has not changed since."""
    memo = index.refusals.get(placement_key(request))
    return memo.refusal if memo and memo.position == index.mirror.changes.end else None


def explain_refusal(request: PodRequest, index: NodeIndex, excluded: Excluded) -> Refusal:
    """Return why nothing fits, given all nodes by the reason that excludes them."""
    key, mirror = placement_key(request), index.mirror
    known = index.refusals.pop(key, None)
    inventory = mirror.inventory_changes.end
    if known is not None and known.inventory_position != inventory:
        known = None
    possible = possible_nodes(request, index) if known is None else known.possible
    counts = sorted(
        ((nodes.bit_count(), code, text) for (code, text), nodes in excluded.items()),
        key=lambda entry: (-entry[0], entry[2]),
    )
    details, hint = _details(request, index, excluded, possible, known)
    listed = ", ".join(f"{count} {text}" for count, _, text in counts) or "there is no node"
    refusal = Refusal(
        reason=f"0/{len(mirror.nodes)} nodes are available: {listed}.",
        counts=_by_code(counts),
        nearest_nodes=tuple([verdict for _, verdict in details.values()]),
        hint=hint,
        permanent=bool(mirror.nodes) and not possible,
    )
    memo = RefusalMemo(mirror.changes.end, inventory, possible, details, refusal)
    return store(index.refusals, key, memo, CACHED_REFUSALS).refusal


def _by_code(counts: Iterable[tuple[int, str, str]]) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for count, code, _ in counts:
        sums[code] = sums.get(code, 0) + count
    return tuple(sorted(sums.items(), key=lambda entry: (-entry[1], entry[0])))


def _details(
    request: PodRequest,
    index: NodeIndex,
    excluded: Excluded,
    possible: NodeSet,
    known: RefusalMemo | None,
) -> tuple[NodeDetails, str]:
    """Return why each of the nearest nodes does not fit, and a hint; `known` is the last refusal.

    A hint to wait is given only for nodes that would fit if they were empty.
    """
    nearest = tuple(_nearest(index, excluded, possible))
    known_details = known.details if known else {}
    if known and tuple(known_details) == nearest:
        return known_details, known.refusal.hint
    details = {near: known_details.get(near) or _explain(request, near[1]) for near in nearest}
    blocked = [(near[1], failure) for near, (failure, _) in details.items()]
    return details, _hint(request, index, blocked, possible)


def _hint(request: PodRequest, index: NodeIndex, blocked: BlockedNodes, possible: NodeSet) -> str:
    """Return advice for the nodes that would fit if they were empty, or else for the nearest."""
    positions = index.sets.positions.positions
    hopeful = [each for each in blocked if possible >> positions[each[0]] & 1]
    if hopeful or not blocked:
        return hint_for(request, hopeful)
    node = blocked[0][0]
    return impossible_hint(request, node, empty_copy(node, index)) or hint_for(request, blocked)


def _nearest(index: NodeIndex, excluded: Excluded, possible: NodeSet) -> Iterator[NearNode]:
    """Yield nodes at the last stage that excludes any, those with the most free memory first.

    At each stage, `possible` nodes come first. Each node has the reason that excludes it and the
    number of its changes.
    """
    nodes, free_mib = index.sets.positions.nodes, index.sets.largest_free_mib()
    missing = NEAREST
    by_stage = sorted(
        (-_stage(code), at, code, members)
        for (code, _), same_reason in excluded.items()
        for at, members in enumerate((same_reason & possible, same_reason & ~possible))
        if members
    )
    for _, same_stage in groupby(by_stage, key=itemgetter(0, 1)):
        compared = [
            (-free_mib[position], node.name, code, node)
            for _, _, code, members in same_stage
            for position in positions_in(members, COMPARED_NODES)
            if (node := nodes[position]) is not None
        ]
        compared.sort()
        for _, _, code, node in compared[:missing]:
            yield code, node, node.changes
        missing -= len(compared)
        if missing <= 0:
            return


def _explain(request: PodRequest, node: MirroredNode) -> tuple[NodeFilterFailure, NodeVerdict]:
    """Return the first reason why the node does not fit, and with those of its devices."""
    failure = check_all(request, node.facts, node.free_resources, node.serving)
    if failure is not None:
        return failure, _node_verdict(node, failure, {})
    refusals = device_refusals(request, node)
    failure = explain_no_devices(request, node, refusals)
    return failure, _node_verdict(node, failure, refusals)


def _stage(code: str) -> int:
    if code in _STAGES:
        return _STAGES.index(code)
    return len(_STAGES) + ("Gpu" in code and code not in {"NoGpus", "GpuModeMismatch"})


def _node_verdict(
    node: MirroredNode, blocked: NodeFilterFailure, refusals: DeviceRefusals
) -> NodeVerdict:
    text = blocked.message.replace("node(s) were ", "it was ").replace("node(s) ", "it ")
    reason = f"{text} ({blocked.numbers})" if blocked.numbers else text
    devices = tuple(
        [
            DeviceVerdict(device=device.uuid, index=device.index, reason=refusal.text)
            for device, refusal in refusals.items()
        ]
    )
    return NodeVerdict(node=node.name, reason=reason, devices=devices)


def possible_nodes(request: PodRequest, index: NodeIndex) -> NodeSet:
    """Return the nodes that could fit the pod if they were empty, healthy and untainted.

    Only what ending pods cannot change counts: devices, their number and kind, and what a node has
    to allocate.
    """
    if request.node_requirements.unsupported:
        return 0
    selection = request.selection
    kinds = index.sets.kinds_of_hardware(
        request.resources,
        uuids=bool(selection.uuids or selection.not_uuids),
        locations=request.topology_scope is not TopologyScope.NODE,
    )
    possible: NodeSet = 0
    for example, alike in kinds:
        if choose_devices(request, empty_copy(example, index)) is not None:
            possible |= alike
    return possible


def empty_copy(node: MirroredNode, index: NodeIndex) -> MirroredNode:
    """Return a node with the same devices, all of them healthy, and without any use.

    Besides, only its name and what it has to allocate are those of the node.
    """
    key = node, index.mirror.inventory_changes.end
    empty = index.empty_copies.get(key)
    if empty is not None:
        return empty
    empty = store(index.empty_copies, key, MirroredNode(node.name), CACHED_COPIES)
    empty.free_resources = dict(node.facts.allocatable)
    empty.put_devices(
        MirroredDevice(empty, replace(device.device, healthy=True)) for device in node.devices
    )
    return empty


NAMED_FAULTS = 3


def hint_for(request: PodRequest, nearest: BlockedNodes) -> str:
    """Return advice for what blocks the nearest node, and others for the same reason."""
    if not nearest:
        return "no node is known: is a watcher running, and does it reach the API server?"
    code = nearest[0][1].code
    hint = HINTS.get(code)
    if isinstance(hint, str):
        return hint.format(node=nearest[0][0].name)
    if hint:
        return hint(request, [near for near in nearest if near[1].code == code])
    if code.startswith(("Insufficient", "TooMany")):
        return f"request less, or wait: {nearest[0][1].numbers} on the nearest node"
    return f"check node {nearest[0][0].name}"


def _memory_hint(request: PodRequest, nearest: BlockedNodes) -> str:
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


def _cores_hint(request: PodRequest, nearest: BlockedNodes) -> str:
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


HINTS: Mapping[str, str | Callable[[PodRequest, BlockedNodes], str]] = {
    "InsufficientGpuMemory": _memory_hint,
    "InsufficientGpuCores": _cores_hint,
    "NotEnoughGpus": _for_count,
    "TooManyPods": (
        "wait until a pod on node {node} ends: it runs as many pods as its kubelet allows"
    ),
    "GpusDoNotFitTogether": (
        "wait until pods on these nodes end: the pod's containers need their GPUs at once"
    ),
    "ResourceNotServed": _for_trigger,
    "NodeAgentNotReady": "check the node agent of node {node}, and its kubelet",
    "NoGpus": "no node that the pod may use has a GPU: is a node agent running there?",
    "GpuSlotsTaken": ("wait for a share to end, or raise --device-split-count of the node agents"),
    "GpuGroupSpread": "add a device, or remove the spread policy from the pod group",
    "GpuNotIdle": ("request less than 100 % of the cores, or wait for a device to be idle"),
    "GpuClaimed": "wait until the pods that are being evicted have ended",
    "GpuInExclusiveUse": "wait until a device that is used exclusively is free",
    "GpuExcluded": ("remove the devices of node {node} from its annotation of excluded devices"),
    "GpuUnhealthy": _for_health,
    "GpuTypeExcluded": "allow more types of GPU, or add a node that has one of these",
    "GpuUuidExcluded": "allow more UUIDs, or do not list any",
    "GpuInstanceTooSmall": _for_instance,
    "GpuInstancesTaken": (
        "request less memory, or wait until an instance or a whole device is free"
    ),
    "NoGpuInstances": ("configure MIG layouts for this GPU model in the agent of node {node}"),
    "GpuNotPartitioned": "wait for the shares on the devices of node {node} to end",
    "GpuInstancesLive": "wait for the instances on the devices of node {node} to end",
    "GpuPlaceUnknown": (
        "remove the topology from the pod: the agent of node {node} does not know where GPUs are"
    ),
    "GpuModeMismatch": ("remove the required mode from the pod, or add a node in that mode"),
    "GpuIsolationStrict": (
        "add a device in MIG mode, request whole GPUs, or remove strict isolation from the pod"
    ),
    "GpuNotShared": (
        "request whole GPUs, with all of the cores or the annotation leasehold.dev/isolation: "
        "strict beside all of the memory, or start the agent of node {node} without --isolation"
    ),
    "GpuNotIsolated": (
        "run `leasehold doctor` on node {node}: its checks of the library report what to do"
    ),
    "UntoleratedTaint": "tolerate the taint of node {node}, or remove it",
    "NodeUnschedulable": "uncordon node {node}",
    "ExistingAntiAffinity": (
        "wait for the pods in that domain of node {node} whose required anti-affinity selects the "
        "pod to end, or change the pod's labels"
    ),
    "NodeAffinity": "change the pod's node selector or affinity, or label node {node}",
    "UnsupportedConstraint": (
        "remove the fields, or create the pod again while the webhook runs, which hands it over to "
        "kube-scheduler where the extender is installed"
    ),
}
"""What to try for each code; `{node}` is the nearest node that is blocked for it."""


def impossible_hint(request: PodRequest, node: MirroredNode, empty: MirroredNode) -> str:
    """Return why the pod would not fit on the node if it were `empty`, and what to change.

    Empty: it would, or other advice is as true for an empty node.
    """
    text = next(_reasons(request, node, empty), "")
    return text and f"waiting does not help: {text}"


def _reasons(request: PodRequest, node: MirroredNode, empty: MirroredNode) -> Iterator[str]:
    for name, amount in request.resources.items():
        there = empty.free_resources.get(name, 0)
        if amount > there:
            wanted, most = amount_text(name, amount), amount_text(name, there)
            yield f"node {node.name} has {most} of {name} in all, and {wanted} are requested"
    if not empty.devices or choose_devices(request, empty) is not None:
        return
    code = explain_no_devices(request, empty).code
    allowed = allowed_devices(request.selection, empty)
    if code in _REASONS and allowed:
        yield _REASONS[code](request, node, allowed)


def _must_share(request: PodRequest, devices: Sequence[MirroredDevice]) -> bool:
    """Return whether all containers of the pod have to be on one device."""
    return len(request.containers) > 1 and (request.same_device or len(devices) == 1)


def _largest(devices: Sequence[MirroredDevice]) -> MirroredDevice:
    return max(devices, key=lambda device: device.total_mib)


def _for_memory(request: PodRequest, node: MirroredNode, devices: Sequence[MirroredDevice]) -> str:
    device = _largest(devices)
    where = f"device {device.index} of node {node.name}"
    if _must_share(request, devices):
        together = _together(request, lambda container: share_mib(container, device))
        return (
            f"the pod's containers together need {together} of the {device.total_mib} MiB of "
            f"{where}: request less memory"
        )
    wanted = max(share_mib(container, device) for container in request.containers)
    if wanted > device.total_mib:
        return f"request at most {device.total_mib} MiB, all the memory of {where}"
    return _for_number(request, node, devices)


def _for_cores(request: PodRequest, node: MirroredNode, devices: Sequence[MirroredDevice]) -> str:
    if not _must_share(request, devices):
        return _for_number(request, node, devices)
    where = f"device {_largest(devices).index} of node {node.name}"
    together = _together(request, required_cores_percent)
    return f"the pod's containers together need {together} % of the cores of {where}: request less"


def _for_slots(request: PodRequest, node: MirroredNode, devices: Sequence[MirroredDevice]) -> str:
    if not _must_share(request, devices):
        return _for_number(request, node, devices)
    device = _largest(devices)
    together = _together(request, lambda container: int(container.slotted))
    slots = min(slot_limit(container, device.device) for container in request.containers)
    return (
        f"the pod's containers need {together} share slots, and device {device.index} of node "
        f"{node.name} has {slots}: raise --device-split-count of its node agent, or request GPUs "
        "in fewer containers"
    )


def _for_number(request: PodRequest, node: MirroredNode, devices: Sequence[MirroredDevice]) -> str:
    scope = SCOPES.get(request.topology_scope)
    on_one = f" on one {scope}" if request.topology_scope is not TopologyScope.NODE else ""
    alone = any(container.sharing in IDLE_BEFORE for container in request.containers)
    needs = "GPUs that they share with no other container" if alone else "these GPUs at once"
    count = f"{len(devices)} GPU{'s' * (len(devices) > 1)}"
    return (
        f"the pod's containers need {needs}{on_one}, and node {node.name} has {count} that the pod "
        "may use: request fewer GPUs or less of them"
    )


def _together(request: PodRequest, amount: Callable[[GpuRequest], int]) -> int:
    return peak(((amount(container), container.init) for container in request.containers), 0)


_REASONS: Mapping[str, Callable[[PodRequest, MirroredNode, Sequence[MirroredDevice]], str]] = {
    "InsufficientGpuMemory": _for_memory,
    "InsufficientGpuCores": _for_cores,
    "GpuSlotsTaken": _for_slots,
    "GpuNotIdle": _for_number,
    "GpuInExclusiveUse": _for_number,
    "GpuInstancesTaken": _for_number,
    "GpusDoNotFitTogether": _for_number,
}
"""By the reason that excludes the empty node; with any other, waiting is not advised anyway."""

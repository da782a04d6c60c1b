"""Refusals: reasons counted over all nodes, detailed for the nearest nodes, with a hint; pure."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from services.placer.choice.device_choice import choose_devices
from services.placer.choice.device_refusals import device_verdicts
from services.placer.index.request_verdicts import RequestVerdicts
from services.placer.mirror.cluster_mirror import ClusterMirror
from services.placer.mirror.node_mirror import MirroredDevice, MirroredNode
from services.placer.refusal.hints import hint_for
from shared.model.placement import NodeVerdict, Refusal
from shared.model.request import PodRequest, TopologyScope
from shared.placing.node_filters import NodeFilterFailure, check_resources

NEAREST = 3
COMPARED_NODES = 32
"""Nodes per reason among which the nearest are found."""

_STAGES = ("UnsupportedConstraint", "NodeAffinity", "NodeUnschedulable", "UntoleratedTaint")
"""Codes of nodes that are far from fitting, the farthest first; codes of devices come last."""


def explain_refusal(
    request: PodRequest, mirror: ClusterMirror, verdicts: RequestVerdicts
) -> Refusal:
    """Return why nothing fits; cached for equal requests until the mirror changes."""
    position = mirror.changes.end
    if verdicts.refusal is None or verdicts.refusal[0] != position:
        verdicts.refusal = (position, _refusal(request, mirror, verdicts))
    return verdicts.refusal[1]


def _refusal(request: PodRequest, mirror: ClusterMirror, verdicts: RequestVerdicts) -> Refusal:
    nodes = len(mirror.nodes)
    counts = sorted(
        ((len(blocked), code, text) for (code, text), blocked in verdicts.blocked.items()),
        key=lambda entry: (-entry[0], entry[2]),
    )
    nearest = _nearest(verdicts)
    listed = ", ".join(f"{count} {text}" for count, _, text in counts) or "there is no node"
    return Refusal(
        reason=f"0/{nodes} nodes are available: {listed}.",
        counts=_by_code(counts),
        nearest_nodes=tuple(_node_verdict(request, node, blocked) for node, blocked in nearest),
        hint=hint_for(request, nearest),
        permanent=_is_permanent(request, mirror, verdicts),
    )


def _by_code(counts: Iterable[tuple[int, str, str]]) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for count, code, _ in counts:
        sums[code] = sums.get(code, 0) + count
    return tuple(sorted(sums.items(), key=lambda entry: (-entry[1], entry[0])))


def _nearest(verdicts: RequestVerdicts) -> list[tuple[MirroredNode, NodeFilterFailure]]:
    compared = [
        entry
        for blocked in verdicts.blocked.values()
        for entry in islice(blocked.items(), COMPARED_NODES)
    ]
    compared.sort(
        key=lambda entry: (-_stage(entry[1].code), -_largest_free_mib(entry[0]), entry[0].name)
    )
    return compared[:NEAREST]


def _stage(code: str) -> int:
    if code in _STAGES:
        return _STAGES.index(code)
    return len(_STAGES) + ("Gpu" in code and code not in {"NoGpus", "GpuModeMismatch"})


def _largest_free_mib(node: MirroredNode) -> int:
    free_mib = (
        device.free_instance_mib if device.in_mig_mode else device.total_mib - device.used_mib
        for device in node.devices
        if device.healthy
    )
    return max(free_mib, default=0)


def _node_verdict(
    request: PodRequest, node: MirroredNode, blocked: NodeFilterFailure
) -> NodeVerdict:
    text = blocked.message.replace("node(s) were ", "it was ").replace("node(s) ", "it ")
    reason = f"{text} ({blocked.numbers})" if blocked.numbers else text
    devices = device_verdicts(request, node) if "Gpu" in blocked.code and request.containers else ()
    return NodeVerdict(node=node.name, reason=reason, devices=devices)


def _is_permanent(request: PodRequest, mirror: ClusterMirror, verdicts: RequestVerdicts) -> bool:
    """Return whether no node could ever fit the pod, even if empty, healthy and untainted.

    Only what ending pods cannot change counts: devices, their number and kind, and what a node has
    to allocate.
    """
    position = mirror.inventory_changes.end
    if verdicts.permanent is None or verdicts.permanent[0] != position:
        permanent = bool(mirror.nodes) and not _could_ever_fit(request, mirror.nodes.values())
        verdicts.permanent = (position, permanent)
    return verdicts.permanent[1]


def _could_ever_fit(request: PodRequest, nodes: Iterable[MirroredNode]) -> bool:
    if request.node_requirements.unsupported:
        return False
    tried = set()
    for node in nodes:
        if check_resources(request.resources, node.facts.allocatable) is not None:
            continue
        hardware = tuple(_hardware_key(device, request) for device in node.devices)
        if hardware in tried:
            continue
        tried.add(hardware)
        if choose_devices(request, _empty_copy(node)) is not None:
            return True
    return False


def _hardware_key(device: MirroredDevice, request: PodRequest) -> object:
    """Return what decides whether a share fits the device when it is empty."""
    known = device.device
    uuid = known.uuid if request.selection.uuids or request.selection.not_uuids else ""
    location = (
        (known.numa, known.pcie) if request.topology_scope is not TopologyScope.NODE else None
    )
    modes = (known.mode, known.layouts, known.isolation)
    return (device.total_mib, device.unit_mib, device.slots, known.model, modes, uuid, location)


def _empty_copy(node: MirroredNode) -> MirroredNode:
    empty = MirroredNode(node.name)
    empty.put_devices(
        MirroredDevice(empty, replace(device.device, healthy=True)) for device in node.devices
    )
    return empty

"""The words for a refusal: counted over all nodes, spelled out for the nearest, with a hint."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from services.placer.choice.device_choice import choose_devices
from services.placer.index.verdicts import Verdicts
from services.placer.mirror.cluster_mirror import Mirror
from services.placer.mirror.node_mirror import DeviceState, NodeState
from services.placer.refusal.device_reasons import verdicts_on
from services.placer.refusal.hints import hint_for
from shared.model.placement import NodeVerdict, Refusal
from shared.model.request import PodRequest, TopologyScope
from shared.placing.node_filters import NodeFilterFailure, check_resources

NEAREST = 3
LOOKED_AT = 32
"""Nodes per reason among which the nearest are sought."""

_STAGES = ("UnsupportedConstraint", "NodeAffinity", "NodeUnschedulable", "UntoleratedTaint")
"""Reasons of nodes that are far from fitting, the farthest first; devices come last."""


def refuse(request: PodRequest, mirror: Mirror, verdicts: Verdicts) -> Refusal:
    """Say why nothing fits; while nothing changes, equal requests get the same answer at once."""
    position = mirror.changes.end
    if verdicts.refusal is None or verdicts.refusal[0] != position:
        verdicts.refusal = (position, _refusal(request, mirror, verdicts))
    return verdicts.refusal[1]


def _refusal(request: PodRequest, mirror: Mirror, verdicts: Verdicts) -> Refusal:
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
        nearest_nodes=tuple(_spelled_out(request, node, blocked) for node, blocked in nearest),
        hint=hint_for(request, nearest),
        permanent=_is_hopeless(request, mirror, verdicts),
    )


def _by_code(counts: Iterable[tuple[int, str, str]]) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for count, code, _ in counts:
        sums[code] = sums.get(code, 0) + count
    return tuple(sorted(sums.items(), key=lambda entry: (-entry[1], entry[0])))


def _nearest(verdicts: Verdicts) -> list[tuple[NodeState, NodeFilterFailure]]:
    some = [
        entry
        for blocked in verdicts.blocked.values()
        for entry in islice(blocked.items(), LOOKED_AT)
    ]
    some.sort(key=lambda entry: (-_stage(entry[1].code), -_widest(entry[0]), entry[0].name))
    return some[:NEAREST]


def _stage(code: str) -> int:
    if code in _STAGES:
        return _STAGES.index(code)
    return len(_STAGES) + ("Gpu" in code and code not in {"NoGpus", "GpuModeMismatch"})


def _widest(node: NodeState) -> int:
    gaps = (d.instance if d.mig else d.total - d.memory for d in node.devices if d.healthy)
    return max(gaps, default=0)


def _spelled_out(request: PodRequest, node: NodeState, blocked: NodeFilterFailure) -> NodeVerdict:
    text = blocked.message.replace("node(s) were ", "it was ").replace("node(s) ", "it ")
    reason = f"{text} ({blocked.numbers})" if blocked.numbers else text
    devices = verdicts_on(request, node) if "Gpu" in blocked.code and request.containers else ()
    return NodeVerdict(node=node.name, reason=reason, devices=devices)


def _is_hopeless(request: PodRequest, mirror: Mirror, verdicts: Verdicts) -> bool:
    """Say whether every node would refuse even if nothing ran on it, were healthy and welcoming.

    Only what no end of other pods can change counts here: devices, their number and kind, and
    what a node has to allocate.
    """
    position = mirror.inventory_changes.end
    if verdicts.hopeless is None or verdicts.hopeless[0] != position:
        hopeless = bool(mirror.nodes) and not _could_ever_fit(request, mirror.nodes.values())
        verdicts.hopeless = (position, hopeless)
    return verdicts.hopeless[1]


def _could_ever_fit(request: PodRequest, nodes: Iterable[NodeState]) -> bool:
    if request.node_requirements.unsupported:
        return False
    tried = set()
    for node in nodes:
        if check_resources(request.resources, node.facts.allocatable) is not None:
            continue
        build = tuple(_build_of(device, request) for device in node.devices)
        if build in tried:
            continue
        tried.add(build)
        if choose_devices(request, _emptied(node)) is not None:
            return True
    return False


def _build_of(device: DeviceState, request: PodRequest) -> object:
    """Return what decides whether a share fits the device when it is empty."""
    known = device.device
    named = known.uuid if request.selection.uuids or request.selection.not_uuids else ""
    place = (known.numa, known.pcie) if request.topology_scope is not TopologyScope.NODE else None
    modes = (known.mode, known.layouts, known.isolation)
    return (device.total, device.unit, device.slots, known.model, modes, named, place)


def _emptied(node: NodeState) -> NodeState:
    empty = NodeState(node.name)
    empty.put_devices(
        DeviceState(empty, replace(device.device, healthy=True)) for device in node.devices
    )
    return empty

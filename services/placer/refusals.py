"""The words for a refusal: counted over all nodes, spelled out for the nearest, with a hint."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from services.placer.device_choice import choose_devices
from services.placer.device_reasons import verdicts_on
from services.placer.hints import hint_for
from services.placer.index import Index
from services.placer.mirrored import DeviceState, NodeState
from services.placer.node_filters import Blocked, free_resources, insufficient
from services.placer.verdicts import Verdicts
from shared.model.placement import NodeVerdict, Refusal
from shared.model.request import PodRequest

NEAREST = 3
LOOKED_AT = 32
"""Nodes per reason among which the nearest are sought."""

_STAGES = ("UnsupportedConstraint", "NodeAffinity", "NodeUnschedulable", "UntoleratedTaint")
"""Reasons of nodes that are far from fitting, the farthest first; devices come last."""


def refuse(request: PodRequest, index: Index, verdicts: Verdicts) -> Refusal:
    """Say why nothing fits. Its cost does not depend on how often it is asked."""
    nodes = len(index.mirror.nodes)
    counts = sorted(
        ((len(blocked), code, text) for (code, text), blocked in verdicts.blocked.items()),
        key=lambda entry: (-entry[0], entry[2]),
    )
    nearest = _nearest(verdicts)
    permanent = nodes > 0 and not _could_ever_fit(request, index.mirror.nodes.values())
    listed = ", ".join(f"{count} {text}" for count, _, text in counts) or "there is no node"
    return Refusal(
        reason=f"0/{nodes} nodes are available: {listed}.",
        counts=_by_code(counts),
        nearest=tuple(_spelled_out(request, node, blocked) for node, blocked in nearest),
        hint=hint_for(request, nearest),
        permanent=permanent,
    )


def _by_code(counts: Iterable[tuple[int, str, str]]) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for count, code, _ in counts:
        sums[code] = sums.get(code, 0) + count
    return tuple(sorted(sums.items(), key=lambda entry: (-entry[1], entry[0])))


def _nearest(verdicts: Verdicts) -> list[tuple[NodeState, Blocked]]:
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
    return max((d.total - d.memory for d in node.devices if d.healthy), default=0)


def _spelled_out(request: PodRequest, node: NodeState, blocked: Blocked) -> NodeVerdict:
    reason = f"{blocked.text} ({blocked.numbers})" if blocked.numbers else blocked.text
    devices = verdicts_on(request, node) if "Gpu" in blocked.code and request.containers else ()
    return NodeVerdict(node=node.name, reason=reason, devices=devices)


def _could_ever_fit(request: PodRequest, nodes: Iterable[NodeState]) -> bool:
    """Say whether some node would do if nothing ran on it, were healthy and welcoming.

    Only what no end of other pods can change counts here: devices, their number and kind, and
    what a node has to allocate.
    """
    return any(_could_fit(request, node) for node in nodes)


def _could_fit(request: PodRequest, node: NodeState) -> bool:
    if request.demands.unsupported:
        return False
    free = free_resources(node.facts, {}, emptied=True)
    if insufficient(request.resources, free) is not None:
        return False
    return not request.containers or choose_devices(request, _emptied(node)) is not None


def _emptied(node: NodeState) -> NodeState:
    empty = NodeState(node.name)
    empty.devices = tuple(
        DeviceState(empty, replace(device.device, healthy=True)) for device in node.devices
    )
    return empty

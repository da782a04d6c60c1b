"""How many equal pods fit beside each other; pure."""

from math import inf

from shared.model.requests.host_ports import has_ports
from shared.model.requests.request import PodRequest
from shared.placing.choice.device_choice import build_shares, choose_devices, fits
from shared.placing.index.node_index import NodeIndex, placement_key
from shared.placing.index.threshold_column import NodeSet, store
from shared.placing.mirror.node_mirror import (
    MirroredNode,
    TentativeReservation,
    idle_copy,
    unclaimed_copy,
)
from shared.placing.node_filters import has_too_little
from shared.placing.refusal.refusals import possible_nodes

CACHED_COUNTS = 1024
CACHED_KINDS = 16
"""Kinds of pods whose number on each node is cached."""


def pods_on_empty_nodes(
    request: PodRequest,
    index: NodeIndex,
    most: int,
    *,
    as_is: bool = False,
    among: NodeSet | None = None,
) -> int:
    """Return how many fit if no other pod ran, `most` at most.

    Nodes count as healthy, untainted and with any labels unless they are taken `as_is`.
    """
    inventory = index.mirror.inventory_changes.end
    key = (placement_key(request), most, as_is, among)
    cached = index.pods_on_empty.get(key)
    if cached is not None and cached[0] == inventory:
        return cached[1]
    if len(index.pods_on_empty) >= CACHED_COUNTS:
        index.pods_on_empty.clear()
    count = 0
    possible = possible_nodes(request, index)
    for node in index.sets.nodes_in(possible if among is None else possible & among):
        empty = idle_copy(node, healthy=not as_is)
        if not as_is or fits(request, empty):
            count += _pods_on(request, empty, most - count)
        if count >= most:
            break
    index.pods_on_empty[key] = inventory, count
    return count


def pods_on_nodes(request: PodRequest, index: NodeIndex, nodes: NodeSet, most: int) -> int:
    """Return how many fit beside what runs, `most` at most; `nodes` fit one such pod."""
    counts = index.pods_on_node.get(key := (placement_key(request), most))
    if counts is None:
        counts = store(index.pods_on_node, key, {}, CACHED_KINDS)
    if len(counts) > len(index.mirror.nodes):
        for node in [node for node in counts if node.removed]:
            del counts[node]
    total = 0
    for node in index.sets.nodes_in(nodes):
        changes, count = counts.get(node, (-1, 0))
        if changes != node.changes:
            count = _pods_on(request, _copy(node), most)
            counts[node] = node.changes, count
        total += count
        if total >= most:
            return most
    return total


def _copy(node: MirroredNode) -> MirroredNode:
    copy = unclaimed_copy(node, inf)
    copy.free_resources = dict(node.free_resources)
    return copy


def _pods_on(request: PodRequest, node: MirroredNode, most: int) -> int:
    """Return how many fit, `most` at most, and count them as used on the node."""
    devices = {device.uuid: device for device in node.devices}
    for count in range(most):
        picks = None
        has_room = has_ports(request.node_requirements.host_ports, node.free_resources)
        if has_room and not has_too_little(node.free_resources, request.resources):
            picks = choose_devices(request, node)
        if picks is None:
            return count
        shares = build_shares(picks)
        groups = request.anti_affinity_groups
        TentativeReservation.add(node, devices, shares, request.node_resources, groups)
    return most

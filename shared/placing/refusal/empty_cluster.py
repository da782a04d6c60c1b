"""How many equal pods would fit on the cluster's nodes if these were empty; pure."""

from dataclasses import replace

from shared.model.ledger import LedgerNode
from shared.model.names import PodUid
from shared.model.node import NodeFacts
from shared.model.placement import Placement
from shared.model.request import PodRequest
from shared.placing.choice.device_choice import choose_devices
from shared.placing.choice.picks import build_shares
from shared.placing.index.node_index import NodeIndex, placement_key
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.mirror.node_mirror import NO_USE, MirroredNode
from shared.placing.node_filters import has_too_little
from shared.placing.refusal.refusals import possible_nodes

CACHED_COUNTS = 1024


def pods_on_empty_nodes(request: PodRequest, index: NodeIndex, most: int) -> int:
    """Return how many such pods fit side by side, `most` at most.

    Each node that could fit one holds at least one, so no more than `most` nodes are tried.
    """
    inventory, key = index.mirror.inventory_changes.end, (placement_key(request), most)
    known = index.pods_on_empty.get(key)
    if known is not None and known[0] == inventory:
        return known[1]
    if len(index.pods_on_empty) >= CACHED_COUNTS:
        index.pods_on_empty.clear()
    count = 0
    for node in index.sets.nodes_in(possible_nodes(request, index)):
        count += _pods_on(request, node, most - count)
        if count >= most:
            break
    index.pods_on_empty[key] = inventory, count
    return count


def _pods_on(request: PodRequest, node: MirroredNode, most: int) -> int:
    trial = ClusterMirror()
    devices = tuple((replace(device.device, healthy=True), NO_USE) for device in node.devices)
    facts = NodeFacts(name=node.name, allocatable=node.facts.allocatable)
    trial.reset([LedgerNode(facts=facts, devices=devices)])
    empty = trial.nodes[node.name]
    for count in range(most):
        if has_too_little(empty.free_resources, request.resources):
            return count
        picks = choose_devices(request, empty)
        if picks is None:
            return count
        trial.reserve(
            PodUid(str(count)),
            Placement(node=node.name, shares=build_shares(picks)),
            request.resources,
            request.anti_affinity_groups,
        )
    return most

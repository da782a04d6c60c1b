"""Placing by looking at every node: slow, plain, and the judge of the placer's index."""

from collections.abc import Iterable

from shared.model.ledger import LedgerNode
from shared.model.placement import Placement
from shared.model.request import NodeOrder, PodRequest
from shared.placing.node_fit import fit_on_node


def place_naive(request: PodRequest, nodes: Iterable[LedgerNode]) -> Placement | None:
    """Return the best node that fits with the devices on it, or None if none fits.

    BINPACK prefers the node with the least free device memory, SPREAD the one with the least used;
    ties go to the first name.
    """
    options = []
    for node in nodes:
        shares = fit_on_node(request, node)
        if shares is not None:
            options.append((_rank(request.node_order, node), node.facts.name, node, shares))
    if not options:
        return None
    _, name, node, shares = min(options, key=lambda option: option[:2])
    return Placement(node=name, shares=shares, node_version=node.version)


def _rank(order: NodeOrder, node: LedgerNode) -> int:
    used_mib = sum(use.memory_mib for _, use in node.devices)
    total_mib = sum(device.memory_mib for device, _ in node.devices)
    return total_mib - used_mib if order is NodeOrder.BINPACK else used_mib

"""The changes of a waiting pod's manifest that its hint has in words; pure."""

from collections.abc import Iterable

from shared.model.change import Change
from shared.model.leases.ledger import LedgerNode
from shared.model.requests.request import PodRequest
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import NodeIndex
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.placement import place
from shared.placing.refusal.refusals import explain


def hinted_changes(
    request: PodRequest, hint: str, nodes: Iterable[LedgerNode]
) -> tuple[Change, ...]:
    """Try the pod again; return nothing unless that leads to the same hint.

    It does not if the hint has another cause, such as a quota, or the nodes have changed.
    """
    mirror = ClusterMirror()
    for node in nodes:
        mirror.put_node(node)
    index = NodeIndex(mirror)
    decision = place(request, index, lambda: 0.0)
    if not isinstance(decision, NoFit) or explain(request, index, decision).hint != hint:
        return ()
    return index.explanations[decision.key].advice.changes

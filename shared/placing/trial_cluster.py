"""A copy of the ledger's nodes, on which pods are placed as a placer would; pure."""

from collections.abc import Iterable

from shared.model.leases.ledger import LedgerNode
from shared.model.names import NodeName, PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import PodRequest
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import NodeIndex
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.placement import picks_on, place, place_before, placement_of
from shared.placing.refusal.refusals import explain, possible_nodes

GOLDEN_RATIO = 0.6180339887


class TrialCluster:
    """The same calls lead to the same placements.

    For example, `TrialCluster(nodes).place(pod, request)` returns where the pod would run, and
    `explain` puts a `NoFit` into words, which takes most of the time.
    """

    def __init__(self, nodes: Iterable[LedgerNode] = ()) -> None:
        self._mirror = ClusterMirror()
        self._mirror.reset(nodes)
        self._index = NodeIndex(self._mirror)
        self._choices = 0

    def _choice(self) -> float:
        # No generator expression: compiled, it would be a list.
        self._choices += 1
        return (self._choices - 1) * GOLDEN_RATIO % 1

    def put_node(self, node: LedgerNode) -> None:
        """What is reserved on the node stays reserved."""
        self._mirror.put_node(node)

    def remove_node(self, name: NodeName) -> None:
        self._mirror.remove_node(name)

    def learn(self, request: PodRequest) -> None:
        """Count a pod among those that the policy fragmentation expects."""
        self._index.fragmentation.workload.learn(request)

    def place(
        self, pod: PodUid, request: PodRequest, ends_by: float | None = None
    ) -> Placement | NoFit:
        """Count the pod as running; it may use devices claimed for starts after `ends_by`."""
        decision = place(request, self._index, self._choice)
        if isinstance(decision, NoFit) and ends_by is not None:
            decision = place_before(request, self._index, ends_by) or decision
        if isinstance(decision, NoFit):
            return decision
        self.reserve(pod, request, decision[0])
        return decision[0]

    def explain(self, request: PodRequest, no_fit: NoFit) -> Refusal:
        """Valid only while nothing has changed since."""
        return explain(request, self._index, no_fit)

    def may_fit(self, request: PodRequest) -> bool:
        """Return whether a pod would fit if no other ran."""
        return bool(possible_nodes(request, self._index))

    def place_on(self, name: NodeName, pod: PodUid, request: PodRequest) -> Placement | None:
        placement = self.placement_on(name, request)
        if placement is not None:
            self.reserve(pod, request, placement)
        return placement

    def placement_on(self, name: NodeName, request: PodRequest) -> Placement | None:
        choose = self._index.plan(request).choose
        node = self._mirror.nodes[name]
        picks = picks_on(request, choose, self._index, node)
        return None if picks is None else placement_of(node, picks)

    def reserve(self, pod: PodUid, request: PodRequest, placement: Placement) -> None:
        self._mirror.reserve(pod, placement, request.node_resources, request.anti_affinity_groups)

    def remove(self, pod: PodUid) -> None:
        self._mirror.drop(pod)

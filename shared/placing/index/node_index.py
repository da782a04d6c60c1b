"""Nodes for each kind of request, sorted by how well they fit; pure."""

from collections.abc import Hashable

from shared.model.events.pod_events import PodQueued
from shared.model.requests.request import PodRequest
from shared.placing.advice import QuotaChanges
from shared.placing.choice.device_choice import device_key
from shared.placing.index.anti_affinity_index import AntiAffinityIndex
from shared.placing.index.fragmentation import Fragmentation
from shared.placing.index.no_fit import Explanation, NoFit
from shared.placing.index.node_sets import NodeEligibility, NodeSets
from shared.placing.index.pod_counts import PodCounts
from shared.placing.index.ranked_nodes import (
    CACHED_KINDS,
    PlannedKind,
    RankedNodes,
    RequestKind,
    RequestPlan,
    ranking_for,
)
from shared.placing.index.threshold_column import NodeSet, store
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.mirror.node_mirror import MirroredNode, unclaimed_copy

CACHED_PLANS = 8_192
CACHED_COPIES = 256


EXACT_CORES_USES = 256
"""So many requests count cores after cores decided once."""


class NodeIndex:
    def __init__(self, mirror: ClusterMirror) -> None:
        self.mirror = mirror
        self.eligibility = NodeEligibility(mirror)
        self.sets = NodeSets(mirror, self.eligibility)
        self.repelled_pods = AntiAffinityIndex(mirror)
        self.pod_counts = PodCounts(mirror)
        self.fragmentation = Fragmentation(mirror)
        self.explanations: dict[Hashable, Explanation] = {}
        """The latest explanations of refusals, by `placement_key`."""
        self.quota_changes: dict[Hashable, QuotaChanges] = {}
        """By `placement_key`, what exceeds the quota, and the inventory's position."""
        self.idle_copies: dict[tuple[MirroredNode, int, bool], MirroredNode] = {}
        """Nodes without any use, by node, the inventory's position, and whether all is healthy."""
        self.unclaimed_copies: dict[tuple[MirroredNode, int, tuple[int, ...]], MirroredNode] = {}
        """Nodes without some claims, by node, its number of changes, and these devices."""
        self.pods_on_empty: dict[Hashable, tuple[int, int]] = {}
        """How many equal pods of a gang fit on empty nodes, at most as many as asked for, with the
        inventory's position; by `placement_key`, that number, which nodes count, and how."""
        self.pods_on_node: dict[Hashable, dict[MirroredNode, tuple[int, int]]] = {}
        """How many equal pods fit beside those that run, with the node's number of changes; by
        `placement_key` and the most that are counted."""
        self._plans: dict[Hashable, RequestPlan] = {}
        self._ranked_nodes: dict[RequestKind, RankedNodes] = {}
        self._exact_uses_left: dict[RequestKind, int] = {}

    def restricted(self, event: PodQueued, request: PodRequest) -> PodRequest:
        """Require of nodes what rules about other pods do, the pod's and those of running ones."""
        request = self.repelled_pods.restricted(event, request)
        rules = request.pod_rules
        return request if rules is None else self.pod_counts.restricted(request, rules)

    def plan(self, request: PodRequest) -> RequestPlan:
        key = (device_key(request), request.node_order)
        plan = self._plans.get(key)
        return plan or store(self._plans, key, RequestPlan(request), CACHED_PLANS)

    def likely_nodes(self, planned: PlannedKind) -> RankedNodes:
        """Return nodes that probably fit: cores are left out, unless they decided lately.

        So the number of kinds does not grow with the number of percentages.
        """
        if planned.likely is not planned.kind:
            uses_left = self._exact_uses_left.get(planned.kind, 0)
            if uses_left:
                self._exact_uses_left[planned.kind] = uses_left - 1
                return self.ranked_nodes(planned.kind)
        return self.ranked_nodes(planned.likely)

    def exact_nodes(self, kind: RequestKind) -> RankedNodes:
        store(self._exact_uses_left, kind, EXACT_CORES_USES, CACHED_KINDS)
        return self.ranked_nodes(kind)

    def ranked_nodes(self, kind: RequestKind) -> RankedNodes:
        ranked_nodes = self._ranked_nodes.get(kind)
        if ranked_nodes is None:
            ranked_nodes = RankedNodes(self.mirror, ranking_for(kind))
            store(self._ranked_nodes, kind, ranked_nodes, CACHED_KINDS)
        ranked_nodes.catch_up()
        return ranked_nodes

    def fitting_nodes(self, request: PodRequest) -> NodeSet | NoFit:
        """Return all nodes that fit a request, or the decision that none does.

        Nothing is decided anew for a request that is explained at the mirror's position.
        """
        key = placement_key(request)
        position = self.mirror.changes.end
        last = self.explanations.get(key)
        if last is not None and last.position == position:
            return NoFit(key, position, {}, last)
        fitting, excluded = self.sets.split(request, explained=False)
        return fitting or NoFit(key, position, excluded, last)

    def without_claims(self, node: MirroredNode, until: float) -> MirroredNode:
        """Leave out claims for starts at `until` or later, on a copy."""
        claimed = tuple([d.index for d in node.devices if d.ledger_use.claimed_until >= until])
        key = node, node.changes, claimed
        copy = self.unclaimed_copies.get(key)
        return copy or store(self.unclaimed_copies, key, unclaimed_copy(node, until), CACHED_COPIES)


def placement_key(request: PodRequest) -> Hashable:
    """Requests that fit the same places have equal keys."""
    return (
        device_key(request),
        request.triggers,
        tuple(sorted(request.resources.items())),
        request.node_requirements,
    )

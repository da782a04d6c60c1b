"""Checks of nodes against pods' node requirements, cached until the node changes; pure."""

from shared.model.request import NodeRequirements
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.mirror.node_mirror import MirroredNode
from shared.placing.node_filters import NodeFilterFailure, check_node, preference

CACHED_REQUIREMENTS = 64
ACCEPTED: tuple[NodeFilterFailure | None, int] = (None, 0)


class NodeEligibility:
    """Caches checks of nodes: pods of one template have equal requirements; facts seldom change."""

    def __init__(self, mirror: ClusterMirror) -> None:
        self.mirror = mirror
        self._results: dict[
            NodeRequirements, dict[MirroredNode, tuple[NodeFilterFailure | None, int]]
        ] = {}
        self._seen_changes = 0

    def has_preferences(self, requirements: NodeRequirements) -> bool:
        """Return whether some of the nodes that meet the requirements are preferred to others."""
        return bool(requirements.preferred) or self.mirror.soft_taint_nodes > 0

    def check(
        self, requirements: NodeRequirements, node: MirroredNode
    ) -> tuple[NodeFilterFailure | None, int]:
        """Return why the node is excluded, or None, and the weight of its preference."""
        self._catch_up()
        results = self._results.get(requirements)
        if results is None:
            if len(self._results) >= CACHED_REQUIREMENTS:
                del self._results[next(iter(self._results))]
            results = self._results[requirements] = {}
        result = results.get(node)
        if result is None:
            facts = node.facts
            result = (check_node(requirements, facts), preference(requirements, facts))
            results[node] = result = ACCEPTED if result == ACCEPTED else result
        return result

    def _catch_up(self) -> None:
        changes = self.mirror.inventory_changes
        if self._seen_changes == changes.end:
            return
        changed = changes.since(self._seen_changes)
        if changed is None:
            self._results.clear()
        else:
            for results in self._results.values():
                for node in changed:
                    results.pop(node, None)
        self._seen_changes = changes.end

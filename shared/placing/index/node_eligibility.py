"""Cached checks of nodes against the requirements of pods; pure."""

from shared.model.requests.request import NodeRequirements
from shared.placing.index.threshold_column import store
from shared.placing.mirror.cluster_mirror import ChangeReader, ClusterMirror
from shared.placing.mirror.node_mirror import MirroredNode
from shared.placing.node_filters import NodeFilterFailure, check_node, preference

CACHED_REQUIREMENTS = 64
ACCEPTED: tuple[NodeFilterFailure | None, int] = (None, 0)


class NodeEligibility:
    """Pods of one template have equal requirements, and facts seldom change."""

    def __init__(self, mirror: ClusterMirror) -> None:
        self.mirror = mirror
        self._results: dict[
            NodeRequirements, dict[MirroredNode, tuple[NodeFilterFailure | None, int]]
        ] = {}
        self._changes = ChangeReader(mirror.inventory_changes)

    def has_preferences(self, requirements: NodeRequirements) -> bool:
        return bool(
            requirements.preferred or requirements.scores or self.mirror.soft_taint_nodes > 0
        )

    def check(
        self, requirements: NodeRequirements, node: MirroredNode
    ) -> tuple[NodeFilterFailure | None, int]:
        self._catch_up()
        results = self._results.get(requirements)
        if results is None:
            results = store(self._results, requirements, {}, CACHED_REQUIREMENTS)
        result = results.get(node)
        if result is None:
            facts = node.facts
            result = (check_node(requirements, facts), preference(requirements, facts))
            results[node] = result = ACCEPTED if result == ACCEPTED else result
        return result

    def _catch_up(self) -> None:
        changed = self._changes.read()
        if changed is None:
            self._results.clear()
        elif changed:
            for results in self._results.values():
                for node in changed:
                    results.pop(node, None)

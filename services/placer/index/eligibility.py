"""Which nodes meet a pod's demands, remembered per equal demands until the node changes."""

from services.placer.mirror.cluster_mirror import Mirror
from services.placer.mirror.node_mirror import NodeState
from shared.model.request import NodeRequirements
from shared.placing.node_filters import NodeFilterFailure, check_node, preference

REMEMBERED_DEMANDS = 64
WELCOME: tuple[NodeFilterFailure | None, int] = (None, 0)


class Eligibility:
    """Answers about nodes' facts; pods of one template ask the same, and facts rarely change."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        self._answers: dict[
            NodeRequirements, dict[NodeState, tuple[NodeFilterFailure | None, int]]
        ] = {}
        self._seen = 0

    def is_wanting(self, demands: NodeRequirements) -> bool:
        """Say whether nodes that meet these demands are not all equally welcome."""
        return bool(demands.preferred) or self.mirror.soft_nodes > 0

    def answer(
        self, demands: NodeRequirements, node: NodeState
    ) -> tuple[NodeFilterFailure | None, int]:
        """Return what blocks the node, if anything does, and how welcome it is."""
        self._catch_up()
        answers = self._answers.get(demands)
        if answers is None:
            if len(self._answers) >= REMEMBERED_DEMANDS:
                del self._answers[next(iter(self._answers))]
            answers = self._answers[demands] = {}
        answer = answers.get(node)
        if answer is None:
            facts = node.facts
            answer = (check_node(demands, facts), preference(demands, facts))
            answers[node] = answer = WELCOME if answer == WELCOME else answer
        return answer

    def _catch_up(self) -> None:
        changes = self.mirror.inventory_changes
        if self._seen == changes.end:
            return
        changed = changes.since(self._seen)
        if changed is None:
            self._answers.clear()
        else:
            for answers in self._answers.values():
                for node in changed:
                    answers.pop(node, None)
        self._seen = changes.end

"""Which nodes can take one exact request and why the others cannot, kept up to date.

Asked when the quick index led nowhere: after the first look at all nodes, only changed ones are
looked at again. So pods that wait cost little however often they are offered.
"""

from services.placer.choice.device_choice import choose_devices, modes_of
from services.placer.index.eligibility import Eligibility
from services.placer.index.ranked_nodes import Lane
from services.placer.index.ranking import Rank, kind_of, preferred_rank, ranking_of
from services.placer.mirror.cluster_mirror import Mirror
from services.placer.mirror.node_mirror import NodeState
from services.placer.refusal.device_reasons import why_no_devices
from shared.model.placement import Refusal
from shared.model.request import NodeOrder, PodRequest
from shared.placing.node_filters import NodeFilterFailure, check_resources, check_served

Reason = tuple[str, str]
"""Code and text, without numbers: what nodes are counted by."""


class Verdicts(Lane):
    """A lane of the nodes that fit, and the reason of each that does not."""

    def __init__(self, mirror: Mirror, eligibility: Eligibility, request: PodRequest) -> None:
        super().__init__(mirror, self._rank, packs=request.node_order is NodeOrder.BINPACK)
        self.request = request
        self.blocked: dict[Reason, dict[NodeState, NodeFilterFailure]] = {}
        self.refusal: tuple[int, Refusal] | None = None
        """What was said last, and the mirror's position when it was."""
        self.hopeless: tuple[int, bool] | None = None
        """Whether no freed capacity could ever help, and the inventory's position then."""
        self._reason_of: dict[NodeState, Reason] = {}
        self._eligibility = eligibility
        self._gap_ranks = [ranking_of(kind_of(request, mode)[0]) for mode in modes_of(request)]

    def update(self, node: NodeState) -> None:
        """Judge one node afresh."""
        reason = self._reason_of.pop(node, None)
        if reason is not None:
            nodes = self.blocked[reason]
            del nodes[node]
            if not nodes:
                del self.blocked[reason]
        super().update(node)

    def _rank(self, node: NodeState) -> Rank | None:
        blocked, liking = judge(self.request, node, self._eligibility)
        if blocked is None:
            for mode, gap_rank in enumerate(self._gap_ranks):
                rank = gap_rank(node)
                if rank is not None:
                    return preferred_rank(rank, 2 * liking - mode)
        blocked = blocked or NodeFilterFailure("NoGap", "node(s) had no fitting GPU")
        reason = (blocked.code, blocked.message)
        self._reason_of[node] = reason
        self.blocked.setdefault(reason, {})[node] = blocked
        return None


def judge(
    request: PodRequest, node: NodeState, eligibility: Eligibility
) -> tuple[NodeFilterFailure | None, int]:
    """Return the first reason why the node cannot take the pod, and how welcome it is."""
    blocked, liking = eligibility.answer(request.node_requirements, node)
    if blocked is None and request.triggers:
        blocked = check_served(request.triggers, node.served)
    if blocked is None:
        blocked = check_resources(request.resources, node.free)
    if blocked is None and request.containers and choose_devices(request, node) is None:
        blocked = why_no_devices(request, node)
    return blocked, liking

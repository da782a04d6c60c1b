"""Verdicts on one exact request: the nodes that fit, and why the others do not; pure.

Used when the quick index finds nothing. After one check of all nodes, only changed nodes are
checked again, so waiting pods cost little however often capacity is offered to them.
"""

from services.placer.choice.device_choice import allowed_modes, choose_devices
from services.placer.choice.device_refusals import explain_no_devices
from services.placer.index.eligibility import NodeEligibility
from services.placer.index.node_rank import Rank, preferred_rank, ranking_for, request_kind
from services.placer.index.ranked_nodes import RankedNodes
from services.placer.mirror.cluster_mirror import ClusterMirror
from services.placer.mirror.node_mirror import MirroredNode
from shared.model.placement import Refusal
from shared.model.request import NodeOrder, PodRequest
from shared.placing.node_filters import NodeFilterFailure, check_resources, check_served

Reason = tuple[str, str]
"""Code and text, without numbers: nodes are counted by it."""


class RequestVerdicts(RankedNodes):
    """Ranks of the nodes that fit, and the reason for each that does not."""

    def __init__(
        self, mirror: ClusterMirror, eligibility: NodeEligibility, request: PodRequest
    ) -> None:
        super().__init__(mirror, self._rank, packs=request.node_order is NodeOrder.BINPACK)
        self.request = request
        self.blocked: dict[Reason, dict[MirroredNode, NodeFilterFailure]] = {}
        self.refusal: tuple[int, Refusal] | None = None
        """The latest refusal, and the mirror's position then."""
        self.permanent: tuple[int, bool] | None = None
        """Whether no freed capacity can ever help, and the inventory's position then."""
        self._reason_by_node: dict[MirroredNode, Reason] = {}
        self._eligibility = eligibility
        self._gap_ranks = [
            ranking_for(request_kind(request, mode)[0]) for mode in allowed_modes(request)
        ]

    def update(self, node: MirroredNode) -> None:
        """Check one node again."""
        reason = self._reason_by_node.pop(node, None)
        if reason is not None:
            nodes = self.blocked[reason]
            del nodes[node]
            if not nodes:
                del self.blocked[reason]
        super().update(node)

    def _rank(self, node: MirroredNode) -> Rank | None:
        blocked, preference_weight = check_request(self.request, node, self._eligibility)
        if blocked is None:
            for mode, gap_rank in enumerate(self._gap_ranks):
                rank = gap_rank(node)
                if rank is not None:
                    return preferred_rank(rank, 2 * preference_weight - mode)
        blocked = blocked or NodeFilterFailure("NoFittingGpu", "node(s) had no fitting GPU")
        reason = (blocked.code, blocked.message)
        self._reason_by_node[node] = reason
        self.blocked.setdefault(reason, {})[node] = blocked
        return None


def check_request(
    request: PodRequest, node: MirroredNode, eligibility: NodeEligibility
) -> tuple[NodeFilterFailure | None, int]:
    """Return the first reason why the node does not fit, or None, and its preference weight."""
    blocked, preference_weight = eligibility.check(request.node_requirements, node)
    if blocked is None and request.triggers:
        blocked = check_served(request.triggers, node.serving)
    if blocked is None:
        blocked = check_resources(request.resources, node.free_resources)
    if blocked is None and request.containers and choose_devices(request, node) is None:
        blocked = explain_no_devices(request, node)
    return blocked, preference_weight

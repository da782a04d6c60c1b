"""A cluster of the placer's mirror alone, in which what is placed stays placed."""

from typing import Any

from shared.model.ledger import LedgerNode
from shared.model.names import PodUid
from shared.model.placement import Placement, Refusal
from shared.model.request import PodRequest
from shared.placing.index.node_index import NodeIndex
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.placement import place
from tests.support.build import dice, ledger_node


def index_of(*nodes: LedgerNode) -> NodeIndex:
    mirror = ClusterMirror()
    mirror.reset(nodes)
    return NodeIndex(mirror)


def chosen_devices(wanted: PodRequest, *node_devices: Any) -> list[int]:
    """Indices of the devices of one node that a pod gets; empty if it is refused."""
    return Cluster(ledger_node("n1", *node_devices)).indices(wanted)


def refused(wanted: PodRequest, *nodes: LedgerNode) -> Refusal:
    outcome = Cluster(*nodes).place(wanted)
    assert isinstance(outcome, Refusal)
    return outcome


class Cluster:
    """A mirror with its index. Pods are called uid-1, uid-2, ..."""

    def __init__(self, *nodes: LedgerNode) -> None:
        self.index = index_of(*nodes)
        self.mirror = self.index.mirror
        self.pods = 0

    def place(self, wanted: PodRequest) -> Placement | Refusal:
        answer = place(wanted, self.index, dice(7))
        if isinstance(answer, Refusal):
            return answer
        self.pods += 1
        self.mirror.reserve(
            PodUid(f"uid-{self.pods}"), answer[0], wanted.resources, wanted.anti_affinity_groups
        )
        return answer[0]

    def end(self, pod: str) -> None:
        self.mirror.drop(PodUid(pod))

    def indices(self, wanted: PodRequest) -> list[int]:
        """Indices of the devices a pod gets; empty if it is refused."""
        answer = self.place(wanted)
        return [] if isinstance(answer, Refusal) else [share.index for share in answer.shares]

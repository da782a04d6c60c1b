"""A cluster of the placer's mirror alone, in which what is placed stays placed."""

from typing import Any

from shared.model.leases.ledger import LedgerNode
from shared.model.names import PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import PodRequest
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import NodeIndex
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.trial_cluster import TrialCluster
from tests.support.build import ledger_node


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


def placed(wanted: PodRequest, *nodes: LedgerNode) -> Placement:
    outcome = Cluster(*nodes).place(wanted)
    assert isinstance(outcome, Placement)
    return outcome


class Cluster:
    """Nodes on which what is placed stays placed. Pods are called uid-1, uid-2, ..."""

    def __init__(self, *nodes: LedgerNode) -> None:
        self._trial = TrialCluster(nodes)
        self._pods = 0

    def place(self, wanted: PodRequest) -> Placement | Refusal:
        decision = self._trial.place(PodUid(f"uid-{self._pods + 1}"), wanted)
        if isinstance(decision, NoFit):
            return self._trial.explain(wanted, decision)
        self._pods += 1
        return decision

    def end(self, pod: str) -> None:
        self._trial.remove(PodUid(pod))

    def indices(self, wanted: PodRequest) -> list[int]:
        """Indices of the devices a pod gets; empty if it is refused."""
        answer = self.place(wanted)
        return [] if isinstance(answer, Refusal) else [share.index for share in answer.shares]

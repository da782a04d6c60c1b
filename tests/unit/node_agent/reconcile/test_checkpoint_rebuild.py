"""Pods that have ended, by the kubelet and the ledger."""

from services.node_agent.kubelet.pods import KubeletPod, PodResources
from services.node_agent.reconcile.checkpoint_rebuild import ended_pods
from shared.model.names import Namespace, PodUid
from tests.support.build import allocation_of
from tests.support.node_agent.agent import lease_of, share


def test_a_pod_is_terminated_once_kubelet_and_ledger_no_longer_list_it() -> None:
    lease = lease_of("u1", share())
    allocations = [allocation_of(lease)]
    pod = KubeletPod(uid=PodUid("u1"), namespace=Namespace("default"), name="pod")
    nothing = PodResources()

    assert ended_pods(allocations, [pod], nothing, {}, frozenset()) == set()
    assert (
        ended_pods(allocations, [], nothing, {PodUid("u1"): lease_of("u1")}, frozenset()) == set()
    )
    assert ended_pods(allocations, [], nothing, {}, frozenset()) == {"u1"}

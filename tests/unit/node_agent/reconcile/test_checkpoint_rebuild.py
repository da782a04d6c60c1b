"""Pods that have ended, by the kubelet and the ledger."""

from services.node_agent.kubelet.pods import KubeletPod, PodResources
from services.node_agent.reconcile.checkpoint_rebuild import ended_pods
from shared.model.events.node_events import Allocation
from shared.model.names import Namespace, PodUid
from tests.support.node_agent.agent import lease_of, share


def test_a_pod_is_over_when_kubelet_and_ledger_have_let_go_of_it() -> None:
    lease = lease_of("u1", share())
    told = [
        Allocation(
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            container="main",
            resource="r",
            device_ids=("x",),
            lease=lease,
        )
    ]
    pod = KubeletPod(uid=PodUid("u1"), namespace=Namespace("default"), name="pod")
    nothing = PodResources()

    assert ended_pods(told, [pod], nothing, {}) == set()
    assert ended_pods(told, [], nothing, {PodUid("u1"): lease_of("u1")}) == set()
    assert ended_pods(told, [], nothing, {}) == {"u1"}

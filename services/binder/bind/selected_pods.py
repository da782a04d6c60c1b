"""Pods that other schedulers are starting, which a pod's required anti-affinity selects.

kube-scheduler checks the pod against its cache, which lacks pods that placers have placed a moment
ago: those that are not bound yet, and those of which the API server's event is on its way.
"""

from collections.abc import Iterable, Sequence

from services.binder.observations import SelectedPod
from services.binder.pod_client import PodClient
from shared.ledger.leases import RedisLeases
from shared.model.lease import LIVE, Lease
from shared.model.names import Namespace, NodeName
from shared.model.node import HOSTNAME, AntiAffinityTerm


class SelectedPods:
    """Looks the pods up at the API server, and their nodes in the ledger until they are bound."""

    def __init__(self, pods: PodClient, ledger: RedisLeases) -> None:
        self.pods = pods
        self.ledger = ledger

    async def conflict(self, lease: Lease, terms: Iterable[AntiAffinityTerm]) -> str:
        """Return which pod keeps the lease's pod off its node; empty: none does.

        Raises UnavailableError if the API server or the ledger does not respond.
        """
        for term in terms:
            on_node = lease.node if term.topology_key == HOSTNAME else None
            selected = await self.pods.list_selected(term, on_node)
            for pod, node in await self._with_nodes(selected):
                if await self._in_one_domain(term.topology_key, lease.node, node):
                    return (
                        f"{_described(pod, lease.namespace)}, which the pod's required "
                        f"anti-affinity selects, starts on node {node}"
                    )
        return ""

    async def _with_nodes(
        self, selected: Sequence[SelectedPod]
    ) -> list[tuple[SelectedPod, NodeName]]:
        unbound = [pod.uid for pod in selected if pod.node is None]
        found = await self.ledger.load(unbound) if unbound else []
        leased = {lease.pod: lease.node for lease in found if lease and lease.state in LIVE}
        nodes = [(pod, pod.node or leased.get(pod.uid)) for pod in selected]
        return [(pod, node) for pod, node in nodes if node is not None]

    async def _in_one_domain(self, key: str, node: NodeName, other: NodeName) -> bool:
        if node == other or key == HOSTNAME:
            return node == other
        value = await self.pods.node_label(node, key)
        return value is not None and value == await self.pods.node_label(other, key)


def _described(pod: SelectedPod, namespace: Namespace) -> str:
    return f"pod {pod.name}" if pod.namespace == namespace else "a pod of another namespace"

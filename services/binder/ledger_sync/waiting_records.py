"""Finds pods that are recorded as waiting, and whose deletion was missed."""

from collections.abc import Collection

from services.binder.ledger_sync.current_pods import CurrentPods
from services.binder.pod_client import PodClient
from shared.ledger.leases import RedisLeases
from shared.ledger.waiting_pods import GatedPods
from shared.model.events.pod_events import PodGated, PodQueued, PodTerminated
from shared.model.names import PodUid


class WaitingRecords:
    """Compares waiting and gated pods with a listing; a read of the pod itself decides."""

    def __init__(self, ledger: RedisLeases, gated_pods: GatedPods, pods: PodClient) -> None:
        self.ledger = ledger
        self.gated_pods = gated_pods
        self.current_pods = CurrentPods(pods)

    async def find_gone(self, unbound: Collection[PodUid]) -> list[PodTerminated]:
        """Return events for recorded pods that are gone; `unbound` are the pods without a node.

        Records of pods that are bound by now, without a lease of ours, are removed.
        """
        found = await self.current_pods.read(await self._missing_from(frozenset(unbound)))
        await self._remove_bound([each for each, pod in found if pod and pod.node])
        return [
            PodTerminated(
                pod=each.pod,
                namespace=each.namespace,
                name=each.name,
                node=None,
                phase="",
            )
            for each, pod in found
            if pod is None or (pod.node is None and (pod.deleting or pod.terminal))
        ]

    async def _missing_from(self, unbound: frozenset[PodUid]) -> list[PodQueued | PodGated]:
        waiting_pods = self.ledger.waiting_pods
        missing = [pod for pod in await waiting_pods.uids() if pod not in unbound]
        found = await waiting_pods.load(missing) if missing else []
        suspects: list[PodQueued | PodGated] = [waiting.queued for waiting in found]
        for namespace in await self.gated_pods.namespaces():
            gated = await self.gated_pods.load(namespace)
            suspects += [pod for pod in gated if pod.pod not in unbound]
        return suspects

    async def _remove_bound(self, bound: Collection[PodQueued | PodGated]) -> None:
        queued = [each.pod for each in bound if isinstance(each, PodQueued)]
        if queued:
            leases = await self.ledger.load(queued)
            unleased = [pod for pod, lease in zip(queued, leases, strict=True) if lease is None]
            await self.ledger.waiting_pods.remove_bound(unleased)
        for each in bound:
            if isinstance(each, PodGated):
                await self.gated_pods.remove(each.namespace, [each.pod])

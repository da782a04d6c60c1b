"""Makes kube-scheduler try a waiting pod again, once the ledger may have room for it.

Nothing of that is a change of an object at the API server, so one is made: an annotation of the
pod. https://kubernetes.io/docs/concepts/scheduling-eviction/scheduling-framework/#queueinghint
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from services.binder.pod_client import PodClient
from shared.ledger.waiting_pods import WaitingPods
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError
from shared.model.events.pod_events import PodFilteredOut, PodQueued
from shared.model.ledger import WaitingPod
from shared.model.names import OFFER, NodeName, PodUid

logger = logging.getLogger(__name__)

CONCURRENCY = 8


class SchedulerOffers:
    """Annotates pods; an offer that is lost is made again by the ledger after 2 s."""

    def __init__(self, waiting_pods: WaitingPods, pods: PodClient, clock: Clock) -> None:
        self.waiting_pods = waiting_pods
        self.pods = pods
        self.clock = clock
        self._writes = asyncio.Semaphore(CONCURRENCY)

    async def save_waiting(self, events: Sequence[PodFilteredOut]) -> None:
        """Save pods that kube-scheduler has no node for; offer what was freed meanwhile."""
        newest = {event.queued.pod: event for event in events}
        now = self.clock.now()
        waiting = [
            WaitingPod(
                queued=event.queued,
                refusal=event.refusal,
                capacity=event.capacity,
                waiting_since=now,
            )
            for event in newest.values()
        ]
        result = await self.waiting_pods.enqueue(waiting)
        await self.make(newest[pod].queued for pod in result.stale)

    async def make(self, pods: Iterable[PodQueued]) -> list[PodQueued]:
        """Offer what was freed to pods whose node kube-scheduler chooses; return the others."""
        others = list(pods)
        ours = [pod for pod in others if pod.by_kube_scheduler]
        await asyncio.gather(*(self.offer(pod.namespace, pod.name, pod.pod) for pod in ours))
        return [pod for pod in others if not pod.by_kube_scheduler]

    async def offer(
        self, namespace: str, name: str, uid: PodUid, node: NodeName | None = None
    ) -> None:
        """Offer something that was freed to one pod, on one node if it is named."""
        value = f"{node or ''}@{self.clock.now() * 1000:.0f}"
        async with self._writes:
            try:
                await self.pods.add_annotation(namespace, name, uid, OFFER, value)
            except LeaseholdError as error:
                logger.info("pod %s/%s was not offered capacity: %s", namespace, name, error)

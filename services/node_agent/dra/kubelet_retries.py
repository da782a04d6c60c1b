"""Makes the kubelet try again to start pods whose claims it has not had prepared.

The kubelet reads a pod's claims before it calls the driver. If it may not yet read them (the API
server authorizes it once it has seen the Binding), or has not registered the driver again, it
tries again only after 60 to 90 s, or once the pod changes: so we change an annotation.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from services.node_agent.agent_timing import DEFAULT_TIMING, AgentTiming
from services.node_agent.dra.preparation import ClaimPreparation
from services.node_agent.kubelet.pods import KubeletPod
from shared.kubernetes.client import KubernetesClient, pod_path
from shared.model.claim import RETRIED_AT
from shared.model.clock import Clock, until_tick
from shared.model.errors import LeaseholdError
from shared.model.names import PodUid

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Retry:
    """The next retry of a pod's claims."""

    at: float
    pause_s: float


class KubeletRetries:
    """Looks for pods that wait although their claims have leases."""

    def __init__(
        self,
        client: KubernetesClient,
        preparation: ClaimPreparation,
        *,
        list_pods: Callable[[], Awaitable[tuple[KubeletPod, ...]]],
        clock: Clock,
        timing: AgentTiming = DEFAULT_TIMING,
    ) -> None:
        self.client = client
        self.preparation = preparation
        self.list_pods = list_pods
        self.clock = clock
        self.timing = timing
        self._retries: dict[PodUid, _Retry] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.clock.sleep(until_tick(self.timing.claim_retry_s))
            try:
                await self._look()
            except LeaseholdError as error:
                logger.debug("pods whose claims are not prepared are not known: %s", error)

    async def _look(self) -> None:
        """Retry pods found for the second time; others may be about to be prepared."""
        unprepared = self.preparation.list_unprepared()
        consumers = {pod for lease in unprepared for pod in lease.users}
        pods = await self.list_pods() if consumers else ()
        now, retries = self.clock.ticks(), {}
        for pod in pods:
            if pod.uid not in consumers or pod.container_ids or pod.terminal:
                continue
            retry = self._retries.get(pod.uid)
            if retry is None:
                retry = _Retry(now, self.timing.claim_retry_s)
            elif now >= retry.at:
                await self._retry(pod)
                retry = _Retry(now + 2 * retry.pause_s, 2 * retry.pause_s)
            retries[pod.uid] = retry
        self._retries = retries

    async def _retry(self, pod: KubeletPod) -> None:
        at = datetime.fromtimestamp(self.clock.now(), UTC).isoformat(timespec="milliseconds")
        body = {"metadata": {"uid": pod.uid, "annotations": {RETRIED_AT: at}}}
        try:
            await self.client.patch_merge(pod_path(pod.namespace, pod.name), body)
        except LeaseholdError as error:
            logger.debug("pod %s/%s is not annotated: %s", pod.namespace, pod.name, error)
        else:
            logger.info("pod %s/%s waits for its claims: annotated", pod.namespace, pod.name)

"""The DRA driver of a node."""

import asyncio
import logging
from datetime import UTC, datetime

from services.node_agent.allocate.grants import Grants
from services.node_agent.dra.claim_plugin import ClaimPlugin
from services.node_agent.dra.preparation import ClaimPreparation
from services.node_agent.dra.slice_writer import SliceWriter
from services.node_agent.kubelet.pods import KubeletPod
from services.node_agent.node import Node
from services.node_agent.settings import AgentSettings
from services.node_agent.time_slices.time_slices import TimeSlices
from shared.kubernetes.paths import pod_path
from shared.model.clock import until_tick
from shared.model.errors import LeaseholdError
from shared.model.names import PodUid
from shared.model.requests.claim import RETRIED_AT

logger = logging.getLogger(__name__)

RETRY_S = 2.0
"""A pod is annotated again after this pause, which doubles."""
MAX_RETRY_S = 60.0
"""The longest such pause: the kubelet itself retries after 60 to 90 s."""


def next_pause_s(pause_s: float) -> float:
    """Return for how long a pod is not annotated again after this pause.

    >>> next_pause_s(2.0), next_pause_s(32.0), next_pause_s(60.0)
    (4.0, 60.0, 60.0)
    """
    return min(2 * pause_s, MAX_RETRY_S)


class ClaimDriver:
    def __init__(
        self, node: Node, grants: Grants, time_slices: TimeSlices, settings: AgentSettings
    ) -> None:
        self.node = node
        self.preparation = ClaimPreparation(node, grants, time_slices, settings.cdi_directory)
        self.slices = SliceWriter(
            node,
            taint_effect=settings.dra_taint_effect,
            least_share_mib=settings.least_share_mib,
        )
        self.plugin = ClaimPlugin(
            node, settings.kubelet_dir, self.preparation, on_registered=self.slices.write_anew
        )
        node.on_devices.append(self.slices.request)
        self._retries: dict[PodUid, tuple[float, float]] = {}

    async def run(self) -> None:
        await self.preparation.restore()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.slices.run())
            group.create_task(self.plugin.run())
            group.create_task(self._retry_unprepared())

    def unready_reason(self) -> str | None:
        reasons = (self.slices.unwritten_reason, self.plugin.unregistered_reason)
        return "; ".join(filter(None, reasons)) or None

    async def _retry_unprepared(self) -> None:
        """Make the kubelet try again to start pods that wait although their claims have leases.

        It retries only after 60 to 90 s, or once the pod changes, hence an annotation.
        """
        while True:
            await self.node.clock.sleep(until_tick(RETRY_S))
            try:
                await self._look()
            except LeaseholdError as error:
                logger.debug("pods whose claims are not prepared are not known: %s", error)

    async def _look(self) -> None:
        unprepared = self.preparation.list_unprepared()
        consumers = {pod for lease in unprepared for pod in lease.users}
        pods = await self.node.kubelet.list_pods() if consumers else ()
        now = self.node.clock.ticks()
        retries = {}
        for pod in pods:
            if pod.uid not in consumers or pod.container_ids or pod.terminal:
                continue
            at, pause_s = self._retries.get(pod.uid, (now, RETRY_S))
            if pod.uid in self._retries and now >= at:
                await self._retry(pod)
                pause_s = next_pause_s(pause_s)
                at = now + pause_s
            retries[pod.uid] = at, pause_s
        self._retries = retries

    async def _retry(self, pod: KubeletPod) -> None:
        at = datetime.fromtimestamp(self.node.clock.now(), UTC).isoformat(timespec="milliseconds")
        body = {"metadata": {"uid": pod.uid, "annotations": {RETRIED_AT: at}}}
        try:
            await self.node.kubernetes.patch_merge(pod_path(pod.namespace, pod.name), body)
        except LeaseholdError as error:
            logger.debug("pod %s/%s is not annotated: %s", pod.namespace, pod.name, error)
        else:
            logger.info("pod %s/%s waits for its claims: annotated", pod.namespace, pod.name)

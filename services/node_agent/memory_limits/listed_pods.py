"""The kubelet's list of pods, for the containers that started before the node agent did."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

from services.node_agent.kubelet.pods import KubeletPod
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

CURRENT_S = 5.0
"""How long the list counts as current, and why it cannot be read."""
LIST_S = 2.0
"""Time limit of reading it: a container that starts meanwhile waits, for 5 s at most."""

ListPods = Callable[[], Awaitable[Sequence[KubeletPod]]]


class ListedPods:
    def __init__(self, list_pods: ListPods) -> None:
        self.list_pods = list_pods
        self.latest: Mapping[PodUid, KubeletPod] = {}
        self.unread_reason = ""
        self.read_at = -math.inf

    async def read(self) -> Mapping[PodUid, KubeletPod]:
        """Raises UnavailableError if the list cannot be read."""
        time = asyncio.get_running_loop().time
        if time() >= self.read_at + CURRENT_S:
            reason = await self._read()
            self.read_at = time()
            if reason and reason != self.unread_reason:
                logger.warning(
                    "the kubelet's pods cannot be listed for limits of memory: %s", reason
                )
            self.unread_reason = reason
        if self.unread_reason:
            raise UnavailableError(
                "which containers started before the node agent did cannot be seen, so that their "
                f"limits are neither compared nor changed: {self.unread_reason}"
            )
        return self.latest

    async def _read(self) -> str:
        try:
            async with asyncio.timeout(LIST_S):
                self.latest = {pod.uid: pod for pod in await self.list_pods()}
        except TimeoutError:
            return f"the kubelet did not list its pods within {LIST_S:g} s"
        except LeaseholdError as error:
            return str(error)
        return ""

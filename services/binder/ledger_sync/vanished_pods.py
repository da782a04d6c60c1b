"""Pods deleted without their kubelet's confirmation: their leases end with their processes.

A pod deleted by force is gone from the API server while its containers may still run. Its node's
agent gets a request every second; only an agent that stays silent counts as the end of the node.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.binder.agent_client import NodeAgentClient
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.lease import Lease
from shared.model.names import NodeName, PodUid

SILENCE_S = 25.0
"""An agent that has not replied for this long counts as dead, and its pods as terminated."""
MIN_MISSED_REPLIES = 10
"""And so many requests must have had no reply: a suspended binder received none either."""
MAX_REQUESTS = 64
PODS_PER_REQUEST = 1000


@dataclass(slots=True)
class VanishedPod:
    """The lease of a vanished pod, and how its agent has replied since."""

    lease: Lease
    replied_at: float
    """Of the agent's latest reply, or when this binder first saw that the pod had vanished."""
    missed_replies: int = 0


class VanishedPods:
    """Leases whose pods are gone but may still run, as the ledger lists them for any binder."""

    def __init__(
        self, agents: NodeAgentClient, clock: Clock, *, silence_s: float = SILENCE_S
    ) -> None:
        self.agents = agents
        self.clock = clock
        self.silence_s = silence_s
        self._pods: dict[PodUid, VanishedPod] = {}
        self._requests = asyncio.Semaphore(MAX_REQUESTS)

    def known(self, pods: Iterable[PodUid]) -> dict[PodUid, Lease]:
        """Return the leases of those of the pods that agents have been asked about before."""
        return {pod: self._pods[pod].lease for pod in pods if pod in self._pods}

    def forget(self, pods: Iterable[PodUid]) -> None:
        """Forget pods whose leases have changed."""
        for pod in pods:
            self._pods.pop(pod, None)

    async def find_terminated(self, leases: Sequence[Lease]) -> list[Lease]:
        """Send each node's agent a request, and return those of the leases that can end now."""
        now = self.clock.ticks()
        self._pods = {
            lease.pod: self._pods.get(lease.pod) or VanishedPod(lease, now) for lease in leases
        }
        by_node: dict[NodeName, list[VanishedPod]] = {}
        for pod in self._pods.values():
            by_node.setdefault(pod.lease.node, []).append(pod)
        found = await asyncio.gather(
            *(
                self._terminated_on(node, pods[first : first + PODS_PER_REQUEST])
                for node, pods in by_node.items()
                for first in range(0, len(pods), PODS_PER_REQUEST)
            )
        )
        return [lease for leases in found for lease in leases]

    async def _terminated_on(self, node: NodeName, pods: Sequence[VanishedPod]) -> list[Lease]:
        async with self._requests:
            try:
                uids = [pod.lease.pod for pod in pods]
                terminated = await self.agents.list_terminated(node, uids)
            except UnavailableError:
                return [pod.lease for pod in pods if self._is_silent(pod)]
        for pod in pods:
            pod.replied_at, pod.missed_replies = self.clock.ticks(), 0
        return [pod.lease for pod in pods if pod.lease.pod in terminated]

    def _is_silent(self, pod: VanishedPod) -> bool:
        pod.missed_replies += 1
        silent_s = self.clock.ticks() - pod.replied_at
        return pod.missed_replies >= MIN_MISSED_REPLIES and silent_s >= self.silence_s

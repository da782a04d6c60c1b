"""Resolves the container that the kubelet allocates for, and its pod's lease."""

import asyncio
import contextlib
from collections.abc import Callable

from services.node_agent.allocate.allocation import HONOURED_STATES
from services.node_agent.allocate.pod_resolution import (
    Ambiguous,
    ContainerCandidate,
    resolve_container,
)
from services.node_agent.kubelet.node_pods import NodePods
from services.node_agent.kubelet.pods import KubeletPod, PodResources
from services.node_agent.node import Node
from services.node_agent.records.checkpoint_entry import AllocationHistory
from shared.model.errors import UnavailableError
from shared.model.lease import Lease, LeaseState

RESOLVE_S = 2.0
"""How long an ambiguous container is resolved again: the kubelet soon drops a rejected pod."""
LEASE_WAIT_S = 4.0
"""How long a lease that is unknown, or only reserved, is requested."""
LOOK_AGAIN_S = 0.1
FETCH_PAUSE_S = 0.2


class PodResolver:
    """Reads the kubelet's lists, and requests leases that are not known yet."""

    def __init__(self, node: Node, pods: NodePods) -> None:
        self.node = node
        self.pods = pods
        self.clock = node.clock

    async def resolve(
        self,
        resource: str,
        count: int,
        history: Callable[[], AllocationHistory],
        *,
        device_ids: tuple[str, ...] | None = None,
    ) -> ContainerCandidate | Ambiguous:
        """Return the container that `count` devices are for.

        `device_ids` are those chosen already. With them, the kubelet's lists are read again for
        `RESOLVE_S` while the container is ambiguous; without them, it stays so.
        """
        until = self.clock.ticks() + RESOLVE_S
        fetched = False
        while True:
            pods, pod_resources = await self._list()
            found = resolve_container(
                resource,
                count,
                pods=pods,
                pod_resources=pod_resources,
                history=history(),
                device_ids=device_ids,
            )
            if not isinstance(found, Ambiguous):
                return found
            if not found.candidates and self.pods.unreadable_reason and not fetched:
                with contextlib.suppress(UnavailableError):
                    await self.node.lease_sync.fetch()
                fetched = True
                continue
            if not found.candidates or device_ids is None or self.clock.ticks() > until:
                return found
            await self.clock.sleep(LOOK_AGAIN_S)

    async def _list(self) -> tuple[tuple[KubeletPod, ...], PodResources]:
        """Return the kubelet's pods and its PodResources, read at once.

        Raises the first error unchanged, with the kubelet's message.
        """
        pods, pod_resources = await asyncio.gather(
            self.pods.list_pods(), self.node.pod_resources.list_holdings(), return_exceptions=True
        )
        if isinstance(pods, BaseException):
            raise pods
        if isinstance(pod_resources, BaseException):
            raise pod_resources
        return pods, pod_resources

    async def lease_of(self, candidate: ContainerCandidate) -> Lease | None:
        """Return the pod's lease, requested if need be.

        For `LEASE_WAIT_S` it is requested again if there is no reply, and if the lease is only
        reserved: its binder is about to bind it.
        """
        pod = candidate.pod.uid
        until = self.clock.ticks() + LEASE_WAIT_S
        while True:
            lease = self.node.leases.find(pod)
            if lease is not None and lease.state in HONOURED_STATES:
                return lease
            try:
                fetched = await self.node.lease_sync.fetch(pod)
            except UnavailableError as error:
                if self.clock.ticks() + FETCH_PAUSE_S > until:
                    raise UnavailableError(
                        f"no reply within {LEASE_WAIT_S:g} s on whether pod "
                        f"{candidate} holds a lease: {error}; are the binder and NATS running?"
                    ) from error
            else:
                found = next((lease for lease in fetched if lease.pod == pod), None)
                is_reserved = found is not None and found.state is LeaseState.RESERVED
                if not is_reserved or self.clock.ticks() > until:
                    return self.node.leases.find(pod)
            await self.clock.sleep(FETCH_PAUSE_S)

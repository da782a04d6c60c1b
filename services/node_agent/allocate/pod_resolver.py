"""Resolves the container that the kubelet allocates for, and its pod's lease."""

import asyncio
import contextlib
from collections.abc import Callable, Set
from typing import Protocol

from services.node_agent.agent_timing import DEFAULT_TIMING, AgentTiming
from services.node_agent.allocate.allocation import HONOURED_STATES
from services.node_agent.allocate.pod_resolution import (
    Ambiguous,
    ContainerCandidate,
    resolve_container,
)
from services.node_agent.kubelet.node_pods import AgentPodLister, PodResourcesLister
from services.node_agent.kubelet.pods import KubeletPod, PodResources
from services.node_agent.records.checkpoint_entry import AllocationHistory
from services.node_agent.records.lease_sync import LeaseSync
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.lease import Lease, LeaseState
from shared.model.names import PodUid

LOOK_AGAIN_S = 0.1
FETCH_PAUSE_S = 0.2


class NodePodLister(AgentPodLister, Protocol):
    """Lists the node's pods, also without the kubelet's list."""

    @property
    def unreadable_reason(self) -> str:
        """Why pods are only known from leases; empty: the kubelet lists them."""
        ...


class PodResolver:
    """Reads the kubelet's lists, and requests leases that are not known yet."""

    def __init__(
        self,
        lease_sync: LeaseSync,
        *,
        pods: NodePodLister,
        pod_resources: PodResourcesLister,
        clock: Clock,
        timing: AgentTiming = DEFAULT_TIMING,
    ) -> None:
        self.lease_sync = lease_sync
        self.leases = lease_sync.leases
        self.pods = pods
        self.pod_resources = pod_resources
        self.clock = clock
        self.timing = timing

    @property
    def unreadable_reason(self) -> str:
        """Why the kubelet's pod list cannot be read; empty: it can."""
        return self.pods.unreadable_reason

    async def terminated(self, pods: Set[PodUid]) -> Set[PodUid]:
        """Return those of the pods whose last container has ended, as the kubelet shows it.

        Their leases end with the reply: a busy kubelet may have yet to admit a pod that was deleted
        meanwhile, and calls Allocate for it.
        """
        running = {pod.uid for pod in await self.pods.list_pods() if not pod.terminal}
        if not running.issuperset(pods):
            running |= await self.pods.list_running()
        self.leases.end(pods - running)
        return pods - running

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
        `resolve_s` while the container is ambiguous; without them, it stays so.
        """
        until = self.clock.ticks() + self.timing.resolve_s
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
                await self._fetch_all()
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
            self.pods.list_pods(), self.pod_resources.list_holdings(), return_exceptions=True
        )
        if isinstance(pods, BaseException):
            raise pods
        if isinstance(pod_resources, BaseException):
            raise pod_resources
        return pods, pod_resources

    async def _fetch_all(self) -> None:
        """Request all leases of the node, to find its pods without the kubelet's list."""
        with contextlib.suppress(UnavailableError):
            await self.lease_sync.fetch()

    async def sync_leases(self) -> None:
        """Request all leases of the node, so that those that have ended are known."""
        with contextlib.suppress(UnavailableError):
            await self.lease_sync.sync()

    async def lease_of(self, candidate: ContainerCandidate) -> Lease | None:
        """Return the pod's lease, requested if need be.

        For `lease_wait_s` it is requested again if there is no reply, and if the lease is only
        reserved: its binder is about to bind it.
        """
        pod = candidate.pod.uid
        until = self.clock.ticks() + self.timing.lease_wait_s
        while True:
            lease = self.leases.find(pod)
            if lease is not None and lease.state in HONOURED_STATES:
                return lease
            try:
                fetched = await self.lease_sync.fetch(pod)
            except UnavailableError as error:
                if self.clock.ticks() + FETCH_PAUSE_S > until:
                    raise UnavailableError(
                        f"no reply within {self.timing.lease_wait_s:g} s on whether pod "
                        f"{candidate} holds a lease: {error}; are the binder and NATS running?"
                    ) from error
            else:
                found = next((lease for lease in fetched if lease.pod == pod), None)
                is_reserved = found is not None and found.state is LeaseState.RESERVED
                if not is_reserved or self.clock.ticks() > until:
                    return self.leases.find(pod)
            await self.clock.sleep(FETCH_PAUSE_S)

"""Finds out for whom the kubelet asks, and which lease they hold."""

import asyncio
from collections.abc import Callable, Set
from typing import Protocol

from services.node_agent.allocate.allocation import HONOURED_STATES
from services.node_agent.allocate.pod_resolution import (
    AllocationHistory,
    Ambiguous,
    ContainerCandidate,
    KubeletPod,
    PodResources,
    resolve_container,
)
from services.node_agent.records.known_leases import KnownLeases
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.events.request_reply import LeasesReply, LeasesRequest
from shared.model.lease import Lease, LeaseState
from shared.model.names import NodeName, PodUid

LOOK_AGAIN_S = 0.1
CLEAR_UP_S = 2.0
"""How long several possible containers are looked at again: a rejected pod is soon seen as such."""
ASK_S = 2.0
ASKING_S = 4.0
ASK_PAUSE_S = 0.2


class PodLister(Protocol):
    """The kubelet's own list."""

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        """Return every pod the kubelet knows."""
        ...

    async def list_running(self) -> frozenset[PodUid]:
        """Return the pods of which the runtime still has a container."""
        ...


class NodePodLister(PodLister, Protocol):
    """The pods of the node."""

    @property
    def unreadable_reason(self) -> str:
        """Why they are only known from leases; empty: the kubelet lists them."""
        ...


class PodResourcesLister(Protocol):
    """The kubelet's PodResources."""

    async def list_holdings(self) -> PodResources:
        """Return everything held."""
        ...


class LeaseRequester(Protocol):
    """Whoever answers for the ledger."""

    async def request(
        self, question: LeasesRequest, answer: type[LeasesReply], *, timeout_s: float
    ) -> LeasesReply:
        """Put a question; UnavailableError if nobody answers."""
        ...


class PodResolver:
    """Looks at the kubelet and, for a lease that no news told of, asks the ledger's side."""

    def __init__(
        self,
        node: NodeName,
        *,
        leases: KnownLeases,
        pods: NodePodLister,
        pod_resources: PodResourcesLister,
        lease_requester: LeaseRequester,
        clock: Clock,
    ) -> None:
        self.node = node
        self.leases = leases
        self.pods = pods
        self.pod_resources = pod_resources
        self.lease_requester = lease_requester
        self.clock = clock

    async def terminated(self, pods: Set[PodUid]) -> Set[PodUid]:
        """Return those of the pods whose last container has ended, as the kubelet shows it."""
        going_on = {pod.uid for pod in await self.pods.list_pods() if not pod.terminal}
        if not going_on.issuperset(pods):
            going_on |= await self.pods.list_running()
        return pods - going_on

    async def resolve(
        self,
        resource: str,
        count: int,
        history: Callable[[], AllocationHistory],
        *,
        device_ids: tuple[str, ...] | None = None,
    ) -> ContainerCandidate | Ambiguous:
        """Say who is asked for; look again for a while if several could be meant.

        `device_ids` are those chosen already; before that, an unclear question is left alone.
        """
        until = self.clock.ticks() + CLEAR_UP_S
        asked = False
        while True:
            pods, held = await self._look()
            who = resolve_container(
                resource,
                count,
                pods=pods,
                pod_resources=held,
                history=history(),
                device_ids=device_ids,
            )
            if (
                isinstance(who, Ambiguous)
                and not who.candidates
                and self.pods.unreadable_reason
                and not asked
            ):
                asked = await self._ask_all()
                continue
            unclear = isinstance(who, Ambiguous) and who.candidates
            if not unclear or device_ids is None or self.clock.ticks() > until:
                return who
            await self.clock.sleep(LOOK_AGAIN_S)

    async def _look(self) -> tuple[tuple[KubeletPod, ...], PodResources]:
        """Ask the kubelet for its pods and for who holds what, at once.

        Raises what the first that cannot be answered raises, as it is: the kubelet repeats it.
        """
        pods, held = await asyncio.gather(
            self.pods.list_pods(), self.pod_resources.list_holdings(), return_exceptions=True
        )
        if isinstance(pods, BaseException):
            raise pods
        if isinstance(held, BaseException):
            raise held
        return pods, held

    async def _ask_all(self) -> bool:
        """Hear all leases of the node, for without the kubelet's list only they tell of pods."""
        try:
            answer = await self.lease_requester.request(
                LeasesRequest(node=self.node), LeasesReply, timeout_s=ASK_S
            )
        except UnavailableError:
            return True
        self.leases.observe(answer.leases)
        return True

    async def lease_of(self, who: ContainerCandidate) -> Lease | None:
        """Return the pod's lease, asking for it if need be.

        For `ASKING_S` it is asked for again if nobody answers, and if the lease is only reserved:
        its binder is about to say more.
        """
        pod = who.pod.uid
        until = self.clock.ticks() + ASKING_S
        while True:
            lease = self.leases.find(pod)
            if lease is not None and lease.state in HONOURED_STATES:
                return lease
            try:
                question = LeasesRequest(node=self.node, pods=(pod,))
                answer = await self.lease_requester.request(question, LeasesReply, timeout_s=ASK_S)
            except UnavailableError as error:
                if self.clock.ticks() + ASK_PAUSE_S > until:
                    raise UnavailableError(
                        f"nobody could say within {ASKING_S:g} s whether pod {who} holds a lease: "
                        f"{error}; are the binder and NATS running?"
                    ) from error
            else:
                self.leases.observe(answer.leases)
                found = next((one for one in answer.leases if one.pod == pod), None)
                waits = found is not None and found.state is LeaseState.RESERVED
                if not waits or self.clock.ticks() > until:
                    return self.leases.find(pod)
            await self.clock.sleep(ASK_PAUSE_S)

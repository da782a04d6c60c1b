"""What the binder needs of the ledger; `shared.ledger.leases.RedisLeases` is it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import BoundPod, PodsListed
from shared.model.lease import Lease, StaleLeaseError
from shared.model.ledger import OfferedPods
from shared.model.names import NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.quota import Quota


class Ledger(Protocol):
    """Leases, inventory and waiting pods; every method takes a batch and may be called twice."""

    async def epoch(self) -> str | None:
        """Return the name of the ledger's present life; None while it is to be rebuilt."""
        ...

    async def bind(self, leases: Sequence[Lease]) -> list[Lease | StaleLeaseError]:
        """Commit reservations; a lease that expired or moved on is answered with the error."""
        ...

    async def activate(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        """Record that the kubelet was told of these pods; None for one without a bound lease."""
        ...

    async def release(
        self, pods: Sequence[PodUid], *, reason: str, version: int | None = None
    ) -> list[Lease]:
        """End leases and return those that ended now."""
        ...

    async def expire(self, now: float) -> list[Lease]:
        """End the reservations whose time is over, and return them."""
        ...

    async def load(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        """Return these pods' live leases."""
        ...

    async def load_node(self, node: NodeName) -> list[Lease]:
        """Return the live leases of a node."""
        ...

    def load_all(self) -> AsyncIterator[list[Lease]]:
        """Yield all live leases, page by page."""
        ...

    async def save_devices(self, report: DeviceReported) -> bool:
        """Take in what a node's agent reports; tell whether anything changed."""
        ...

    async def save_node(self, facts: NodeFacts, *, seen_at: float = 0.0) -> bool:
        """Take in a node's facts, unless newer ones are there; tell whether anything changed."""
        ...

    async def save_quotas(self, quotas: Sequence[Quota], *, told_at: float) -> bool:
        """Make these all quotas, unless newer ones are there; tell whether that is news."""
        ...

    async def keep_shut(self, words: Mapping[NodeName, str]) -> frozenset[NodeName]:
        """Record why nodes are shut, or (empty) that they are open; return all that are shut."""
        ...

    async def has_agent(self, node: NodeName) -> bool:
        """Say whether it was an agent of ours that told last of the node's devices."""
        ...

    async def remove_node(self, name: NodeName) -> bool:
        """Take a node out; its leases end with their pods."""
        ...

    async def capacity(self) -> int:
        """Return the number that rises whenever something is freed or added."""
        ...

    async def offers(self, *, now: float) -> OfferedPods:
        """Return waiting pods that what was freed since their verdict may help."""
        ...

    async def forget_waiting(self, pods: Sequence[PodUid]) -> None:
        """Say that these pods wait no longer."""
        ...


class Staging(Protocol):
    """What several binders collect together: pieces of listings, and agents' reports."""

    async def stage_piece(self, piece: PodsListed) -> tuple[BoundPod, ...] | None:
        """Keep one piece; return the whole listing once all its pieces are there."""
        ...

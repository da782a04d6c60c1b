"""Ports to NATS: publishing events, and requests to node agents."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.model.events.event import Event
from shared.model.events.request_reply import BindReply, LimitsReply, LimitsRequest
from shared.model.lease import Lease
from shared.model.names import NodeName, PodUid

Publish = Callable[[Sequence[Event]], Awaitable[None]]
"""Publishes events that cannot wait for a handler's return; raises UnavailableError if NATS did not
confirm them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReply:
    """A request to a node agent that got no reply."""

    reason: str
    has_responder: bool
    """Whether an agent subscribes to the request's subject."""


class BindPermissions(Protocol):
    """Node agents that admit Bindings to their nodes."""

    async def request_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindReply | NoReply:
        """Return which of the pods must wait. Raises UnavailableError while NATS is away."""
        ...


class Terminations(Protocol):
    """Node agents that know which pods have terminated."""

    async def list_terminated(self, node: NodeName, pods: Sequence[PodUid]) -> set[PodUid]:
        """Return the pods whose last container has terminated.

        Raises UnavailableError if the node agent does not reply.
        """
        ...


class ContainerLimits(Protocol):
    """Node agents that enforce the limits of containers."""

    async def set_limits(self, request: LimitsRequest) -> LimitsReply:
        """Enforce a lease, or a proposed one.

        Raises UnavailableError if the node agent does not reply.
        """
        ...


class SliceWriters(Protocol):
    """Node agents that write the ResourceSlices of their nodes."""

    async def write_slices(self, node: NodeName) -> str:
        """Let the node's slices follow the ledger; return why they do not, or an empty text."""
        ...


class NodeAgents(BindPermissions, Terminations, ContainerLimits, SliceWriters, Protocol):
    """Every request of the binder to node agents."""

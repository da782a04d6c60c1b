"""Ports to ResourceClaims at the API server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shared.model.events.claim_events import AllocatedClaim
from shared.model.names import PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAnswer:
    """The conditions of all devices of a claim: leased, or refused."""

    condition: str
    """`shared.model.claim.LEASED` or `REFUSED`, which becomes True."""
    reason: str
    """In CamelCase."""
    message: str
    lease: Mapping[str, Any] | None = None
    """The copy of the lease, from which a lost ledger is rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUse:
    """A container that uses requests of a ResourceClaim, or requests GPUs otherwise."""

    container: str
    claim: str
    """Name of the claim; empty: the container requests an extended resource of ours."""
    request: str
    """Name of the request, empty for all of them; or of the extended resource."""


class ClaimAllocations(Protocol):
    """Reads ResourceClaims."""

    async def get_allocation(self, namespace: str, name: str) -> AllocatedClaim | None:
        """Return a claim's allocation of our devices as it is now; None: it has none."""
        ...


class RequestUses(Protocol):
    """Reads the pods that use claims."""

    async def list_uses(self, namespace: str, pod: str, uid: PodUid) -> Sequence[RequestUse]:
        """Return what the containers of a pod use; nothing if it is gone."""
        ...


class ClaimStatuses(ClaimAllocations, RequestUses, Protocol):
    """The status of ResourceClaims, and the pods that use them."""

    async def answer(self, claim: AllocatedClaim, answer: ClaimAnswer) -> None:
        """Write the conditions of all devices in one write.

        Raises ConflictError if the claim has changed since it was read, RequestError if it is gone.
        """
        ...

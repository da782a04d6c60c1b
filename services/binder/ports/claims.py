"""Ports to ResourceClaims at the API server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shared.model.events.claim_events import AllocatedClaim


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


class ClaimAllocations(Protocol):
    """Reads ResourceClaims."""

    async def get_allocation(self, namespace: str, name: str) -> AllocatedClaim | None:
        """Return a claim's allocation of our devices as it is now; None: it has none."""
        ...


class ClaimStatuses(ClaimAllocations, Protocol):
    """The status of ResourceClaims."""

    async def answer(self, claim: AllocatedClaim, answer: ClaimAnswer) -> None:
        """Write the conditions of all devices in one write.

        Raises ConflictError if the claim has changed since it was read, RequestError if it is gone.
        """
        ...

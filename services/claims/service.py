"""Leases of ResourceClaims: they are leased, answered, restored and ended.

This runs in the binder's process: otherwise every cluster would need one more process and its
logins.
"""

from dataclasses import dataclass

from services.claims.claim_answers import ClaimEnder
from services.claims.claim_leaser import ClaimLeaser
from shared.model.events.request_reply import SlicesRequest, TerminationRequest
from shared.runtime.service import publishes


@publishes(SlicesRequest, TerminationRequest)
@dataclass(eq=False, kw_only=True)
class Claims:
    """Any number of replicas may run."""

    leaser: ClaimLeaser
    ender: ClaimEnder

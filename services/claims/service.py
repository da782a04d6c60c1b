"""Leases of ResourceClaims: they are leased, answered, restored and ended.

It runs in the binder's process, with its connections and rights: of its own, every cluster would
need a process and logins, and only those with ResourceClaims would use it.
"""

from dataclasses import dataclass

from services.claims.claim_answers import ClaimEnder
from services.claims.claim_leaser import ClaimLeaser
from shared.model.events.request_reply import SlicesRequest, TerminationRequest
from shared.runtime.service import publishes


@publishes(SlicesRequest, TerminationRequest)
@dataclass(eq=False, kw_only=True)
class Claims:
    """Any number of replicas may run: ledger and API server decide between them."""

    leaser: ClaimLeaser
    ender: ClaimEnder

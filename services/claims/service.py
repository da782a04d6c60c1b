"""Leases of ResourceClaims: they are leased, answered, restored and ended.

It runs in the process of the binder, with its connections and rights: a Deployment of its own would
cost every cluster a process and logins, and only those with ResourceClaims would use it.
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

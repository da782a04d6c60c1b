"""Refuses claims with a container that combines requests, whose limits would replace each other.

Requests for whole devices and MIG instances have no limits: a container may have several.
"""

from collections.abc import Iterable, Mapping, Sequence

from services.binder.claim_client import ClaimClient, RequestUse
from services.binder.claims.claim_shares import reservation_of
from shared.model.claim import DRIVER
from shared.model.events.claim_events import AllocatedClaim
from shared.model.ledger import LedgerNode, Reservation

LimitedRequests = Mapping[str, bool]
"""Whether the containers that use a request are limited, by its name."""


class CombinedRequests:
    """Looks at the pods that a claim is reserved for, before it is leased.

    Pods that use an allocated claim later cannot be refused any more.
    """

    def __init__(self, claims: ClaimClient) -> None:
        self.claims = claims

    async def refusal(self, claim: AllocatedClaim, node: LedgerNode | None) -> str:
        """Return why a claim cannot be used as its pods want to; empty: it can.

        Raises UnavailableError if the API server does not say.
        """
        for uid, pod in zip(claim.consumers, claim.consumer_names, strict=False):
            uses = await self.claims.list_uses(claim.namespace, pod, uid)
            others = await self._others(claim, uses)
            limited = {each.name: limited_requests(each, node) for each in (claim, *others)}
            found = combined(claim.name, uses, limited)
            if found:
                return f"{found} of pod {claim.namespace}/{pod}: use one request of {DRIVER} for it"
        return ""

    async def _others(
        self, claim: AllocatedClaim, uses: Sequence[RequestUse]
    ) -> list[AllocatedClaim]:
        """Return the allocations of other claims that containers with this one use."""
        containers = {use.container for use in uses if use.claim == claim.name}
        names = {use.claim for use in uses if use.container in containers} - {claim.name, ""}
        found = [await self.claims.get_allocation(claim.namespace, name) for name in sorted(names)]
        return [each for each in found if each is not None]


def limited_requests(claim: AllocatedClaim, node: LedgerNode | None) -> LimitedRequests:
    """Return which requests of a claim limit the containers that use them."""
    wanted = reservation_of(claim, node)
    shares = wanted.candidates[0].shares if isinstance(wanted, Reservation) else ()
    limited = {each.request.partition("/")[0]: False for each in claim.admin_devices}
    for share in shares:
        request = share.container.partition("/")[0]
        limited[request] = limited.get(request, False) or not (share.whole or share.mig)
    return limited


def combined(claim: str, uses: Iterable[RequestUse], limited: Mapping[str, LimitedRequests]) -> str:
    """Return which container combines a request of this claim with others; empty: none does."""
    used: dict[str, dict[tuple[str, str], bool]] = {}
    for use in uses:
        own = used.setdefault(use.container, {})
        if not use.claim:
            own["", use.request] = True
        for request, is_limited in limited.get(use.claim, {}).items():
            if use.request in {"", request}:
                own[use.claim, request] = is_limited
    for container, requests in used.items():
        concerned = any(name == claim for name, _ in requests)
        if concerned and len(requests) > 1 and any(requests.values()):
            names = " and ".join(_named(*request) for request in sorted(requests))
            return f"the limits of {names} would replace each other in container {container}"
    return ""


def _named(claim: str, request: str) -> str:
    return f"request {request} of ResourceClaim {claim}" if claim else request

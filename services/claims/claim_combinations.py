"""Which ResourceClaims containers may use together: limits of two would replace each other."""

import asyncio
from collections.abc import Iterable, Mapping
from functools import cache

from services.claims.claim_shares import (
    reservation_of,
)
from services.claims.clients import ClaimClient, RequestUse
from shared.model.events.claim_events import AllocatedClaim
from shared.model.leases.ledger import (
    LedgerNode,
    Reservation,
)
from shared.model.requests.claim import DRIVER

LimitedRequests = Mapping[str, bool]
"""Whether the containers that use a request are limited, by its name."""
MOST_COMBINED = 32


class ClaimReads:
    """Reads each pod and claim once: the claims of one pod share them."""

    def __init__(self, claims: ClaimClient) -> None:
        self.list_uses = cache(lambda *of: asyncio.ensure_future(claims.list_uses(*of)))
        self.get_allocation = cache(lambda *of: asyncio.ensure_future(claims.get_allocation(*of)))


async def combination_refusal(
    reads: ClaimReads, claim: AllocatedClaim, node: LedgerNode | None
) -> str:
    """Return why a claim cannot be used as its pods want to, or an empty text.

    Requests for whole devices and MIG instances have no limits. Pods that use an allocated claim
    later cannot be refused any more. Raises UnavailableError.
    """
    for uid, pod in zip(claim.consumers, claim.consumer_names, strict=False):
        uses = await reads.list_uses(claim.namespace, pod, uid)
        containers = {use.container for use in uses if use.claim == claim.name}
        names = {use.claim for use in uses if use.container in containers} - {claim.name, ""}
        if len(names) > MOST_COMBINED:
            return (
                f"containers of pod {claim.namespace}/{pod} use {len(names)} other ResourceClaims "
                f"beside {claim.name}; at most {MOST_COMBINED} are allowed"
            )
        others = [await reads.get_allocation(claim.namespace, name) for name in sorted(names)]
        limited = {
            read_claim.name: limited_requests(read_claim, node)
            for read_claim in (claim, *others)
            if read_claim
        }
        conflict = combined(claim.name, uses, limited)
        if conflict:
            return f"{conflict} of pod {claim.namespace}/{pod}: use one request of {DRIVER} for it"
    return ""


def limited_requests(claim: AllocatedClaim, node: LedgerNode | None) -> LimitedRequests:
    wanted = reservation_of(claim, node)
    shares = wanted.candidates[0].shares if isinstance(wanted, Reservation) else ()
    limited = {device.request.partition("/")[0]: False for device in claim.admin_devices}
    for share in shares:
        request = share.container.partition("/")[0]
        limited[request] = limited.get(request, False) or not (share.whole or share.mig)
    return limited


def combined(claim: str, uses: Iterable[RequestUse], limited: Mapping[str, LimitedRequests]) -> str:
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
            names = " and ".join(_request_name(*request) for request in sorted(requests))
            return f"the limits of {names} would replace each other in container {container}"
    return ""


def _request_name(claim: str, request: str) -> str:
    return f"request {request} of ResourceClaim {claim}" if claim else request

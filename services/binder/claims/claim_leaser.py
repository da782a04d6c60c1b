"""Leases what schedulers have allocated to ResourceClaims, and answers them.

A claim is answered in one write: all its devices are leased, or all are refused. Before a refusal
the node's slices follow the ledger, or the scheduler would allocate the same share again.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.binder.claims.claim_answers import AnswerWriter
from services.binder.claims.claim_ender import ClaimEnder
from services.binder.claims.claim_shares import refusal_text, reservation_of
from services.binder.claims.combined_requests import CombinedRequests
from services.binder.ledger_sync.ledger_updates import lease_changes
from shared.ledger.leases import RedisLeases
from shared.model.claim import LEASED, REFUSED
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.claim_events import AllocatedClaim, ClaimAllocated
from shared.model.events.node_events import LeaseHolder
from shared.model.events.pod_events import LeaseChanged
from shared.model.lease import Lease, LeaseState
from shared.model.lease_copy import load_lease
from shared.model.ledger import (
    AlreadyLeased,
    NoCapacity,
    NodeTotals,
    Reservation,
    Reserved,
    TooLarge,
)
from shared.model.names import NodeName, PodUid
from shared.runtime.service import Publish

logger = logging.getLogger(__name__)

RESERVATION_S = 30.0
"""A binder that dies between reservation and commit leaves the reservation so long."""
WAIT_S = 10.0
"""So long a claim waits for a share that is about to be free, before it is refused."""


@dataclass(slots=True)
class ClaimDecisions:
    """What was decided about the claims of a batch."""

    traces: Mapping[PodUid, str]
    leased: list[tuple[AllocatedClaim, Lease]] = field(default_factory=list)
    refused: list[tuple[AllocatedClaim, str]] = field(default_factory=list)
    permitted: list[AllocatedClaim] = field(default_factory=list)
    """Claims that need no lease."""
    ended: list[Lease] = field(default_factory=list)
    """Leases of earlier allocations."""
    unresolved: list[str] = field(default_factory=list)
    """Why other claims must be decided again."""


class ClaimLeaser:
    """Stateless but for the time since which claims wait; the ledger decides between binders."""

    def __init__(
        self,
        *,
        ledger: RedisLeases,
        publish: Publish,
        answers: AnswerWriter,
        ender: ClaimEnder,
        clock: Clock,
    ) -> None:
        self.ledger = ledger
        self.publish = publish
        self.answers = answers
        self.ender = ender
        self.clock = clock
        self.combined = CombinedRequests(answers.claims)
        self._waiting_since: dict[PodUid, float] = {}

    async def lease(self, events: Sequence[ClaimAllocated]) -> list[LeaseChanged]:
        """Lease each claim's allocation and write the answer; return leases that ended.

        Raises UnavailableError if a claim has to be decided again; the others are answered.
        """
        newest = {event.claim.claim: event.claim for event in events}
        traces = {event.claim.claim: event.trace for event in events}
        return await self._lease(newest.values(), traces)

    async def _lease(
        self, allocated: Iterable[AllocatedClaim], traces: Mapping[PodUid, str]
    ) -> list[LeaseChanged]:
        # A refused claim is deallocated by its scheduler.
        claims = [claim for claim in allocated if claim.answer != REFUSED]
        if not claims:
            return []
        decisions = await self._decide(claims, traces)
        leased = await self.commit(decisions)
        results = await asyncio.gather(
            *(self.answers.confirm(claim, lease) for claim, lease in leased),
            *(self.answers.refuse(claim, text) for claim, text in decisions.refused),
            *(self.answers.permit(claim) for claim in decisions.permitted),
        )
        for result in results:
            decisions.ended += result.ended
            decisions.unresolved += [result.unwritten] if result.unwritten else []
        ended, unresolved = lease_changes(decisions.ended), decisions.unresolved
        if unresolved:
            await self.publish(ended)
            raise UnavailableError(
                f"{len(unresolved)} of {len(claims)} claims are not answered yet: {unresolved[0]}"
            )
        return ended

    async def restore(self, holder: LeaseHolder, node: NodeName) -> list[LeaseChanged]:
        """Lease a claim of a node, to be prepared there, if the ledger has no lease of it.

        It was answered before its pod was bound, so a lease has been lost. A lease that the ledger
        has gets another version, so that it does not end because a binder was told earlier that the
        claim is not prepared. Returns leases that ended. An error is logged: the node's agent
        repeats its request.
        """
        try:
            [lease] = await self.ledger.load([holder.pod])
            if lease is not None:
                if lease.claim is not None and lease.state is LeaseState.BOUND:
                    await self.ledger.claims.set_consumers(lease, lease.claim.consumers)
                return []
            claim = await self.answers.claims.get_allocation(holder.namespace, holder.name)
            if claim is None or (claim.claim, claim.node) != (holder.pod, node):
                return []
            return await self._lease([claim], {claim.claim: ""})
        except LeaseholdError as error:
            name = f"{holder.namespace}/{holder.name}"
            logger.warning("the lease of ResourceClaim %s is missing: %s", name, error)
            return []

    async def _decide(
        self, claims: Sequence[AllocatedClaim], traces: Mapping[PodUid, str]
    ) -> ClaimDecisions:
        """Reserve what was allocated, for claims that have no lease on it."""
        decisions = ClaimDecisions(traces)
        new: list[AllocatedClaim] = []
        known = await self.ledger.load([claim.claim for claim in claims])
        for claim, lease in zip(claims, known, strict=True):
            if not claim.devices:
                new += [] if claim.answer else [claim]
                continue
            if lease is not None and covers(lease, claim):
                decisions.leased.append((claim, lease))
                continue
            if lease is not None and not await self._has_ended(lease, claim, decisions):
                continue
            if claim.answer != LEASED or await self._has_lost_share(claim):
                new.append(claim)
        if new:
            await self.reserve(new, decisions)
        return decisions

    async def _has_ended(
        self, lease: Lease, claim: AllocatedClaim, decisions: ClaimDecisions
    ) -> bool:
        """End the lease of another allocation; return whether it has ended.

        If this one had a lease, the other's had ended before: it came back when Redis lost data, or
        was never written.
        """
        if not await self._is_current(claim):
            return False
        if claim.answer == LEASED and _copy_in(claim) is not None:
            ended = await self.ender.release(lease)
        else:
            ended = await self.ender.end(lease)
        decisions.ended += ended
        if not ended:
            decisions.unresolved.append(f"an earlier lease of {_named(claim)} has not ended")
        return bool(ended)

    async def reserve(self, claims: Sequence[AllocatedClaim], decisions: ClaimDecisions) -> None:
        """Reserve what was allocated; decide on claims that get no lease."""
        totals = await self._totals(claims)
        wanted: list[tuple[AllocatedClaim, Reservation]] = []
        for claim in await self._usable(claims, totals, decisions):
            node = totals.get(claim.node)
            request = reservation_of(
                claim, node.node if node else None, decisions.traces[claim.claim]
            )
            if isinstance(request, Reservation):
                wanted.append((claim, request))
            else:
                decisions.refused.append((claim, request))
        outcomes = await self.ledger.reserve(
            [request for _, request in wanted], now=self.clock.now(), ttl_s=RESERVATION_S
        )
        if any(isinstance(outcome, NoCapacity) for outcome in outcomes):
            totals = await self._totals(claims)  # with what others of the batch were given
        for (claim, request), outcome in zip(wanted, outcomes, strict=True):
            match outcome:
                case Reserved(lease=lease) | AlreadyLeased(lease=lease) if covers(lease, claim):
                    decisions.leased.append((claim, lease))
                case NoCapacity():
                    await self._refuse(claim, request, outcome, totals, decisions)
                case TooLarge(reason=reason):
                    text = f"its lease cannot be stored: {reason}"
                    decisions.refused.append((claim, text))
                case _:
                    decisions.unresolved.append(f"{_named(claim)} has another lease")

    async def _usable(
        self,
        claims: Sequence[AllocatedClaim],
        totals: Mapping[NodeName, NodeTotals],
        decisions: ClaimDecisions,
    ) -> list[AllocatedClaim]:
        """Return the claims that need a lease, and that their pods can use."""
        nodes = (totals[claim.node].node if claim.node in totals else None for claim in claims)
        refusals = await asyncio.gather(
            *map(self.combined.refusal, claims, nodes), return_exceptions=True
        )
        usable: list[AllocatedClaim] = []
        for claim, refusal in zip(claims, refusals, strict=True):
            match refusal:
                case LeaseholdError():
                    decisions.unresolved.append(f"the pods of {_named(claim)}: {refusal}")
                case BaseException():
                    raise refusal
                case "":
                    (usable if claim.devices else decisions.permitted).append(claim)
                case text:
                    decisions.refused.append((claim, text))
        return usable

    async def _totals(self, claims: Sequence[AllocatedClaim]) -> dict[NodeName, NodeTotals]:
        names = sorted({claim.node for claim in claims})
        return {each.node.facts.name: each for each in await self.ledger.totals.of_nodes(names)}

    async def _refuse(
        self,
        claim: AllocatedClaim,
        request: Reservation,
        outcome: NoCapacity,
        totals: dict[NodeName, NodeTotals],
        decisions: ClaimDecisions,
    ) -> None:
        """Refuse a claim, unless it fits as soon as what ends now has ended."""
        if outcome.reserved_for_other or await self._is_ending(request):
            since = self._waiting_since.setdefault(claim.claim, self.clock.ticks())
            if self.clock.ticks() < since + WAIT_S:
                decisions.unresolved.append(f"{_named(claim)} waits for a share that is ending")
                return
        self._waiting_since.pop(claim.claim, None)
        text = refusal_text(request, outcome, totals.get(claim.node))
        decisions.refused.append((claim, text))

    async def _is_ending(self, request: Reservation) -> bool:
        """Return whether a lease on one of the devices ends once its containers have terminated."""
        devices = {share.device for share in request.candidates[0].shares}
        ending = await self.ledger.load_vanished()
        return any(share.device in devices for lease in ending for share in lease.shares)

    async def _is_current(self, claim: AllocatedClaim) -> bool:
        """Return whether the claim still has this allocation: events may arrive in any order."""
        now = await self.answers.claims.get_allocation(claim.namespace, claim.name)
        return now is not None and (now.claim, now.generation) == (claim.claim, claim.generation)

    async def _has_lost_share(self, claim: AllocatedClaim) -> bool:
        """Return whether an answered claim must be leased anew, as the ledger has lost its lease.

        If the node's agent does not confirm that it is not prepared, the lease is written again
        as it was.
        """
        if not await self._is_current(claim):
            return False
        lease = _copy_in(claim)
        if lease is None:
            logger.error("the lease of %s is lost, and it has no valid copy", _named(claim))
            return False
        if await self.ender.is_unprepared(lease):
            logger.error(
                "the ledger had lost the lease of %s, which is not prepared", _named(claim)
            )
            return True
        misfits = await self.ledger.restore([lease], now=self.clock.now())
        reason = f", which does not fit: {misfits[0][1]}" if misfits else ""
        logger.error("the ledger had lost the lease of %s%s", _named(claim), reason)
        return False

    async def commit(self, decisions: ClaimDecisions) -> list[tuple[AllocatedClaim, Lease]]:
        """Bind reservations, update consumers, and publish what has changed."""
        bound = await self.ledger.bind([lease for _, lease in decisions.leased])
        committed: list[tuple[AllocatedClaim, Lease]] = []
        changed: list[LeaseChanged] = []
        for (claim, before), after in zip(decisions.leased, bound, strict=True):
            lease = await self._with_consumers(claim, after) if isinstance(after, Lease) else None
            if lease is None:
                decisions.unresolved.append(f"the lease of {_named(claim)} has changed")
                continue
            self._waiting_since.pop(claim.claim, None)
            committed.append((claim, lease))
            if claim.answer != LEASED or lease.version != before.version:
                changed.append(LeaseChanged(lease=lease))
        await self.publish(changed)
        return committed

    async def _with_consumers(self, claim: AllocatedClaim, lease: Lease) -> Lease | None:
        if lease.claim is None or lease.claim.consumers == claim.consumers:
            return lease
        return await self.ledger.claims.set_consumers(lease, claim.consumers)


def covers(lease: Lease, claim: AllocatedClaim) -> bool:
    """Return whether a lease is for this allocation of the claim."""
    return lease.claim is not None and lease.claim.generation == claim.generation


def _copy_in(claim: AllocatedClaim) -> Lease | None:
    """Return the lease of this allocation that a claim was answered with; None: no valid one."""
    try:
        lease = load_lease(claim.lease, namespace=claim.namespace, name=claim.name)
    except RequestError:
        return None
    own = (lease.pod, lease.node) == (claim.claim, claim.node)
    return lease if own and covers(lease, claim) else None


def _named(claim: AllocatedClaim) -> str:
    return f"ResourceClaim {claim.namespace}/{claim.name}"

"""Leases what schedulers have allocated to ResourceClaims, and answers them.

All devices of a claim are leased, or all refused. Before a refusal the node's slices follow the
ledger, or the scheduler would allocate the same share again.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from services.claims.claim_answers import (
    PERMITTED,
    AnswerWriter,
    ClaimEnder,
    leased_answer,
)
from services.claims.claim_combinations import ClaimReads, combination_refusal
from services.claims.claim_shares import (
    covers,
    kept_shares,
    kept_text,
    name_of,
    refusal_text,
    reservation_of,
    slices_refusal,
    with_instances,
)
from services.claims.clients import ClaimAnswer, device_statuses
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.clock import Clock, ExpiringMap
from shared.model.devices.time_slices import Interval
from shared.model.errors import ConflictError, LeaseholdError, UnavailableError
from shared.model.events.claim_events import AllocatedClaim, ClaimAllocated
from shared.model.events.node_events import LeaseHolder
from shared.model.events.pod_events import LeaseChanged, lease_changes
from shared.model.events.request_reply import (
    ClaimLeaseReply,
    ClaimLeaseRequest,
    ClaimRestoreRequest,
    LeasesReply,
)
from shared.model.leases.lease import Lease, LeaseState, time_slices_of
from shared.model.leases.ledger import (
    AlreadyLeased,
    NoCapacity,
    NodeTotals,
    Reservation,
    ReservedLease,
    TooLarge,
)
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.claim import LEASED, REFUSED
from shared.pods.carried_leases import bound_claim, copy_in
from shared.runtime.service import Publish, answers, handles, loops

logger = logging.getLogger(__name__)

RESERVATION_S = 30.0
"""A binder that dies between reservation and commit leaves the reservation so long."""
WRITTEN_S = 10.0
"""After this time, an allocation that was not written never will be."""
MOST_UNWRITTEN = 256
MOST_UNWRITTEN_OF_NAMESPACE = 64
"""Reservations of allocations that are being written."""
MOST_CHOICES = 8
"""A GPU has at most 7 places, which other binders may get first."""
WAIT_S = 10.0
"""How long a claim waits for a share that is about to be free, before it is refused."""
FORGOTTEN_S = 6 * WAIT_S
"""A claim that has not been delivered again for this time waits no longer; it may be gone."""
MOST_WAITING = 8192


@dataclass(slots=True)
class ClaimDecisions:
    traces: Mapping[PodUid, str]
    leased: list[tuple[AllocatedClaim, Lease]] = field(default_factory=list)
    refused: list[tuple[AllocatedClaim, str]] = field(default_factory=list)
    permitted: list[AllocatedClaim] = field(default_factory=list)
    ended: list[Lease] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class ClaimLeaser:
    ledger: RedisLeases
    publish: Publish
    writer: AnswerWriter
    ender: ClaimEnder
    clock: Clock
    host_clock: Clock

    def __post_init__(self) -> None:
        self._waiting_since: ExpiringMap[PodUid, float] = ExpiringMap(
            self.clock.ticks, expires_s=FORGOTTEN_S, most=MOST_WAITING
        )
        self._plans = self.ledger.part(Preemptions)
        self._unwritten: dict[PodUid, tuple[AllocatedClaim, float]] = {}
        """Reservations whose allocations the API server may still reject, and since when."""

    @handles(concurrency=4)
    async def lease_claims(self, events: Sequence[ClaimAllocated]) -> list[LeaseChanged]:
        """Return leases that ended.

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
        leased = await self._commit(decisions)
        results = await asyncio.gather(
            *(self.writer.confirm(claim, lease) for claim, lease in leased),
            *(self.writer.refuse(claim, text) for claim, text in decisions.refused),
            *(self.writer.permit(claim) for claim in decisions.permitted),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, LeaseholdError):
                decisions.unresolved.append(str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                decisions.ended += result
        ended = lease_changes(decisions.ended)
        unresolved = decisions.unresolved
        if unresolved:
            await self.publish(ended)
            raise UnavailableError(
                f"{len(unresolved)} of {len(claims)} claims are not answered yet: {unresolved[0]}"
            )
        return ended

    @answers(concurrency=32)
    async def lease_claim(self, request: ClaimLeaseRequest) -> ClaimLeaseReply:
        """Answer an allocation while its scheduler writes it, so that no pod waits for its answer.

        Until the API server has it, its lease is a reservation, which costs no budget. After an
        empty reply `lease_claims` decides, and the pod waits for its binding conditions.
        """
        claim = request.claim
        try:
            if not await self._may_reserve(claim):
                return ClaimLeaseReply()
            self._unwritten[claim.claim] = claim, self.clock.ticks()
            return await self._admit(claim, request.trace)
        except (ConflictError, UnavailableError):
            return ClaimLeaseReply()

    async def _may_reserve(self, claim: AllocatedClaim) -> bool:
        if self._has_room(claim):
            return True
        await self._forget_committed()
        return self._has_room(claim)

    def _has_room(self, claim: AllocatedClaim) -> bool:
        others = [
            unwritten for unwritten, _ in self._unwritten.values() if unwritten.claim != claim.claim
        ]
        of_namespace = sum(unwritten.namespace == claim.namespace for unwritten in others)
        return len(others) < MOST_UNWRITTEN and of_namespace < MOST_UNWRITTEN_OF_NAMESPACE

    async def _forget_committed(self) -> None:
        entries = [*self._unwritten.items()]
        leases = await self.ledger.load([claim for claim, _ in entries])
        for (claim, entry), lease in zip(entries, leases, strict=True):
            is_reserved = lease is not None and lease.state is LeaseState.RESERVED
            if not is_reserved and self._unwritten.get(claim) is entry:
                del self._unwritten[claim]

    async def _admit(self, claim: AllocatedClaim, trace: str) -> ClaimLeaseReply:
        decisions = ClaimDecisions({claim.claim: trace})
        [stored] = await self.ledger.load([claim.claim])
        if stored is not None and covers(stored, claim):
            decisions.leased.append((claim, stored))
        elif stored is None or await self._has_ended_before(stored, claim):
            await self._reserve([claim], decisions)
        for _, text in decisions.refused:
            return ClaimLeaseReply(refusal=await self.writer.lower_slices(claim, text))
        for _ in decisions.permitted:
            return self._reply(claim, PERMITTED)
        for _, lease in decisions.leased:
            return self._reply(claim, leased_answer(claim, lease))
        return ClaimLeaseReply()

    async def _has_ended_before(self, lease: Lease, claim: AllocatedClaim) -> bool:
        """End the lease of an earlier allocation; return whether it has ended."""
        if lease.claim is None or await self._has(claim, lease.claim.generation):
            return False
        ended = await self.ender.end(lease)
        await self.publish(lease_changes(ended))
        return bool(ended)

    def _reply(self, claim: AllocatedClaim, answer: ClaimAnswer) -> ClaimLeaseReply:
        entries = device_statuses(claim, answer, now=self.host_clock.now())
        return ClaimLeaseReply(
            devices=tuple(msgspec.json.encode(entry).decode() for entry in entries)
        )

    @loops(every_s=1.0)
    async def end_unwritten_claims(self) -> list[LeaseChanged]:
        until = self.clock.ticks() - WRITTEN_S
        if all(at > until for _, at in self._unwritten.values()):
            return []
        await self._forget_committed()
        due = [claim for claim, at in self._unwritten.values() if at <= until]
        # Side by side: one that cannot be read, or whose node does not reply, delays no other.
        changes = await asyncio.gather(*map(self._settle, due))
        return list(chain.from_iterable(changes))

    async def _settle(self, claim: AllocatedClaim) -> list[LeaseChanged]:
        try:
            changes = await self._settled(claim)
        except LeaseholdError as error:  # it is tried again with the next call
            logger.warning("%s: its reservation stays: %s", name_of(claim), error)
            return []
        if self._unwritten.get(claim.claim, (None, 0.0))[0] is claim:
            del self._unwritten[claim.claim]
        return changes

    async def _settled(self, claim: AllocatedClaim) -> list[LeaseChanged]:
        stored = await self._written(claim, claim.generation)
        if stored is not None:
            return await self._lease([stored], {claim.claim: ""})
        [lease] = await self.ledger.load([claim.claim])
        if lease is None or not covers(lease, claim):
            return []
        return lease_changes(await self.ender.end(lease))

    @answers(concurrency=8)
    async def restore_lease(self, event: ClaimRestoreRequest) -> LeasesReply:
        await self.publish(await self.restore(event.claim, event.node))
        [lease] = await self.ledger.load([event.claim.pod])
        return LeasesReply(leases=(lease,) if lease and lease.node == event.node else ())

    async def restore(self, holder: LeaseHolder, node: NodeName) -> list[LeaseChanged]:
        """Lease a claim of a node, to be prepared there, if the ledger has no lease of it.

        A reservation is committed: the event of the written claim may come after its pod was bound.
        Another lease gets another version, so that no earlier denial of an agent ends it. An error
        is logged: the node's agent repeats its request.
        """
        try:
            [lease] = await self.ledger.load([holder.pod])
            if lease is not None and lease.state is not LeaseState.RESERVED:
                of = lease.claim if lease.node == node else None
                if of is not None and lease.state is LeaseState.BOUND:
                    await self.ledger.claims.set_consumers(lease, of.consumers)
                return []
            claim = await self.writer.claims.get_allocation(holder.namespace, holder.name)
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
        decisions = ClaimDecisions(traces)
        leases = await self.ledger.load([claim.claim for claim in claims])
        pairs = list(zip(claims, leases, strict=True))
        # Side by side: a node that does not reply delays the claims of no other.
        needed = await asyncio.gather(*(self._needs_lease(*pair, decisions) for pair in pairs))
        new = [claim for claim, is_needed in zip(claims, needed, strict=True) if is_needed]
        if new:
            await self._reserve(new, decisions)
        return decisions

    async def _needs_lease(
        self, claim: AllocatedClaim, lease: Lease | None, decisions: ClaimDecisions
    ) -> bool:
        if not claim.devices:
            return not claim.answer
        if lease is not None and covers(lease, claim):
            decisions.leased.append((claim, lease))
            return False
        if lease is not None and not await self._has_ended(lease, claim, decisions):
            return False
        return claim.answer != LEASED or await self._has_lost_share(claim)

    async def _has_ended(
        self, lease: Lease, claim: AllocatedClaim, decisions: ClaimDecisions
    ) -> bool:
        """End the lease of another allocation; return whether it has ended.

        If this one had a lease, the other's had ended before: Redis lost data.
        """
        if not await self._has(claim, claim.generation):
            return False
        if claim.answer == LEASED and copy_in(bound_claim(claim)) is not None:
            ended = await self.ender.release(lease)
        else:
            ended = await self.ender.end(lease)
        decisions.ended += ended
        if not ended:
            decisions.unresolved.append(f"an earlier lease of {name_of(claim)} has not ended")
        return bool(ended)

    async def _reserve(self, claims: Sequence[AllocatedClaim], decisions: ClaimDecisions) -> None:
        """If another claim gets the place of a MIG instance meanwhile, choose another."""
        totals = await self._totals(claims)
        usable = await self._usable(claims, totals, decisions)
        wanted = _reservations(usable, totals, decisions)
        for _ in range(MOST_CHOICES):
            refused = await self._reserve_chosen(wanted, decisions)
            if not refused:
                return
            totals = await self._totals(claims)  # with what others of the batch were given
            again = dict(_reservations([claim for claim, _, _ in refused], totals, decisions))
            wanted = []
            for claim, request, outcome in refused:
                other = again.get(claim)
                if other is not None and other.candidates != request.candidates:
                    wanted.append((claim, other))
                elif other is not None:
                    await self._refuse(claim, request, outcome, totals, decisions)
        decisions.unresolved += [f"other claims got the places of {name_of(c)}" for c, _ in wanted]

    async def _reserve_chosen(
        self, wanted: Sequence[tuple[AllocatedClaim, Reservation]], decisions: ClaimDecisions
    ) -> list[tuple[AllocatedClaim, Reservation, NoCapacity]]:
        """Return what has no room."""
        outcomes = await self.ledger.reserve(
            [request for _, request in wanted], now=self.clock.now(), ttl_s=RESERVATION_S
        )
        refused: list[tuple[AllocatedClaim, Reservation, NoCapacity]] = []
        for (claim, request), outcome in zip(wanted, outcomes, strict=True):
            match outcome:
                case ReservedLease(lease=lease) | AlreadyLeased(lease=lease) if covers(
                    lease, claim
                ):
                    decisions.leased.append((claim, lease))
                case NoCapacity():
                    refused.append((claim, request, outcome))
                case TooLarge(reason=reason):
                    text = f"its lease cannot be stored: {reason}"
                    decisions.refused.append((claim, text))
                case _:
                    decisions.unresolved.append(f"{name_of(claim)} has another lease")
        return refused

    async def _usable(
        self,
        claims: Sequence[AllocatedClaim],
        totals: Mapping[NodeName, NodeTotals],
        decisions: ClaimDecisions,
    ) -> list[AllocatedClaim]:
        nodes = (totals[claim.node].node if claim.node in totals else None for claim in claims)
        reads = ClaimReads(self.writer.claims)
        refusals = await asyncio.gather(
            *(combination_refusal(reads, *pair) for pair in zip(claims, nodes, strict=True)),
            return_exceptions=True,
        )
        usable: list[AllocatedClaim] = []
        for claim, refusal in zip(claims, refusals, strict=True):
            match refusal:
                case LeaseholdError():
                    decisions.unresolved.append(f"the pods of {name_of(claim)}: {refusal}")
                case BaseException():
                    raise refusal
                case "":
                    (usable if claim.devices else decisions.permitted).append(claim)
                case text:
                    decisions.refused.append((claim, text))
        return usable

    async def _totals(self, claims: Sequence[AllocatedClaim]) -> dict[NodeName, NodeTotals]:
        names = sorted({claim.node for claim in claims})
        return {
            node_totals.node.facts.name: node_totals
            for node_totals in await self.ledger.totals.of_nodes(names)
        }

    async def _refuse(
        self,
        claim: AllocatedClaim,
        request: Reservation,
        outcome: NoCapacity,
        totals: dict[NodeName, NodeTotals],
        decisions: ClaimDecisions,
    ) -> None:
        """Refuse a claim, unless it fits as soon as what ends now has ended.

        kube-scheduler gives no other pod what it has allocated: what a plan keeps is refused at
        once.
        """
        kept = await self._kept_text(request, totals.get(claim.node))
        if not kept and (outcome.reserved_for_other or await self._is_ending(request)):
            now = self.clock.ticks()
            since = self._waiting_since.get(claim.claim)
            since = now if since is None else since
            self._waiting_since.set(claim.claim, since)
            if now < since + WAIT_S:
                decisions.unresolved.append(f"{name_of(claim)} waits for a share that is ending")
                return
        self._waiting_since.pop(claim.claim)
        text = kept or refusal_text(request, outcome, totals.get(claim.node))
        decisions.refused.append((claim, text))

    async def _kept_text(self, request: Reservation, totals: NodeTotals | None) -> str:
        if totals is None or not kept_shares(request, totals):
            return ""
        state = await self._plans.state(now=self.clock.now(), past_s=0)
        return kept_text(request, totals, state)

    async def _is_ending(self, request: Reservation) -> bool:
        devices = {share.device for share in request.candidates[0].shares}
        ending = await self.ledger.load_vanished()
        return any(share.device in devices for lease in ending for share in lease.shares)

    async def _has(self, claim: AllocatedClaim, generation: str) -> bool:
        """Events may arrive in any order."""
        return await self._written(claim, generation) is not None

    async def _written(self, claim: AllocatedClaim, generation: str) -> AllocatedClaim | None:
        """Return the claim as stored, or None if it has another allocation."""
        now = await self.writer.claims.get_allocation(claim.namespace, claim.name)
        is_it = now is not None and (now.claim, now.generation) == (claim.claim, generation)
        return now if is_it else None

    async def _has_lost_share(self, claim: AllocatedClaim) -> bool:
        """Return whether an answered claim must be leased anew.

        Unless the node's agent confirms that it is unprepared, the lease is written again.
        """
        if not await self._has(claim, claim.generation):
            return False
        lease = copy_in(bound_claim(claim))
        if lease is None:
            logger.error("the lease of %s is lost, and it has no valid copy", name_of(claim))
            return False
        if await self.ender.is_unprepared(lease):
            logger.error(
                "the ledger had lost the lease of %s, which is not prepared", name_of(claim)
            )
            return True
        misfits = await self.ledger.restore([lease], now=self.clock.now())
        reason = f", which does not fit: {misfits[0][1]}" if misfits else ""
        logger.error("the ledger had lost the lease of %s%s", name_of(claim), reason)
        return False

    async def _commit(self, decisions: ClaimDecisions) -> list[tuple[AllocatedClaim, Lease]]:
        bound = await self.ledger.bind([lease for _, lease in decisions.leased])
        committed: list[tuple[AllocatedClaim, Lease]] = []
        changed: list[LeaseChanged] = []
        for (claim, before), after in zip(decisions.leased, bound, strict=True):
            lease = await self._with_consumers(claim, after) if isinstance(after, Lease) else None
            if lease is None:
                decisions.unresolved.append(f"the lease of {name_of(claim)} has changed")
                continue
            self._waiting_since.pop(claim.claim)
            committed.append((claim, lease))
            if claim.answer != LEASED or lease.version != before.version:
                changed.append(LeaseChanged(lease=lease))
        await self.publish(changed)
        return committed

    async def _with_consumers(self, claim: AllocatedClaim, lease: Lease) -> Lease | None:
        if lease.claim is None or lease.claim.consumers == claim.consumers:
            return lease
        return await self.ledger.claims.set_consumers(lease, claim.consumers)


def _reservations(
    claims: Iterable[AllocatedClaim],
    totals: Mapping[NodeName, NodeTotals],
    decisions: ClaimDecisions,
) -> list[tuple[AllocatedClaim, Reservation]]:
    """Of claims for different time slices of one GPU, lease the first before the others."""
    nodes = {name: node_totals.node for name, node_totals in totals.items()}
    wanted: list[tuple[AllocatedClaim, Reservation]] = []
    asked: dict[tuple[NodeName, DeviceUuid], Interval] = {}
    for claim in claims:
        node = nodes.get(claim.node)
        request = reservation_of(claim, node, decisions.traces[claim.claim])
        if not isinstance(request, Reservation):
            decisions.refused.append((claim, request))
            continue
        leases = totals[claim.node].leases if claim.node in totals else ()
        if refusal := slices_refusal(request, leases):
            decisions.refused.append((claim, refusal))
            continue
        slices = time_slices_of(request.candidates[0].shares, request.intervals)
        if any(asked.setdefault((claim.node, uuid), of) != of for uuid, of in slices.items()):
            decisions.unresolved.append(f"{name_of(claim)} has to wait for another one's lease")
            continue
        wanted.append((claim, request))
        if node is not None:
            nodes[claim.node] = with_instances(node, request.candidates[0].shares)
    return wanted

"""Takings in Redis or Valkey: what is being taken back for whom, and the journal of evictions.

Every write names the version it was decided on and is refused on any other. Opening a taking claims
its devices in the ledger in the same step, and closing it ends that claim; so does the reservation
of the pod it is for. All methods raise UnavailableError when the server does not answer or the
ledger is being rebuilt; a rebuild forgets the claims, and nothing else of this.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from shared.ledger.connection import LedgerPart
from shared.ledger.rows.lease_rows import demand_of
from shared.model.budget import LeaseClass
from shared.model.events.pod_events import BudgetChanged
from shared.model.preemption import EvictionRecord, Preemption, PreemptionState, StoredPreemption

PAST_S = 24 * 3600.0

_encode = msgspec.json.Encoder().encode
_taking_of = msgspec.json.Decoder(Preemption).decode
_eviction_of = msgspec.json.Decoder(EvictionRecord).decode
_standing_of = msgspec.json.Decoder(BudgetChanged).decode


class Preemptions(LedgerPart):
    """What binders share about taking back."""

    async def acquire_leadership(self, who: str, *, ttl_s: float) -> bool:
        """Return whether `who` may act now, and for `ttl_s` seconds nobody else."""
        return bool(await self._run("lead", who, round(ttl_s * 1000)))

    async def open(self, taking: Preemption) -> bool:
        """Begin a taking and claim its devices.

        False if it, its pod or a device is taken, or the pod's namespace has no quota for it.
        """
        claim: Any = False
        if taking.wanted is not None:
            (place,) = taking.wanted.candidates
            devices = sorted({share.device for share in place.shares})
            amounts = [part for item in taking.wanted.resources.items() for part in item]
            takes = demand_of(place.node, place.shares)
            pod, namespace = taking.wanted.pod, taking.wanted.namespace
            claim = (pod, place.node, devices, amounts, namespace, takes)
        return bool(await self._run("open", taking.id, _text(taking), claim))

    async def save(
        self, read: StoredPreemption, taking: Preemption, lines: Sequence[EvictionRecord] = ()
    ) -> StoredPreemption | None:
        """Write the next step with its lines of the journal; None if another did."""
        texts = [_text(line) for line in lines]
        if not await self._run("save", taking.id, read.version, _text(taking), texts):
            return None
        return StoredPreemption(preemption=taking, version=read.version + 1, claimed=read.claimed)

    async def close(self, read: StoredPreemption) -> bool:
        """End a taking and its claim; False if another moved it on."""
        wanted = read.preemption.wanted
        pod = wanted.pod if wanted else ""
        return bool(await self._run("close", read.preemption.id, read.version, pod))

    async def state(self, *, now: float, past_s: float = PAST_S) -> PreemptionState:
        """Read what is open, what was done in the last `past_s` seconds, and how budgets stand."""
        takings, lines, standings = await self._run("read", max(0.0, now - past_s) * 1000)
        return PreemptionState(
            open=tuple(
                StoredPreemption(preemption=_taking_of(text), version=version, claimed=claimed)
                for _, version, text, claimed in sorted(takings)
            ),
            evictions=tuple(map(_eviction_of, lines)),
            budgets={each.namespace: each for each in map(_standing_of, standings)},
        )

    async def save_budget(self, told: BudgetChanged) -> None:
        """Remember how a namespace's budget stands, unless something newer is known.

        It decides also which namespace's turn comes first among those whose pods wait, and
        whether its new pods may start at all.
        """
        is_out = told.lease_class != LeaseClass.GUARANTEED
        is_held = told.new_pods != "admit"
        row = ("save_budget", told.namespace, told.at, _text(told), is_out, told.share, is_held)
        await self._connection.run("preemptions", *row, state="any")

    async def _run(self, *args: object) -> Any:
        return await self._connection.run("preemptions", *args)


def _text(value: object) -> str:
    return _encode(value).decode()

"""Preemptions in Redis or Valkey: open ones, and the journal of evictions.

Every write names the version that it was decided on and is refused for any other. Opening a
preemption claims its devices in the ledger in the same step; closing it ends that claim, and so
does the reservation of the pod it is for. All methods raise UnavailableError when the server does
not answer or the ledger is being rebuilt; a rebuild deletes the claims, and nothing else of this.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from shared.ledger.connection import LedgerPart
from shared.ledger.rows.joined_texts import escaped
from shared.ledger.rows.lease_rows import demand_of, text
from shared.ledger.rows.unreadable import readable
from shared.model.budget import LeaseClass
from shared.model.events.pod_events import BudgetChanged
from shared.model.preemption import EvictionRecord, Preemption, PreemptionState, StoredPreemption

PAST_S = 24 * 3600.0

_decode_preemption = msgspec.json.Decoder(Preemption).decode
_decode_eviction = msgspec.json.Decoder(EvictionRecord).decode
_decode_budget = msgspec.json.Decoder(BudgetChanged).decode


class Preemptions(LedgerPart):
    """Preemptions that all binders share."""

    async def acquire_leadership(self, name: str, *, ttl_s: float) -> bool:
        """Return whether the caller is the only one that may act, for `ttl_s` from now on."""
        return bool(await self._run("lead", name, round(ttl_s * 1000)))

    async def open(self, preemption: Preemption) -> bool:
        """Begin a preemption and claim its devices.

        False if it has begun already, its pod or a device has a claim or a lease, or the pod's
        namespace has no quota for it.
        """
        claim: Any = False
        if preemption.wanted is not None:
            (placement,) = preemption.wanted.candidates
            devices = sorted({share.device for share in placement.shares})
            amounts = [
                part
                for name, amount in preemption.wanted.resources.items()
                for part in (escaped(name), amount)
            ]
            demand = demand_of(placement.node, placement.shares)
            pod, namespace = preemption.wanted.pod, preemption.wanted.namespace
            claim = (pod, placement.node, devices, amounts, namespace, demand)
        return bool(await self._run("open", preemption.id, text(preemption), claim))

    async def save(
        self,
        read: StoredPreemption,
        preemption: Preemption,
        evictions: Sequence[EvictionRecord] = (),
    ) -> StoredPreemption | None:
        """Write the next step with its evictions; None if another caller wrote one."""
        texts = [text(eviction) for eviction in evictions]
        if not await self._run("save", preemption.id, read.version, text(preemption), texts):
            return None
        return StoredPreemption(
            preemption=preemption, version=read.version + 1, claimed=read.claimed
        )

    async def close(self, read: StoredPreemption) -> bool:
        """End a preemption and its claim; False if another caller has written a step."""
        wanted = read.preemption.wanted
        pod = wanted.pod if wanted else ""
        return bool(await self._run("close", read.preemption.id, read.version, pod))

    async def state(self, *, now: float, past_s: float = PAST_S) -> PreemptionState:
        """Return open preemptions, evictions of the last `past_s`, and the states of budgets."""
        preemptions, evictions, budgets = await self._run("read", max(0.0, now - past_s) * 1000)
        return PreemptionState(
            open=tuple(readable(_decode_stored, sorted(preemptions))),
            evictions=tuple(readable(_decode_eviction, evictions)),
            budgets={budget.namespace: budget for budget in readable(_decode_budget, budgets)},
        )

    async def save_budget(self, budget: BudgetChanged) -> None:
        """Save the state of a namespace's budget, unless a newer one is stored.

        It also decides which namespace comes first among those whose pods wait, and whether its new
        pods may start at all.
        """
        is_spent = budget.lease_class != LeaseClass.GUARANTEED
        must_wait = budget.new_pods != "admit"
        row = (
            budget.namespace,
            budget.reported_at,
            text(budget),
            is_spent,
            budget.weight,
            must_wait,
        )
        await self._connection.run("preemptions", "save_budget", *row, state="any")

    async def _run(self, *args: object) -> Any:
        return await self._connection.run("preemptions", *args)


def _decode_stored(row: Sequence[Any]) -> StoredPreemption:
    _, version, stored, is_claimed = row
    return StoredPreemption(
        preemption=_decode_preemption(stored), version=version, claimed=is_claimed
    )

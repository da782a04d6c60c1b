"""Preemptions and planned starts in Redis or Valkey, with the journals of how they ended.

Every write names the version that it was decided on and is refused for any other. Opening claims
the devices in the same step, until it is closed, or its pod gets a reservation. All methods raise
UnavailableError when the server does not answer or the ledger is being rebuilt, which deletes
claims and planned starts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from shared.ledger.connection import LedgerPart
from shared.ledger.rows.joined_texts import escaped
from shared.ledger.rows.lease_rows import demand_of, encode_reservation, text
from shared.ledger.rows.unreadable import readable
from shared.model.budgets.budget import LeaseClass
from shared.model.events.pod_events import BudgetChanged
from shared.model.leases.ledger import Reservation, TooLarge
from shared.model.leases.preemption import (
    EndedPromise,
    EvictionRecord,
    Preemption,
    PreemptionState,
    StoredPreemption,
    StoredStart,
)
from shared.model.names import DeviceUuid, PodUid

PAST_S = 24 * 3600.0
"""How long ago the ended preemptions that are read may have ended."""

_decode_preemption = msgspec.json.Decoder(Preemption).decode
_decode_start = msgspec.json.Decoder(StoredStart).decode
_decode_eviction = msgspec.json.Decoder(EvictionRecord).decode
_decode_promise = msgspec.json.Decoder(EndedPromise).decode
_decode_budget = msgspec.json.Decoder(BudgetChanged).decode


class Preemptions(LedgerPart):
    async def acquire_leadership(self, service: str, name: str, *, ttl_s: float) -> bool:
        return bool(await self._run("lead", service, name, round(ttl_s * 1000)))

    async def open(self, preemption: Preemption, gangs: Mapping[str, int] | None = None) -> bool:
        """Return False if nothing was opened.

        `gangs` are those of which pods end, with the number of their leases by which it was
        planned. Nothing is opened if that has changed, a pod or a device has a claim or a lease,
        the namespace has no quota for all pods, or a lease would be too large.
        """
        wanted = preemption.wanted
        if not _can_be_stored(wanted):
            return False
        claims = _claims(wanted, [reservation.resources for reservation in wanted], until=0)
        counts = [part for counted in (gangs or {}).items() for part in counted]
        return bool(await self._run("open", preemption.id, text(preemption), claims, counts))

    async def open_start(
        self, start: StoredStart, *replaced: StoredStart, ended: Iterable[EndedPromise] = ()
    ) -> bool:
        """Store a planned start in place of others as they were read.

        Returns False for the reasons of `open`, or if another caller has changed one of `replaced`;
        then nothing is recorded as `ended`.
        """
        if not _can_be_stored(start.wanted):
            return False
        claims = _claims(start.wanted, start.at_once, until=int(start.at))
        read: dict[str, tuple[object, ...]] = {start.id: (start.id, False, ())}
        read |= {earlier.id: (earlier.id, earlier.opened_at, earlier.pods) for earlier in replaced}
        row = (text(start), claims, [*read.values()], [*map(text, ended)])
        return bool(await self._run("open_start", *row))

    async def close_start(self, start: StoredStart, ended: EndedPromise | None = None) -> bool:
        """Return False if another caller has removed the planned start."""
        ends = [text(ended)] if ended else []
        return bool(await self._run("close_start", start.id, start.opened_at, start.pods, ends))

    async def save(
        self,
        read: StoredPreemption,
        preemption: Preemption,
        evictions: Sequence[EvictionRecord] = (),
    ) -> StoredPreemption | None:
        """Return None if another caller wrote a step."""
        texts = [text(eviction) for eviction in evictions]
        if not await self._run("save", preemption.id, read.version, text(preemption), texts):
            return None
        return StoredPreemption(
            preemption=preemption, version=read.version + 1, claimed=read.claimed
        )

    async def close(self, read: StoredPreemption) -> bool:
        """Return False if another caller has written a step."""
        preemption = read.preemption
        return bool(await self._run("close", preemption.id, read.version, preemption.holders))

    async def state(self, *, now: float, past_s: float = PAST_S) -> PreemptionState:
        since_ms = max(0.0, now - past_s) * 1000
        preemptions, evictions, budgets, starts, claimed = await self._connection.run(
            "read_preemptions", "read", since_ms
        )
        claimed = frozenset(claimed)
        return PreemptionState(
            open=tuple(readable(lambda row: _decode_stored(row, claimed), sorted(preemptions))),
            starts=tuple(sorted(readable(_decode_start, starts), key=lambda start: start.id)),
            evictions=tuple(readable(_decode_eviction, evictions)),
            budgets={budget.namespace: budget for budget in readable(_decode_budget, budgets)},
        )

    async def promises(self, after: str) -> tuple[str, list[EndedPromise]]:
        """Return also the ID of the last entry."""
        rows = await self._connection.run("read_preemptions", "read_promises", after)
        last = rows[-1][0] if rows else after
        return last, [*readable(_decode_promise, (stored for _, stored in rows))]

    async def save_budget(self, budget: BudgetChanged) -> None:
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


def _can_be_stored(wanted: Iterable[Reservation]) -> bool:
    return not any(
        isinstance(encode_reservation(reservation, {}), TooLarge) for reservation in wanted
    )


def _claims(
    wanted: Sequence[Reservation], at_once: Sequence[Mapping[str, int]], *, until: int
) -> list[tuple[object, ...]]:
    """Of several pods on a device, only the first claims it."""
    rows = list[tuple[object, ...]]()
    claimed = set[DeviceUuid]()
    for reservation, amounts in zip(wanted, at_once, strict=True):
        (placement,) = reservation.candidates
        devices = {share.device for share in placement.shares} - claimed
        claimed |= devices
        demand = msgspec.to_builtins(demand_of(placement.node, placement.shares))
        rows.append(
            (
                *(reservation.pod, placement.node, sorted(devices), _pairs(reservation.resources)),
                *(reservation.namespace, demand, _pairs(amounts, reservation.resources), until),
            )
        )
    return rows


def _pairs(amounts: Mapping[str, int], names: Iterable[str] = ()) -> list[object]:
    return [part for name in names or amounts for part in (escaped(name), amounts.get(name, 0))]


def _decode_stored(row: Sequence[Any], claimed: frozenset[PodUid]) -> StoredPreemption:
    _, version, stored = row
    preemption = _decode_preemption(stored)
    is_claimed = claimed.issuperset(preemption.holders)
    return StoredPreemption(preemption=preemption, version=version, claimed=is_claimed)

"""What is to be done next about a taking, from what is true now: a table, read from the top.

Whoever leads decides afresh every time, so that a binder that died anywhere is simply replaced.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from services.binder.preempt.rules import Need, still_may
from shared.model.lease import Lease, LeaseState
from shared.model.names import PodUid
from shared.model.preemption import (
    Preemption,
    PreemptionStage,
    PreemptionState,
    StoredPreemption,
    Victim,
)

SLACK_S = 30.0
"""How much longer than notice and grace a taking may last."""


class Step(StrEnum):
    """What to do."""

    TELL = "tell"
    """Ask the API server whether all may be evicted, and tell them that they will be."""
    WAIT = "wait"
    EVICT = "evict"
    HAND_OVER = "hand over"
    """Reserve for the pod in need, on what is free now."""
    SAY = "say"
    """Have the lease bound."""
    CLOSE = "close"
    """It is done."""
    CALL_OFF = "call off"
    """Who was not evicted stays, and the devices are open to all again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is true of a taking's pods now."""

    waits: bool
    """The pod in need waits."""
    lease: Lease | None
    """What it holds."""
    leased: Collection[PodUid]
    """Victims whose leases live."""


def need_of(taking: Preemption) -> Need | None:
    """Return the pod in need."""
    if taking.wanted is None:
        return None
    return Need(
        pod=taking.wanted.pod,
        namespace=taking.wanted.namespace,
        priority=taking.priority,
        preempts=taking.preempts,
    )


def next_step(
    read: StoredPreemption, seen: Seen, affairs: PreemptionState, now: float
) -> tuple[Step, str]:
    """Return the next step, and why where it is called off."""
    taking = read.preemption
    holds = taking.wanted is not None and seen.lease is not None
    reserved = seen.lease is not None and seen.lease.state is LeaseState.RESERVED
    why = "" if taking.stage is PreemptionStage.HANDED else _over(read, seen, affairs, now)
    table = (
        (holds and bool(taking.left), Step.CALL_OFF),
        (holds and reserved, Step.SAY),
        (holds or taking.stage is PreemptionStage.HANDED, Step.CLOSE),
        (bool(why), Step.CALL_OFF),
        (taking.stage is PreemptionStage.OPENED, Step.TELL),
        (taking.stage is PreemptionStage.ANNOUNCED and now < taking.evict_at, Step.WAIT),
        (bool(taking.left), Step.EVICT),
        (taking.wanted is None, Step.CLOSE),
        (bool(seen.leased), Step.WAIT),
        (True, Step.HAND_OVER),
    )
    return next((step, why) for holds_now, step in table if holds_now)


def _over(read: StoredPreemption, seen: Seen, affairs: PreemptionState, now: float) -> str:
    """Say why a taking has become pointless, or nothing."""
    taking, need = read.preemption, need_of(read.preemption)
    if need is not None and seen.lease is not None:
        return "the pod in need has found another place"
    if need is not None and not seen.waits:
        return "the pod in need is gone"
    if need is not None and not read.claimed:
        return "the ledger was rebuilt meanwhile"
    if now >= taking.expires_at:
        return "it took too long"
    spared = [each for each in taking.left if not still_may(each, need, affairs, now)]
    if spared:
        return f"{spared[0].namespace}/{spared[0].name} may keep what it holds after all"
    return ""


def expiry(victims: Collection[Victim], notice_s: float, now: float) -> float:
    """Return when a taking is given up: after notice, the longest grace, and some slack."""
    return now + notice_s + max((each.grace_s for each in victims), default=0.0) + SLACK_S

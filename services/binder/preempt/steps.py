"""What is to be done next about a preemption, from what is true now: a table, read from the top.

Whoever leads decides afresh every time, so that a binder that died anywhere is simply replaced.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from services.binder.preempt.rules import PendingPod, may_still_evict
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
"""How much longer than notice and grace a preemption may last."""


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
    """What is true of a preemption's pods now."""

    waits: bool
    """The pod in need waits."""
    lease: Lease | None
    """What it holds."""
    leased: Collection[PodUid]
    """Victims whose leases live."""


def need_of(preemption: Preemption) -> PendingPod | None:
    """Return the pod in need."""
    if preemption.wanted is None:
        return None
    return PendingPod(
        pod=preemption.wanted.pod,
        namespace=preemption.wanted.namespace,
        priority=preemption.priority,
        preempts=preemption.preempts,
    )


def next_step(
    read: StoredPreemption, seen: Seen, affairs: PreemptionState, now: float
) -> tuple[Step, str]:
    """Return the next step, and why where it is called off."""
    preemption = read.preemption
    holds = preemption.wanted is not None and seen.lease is not None
    reserved = seen.lease is not None and seen.lease.state is LeaseState.RESERVED
    why = "" if preemption.stage is PreemptionStage.HANDED else _over(read, seen, affairs, now)
    table = (
        (holds and bool(preemption.left), Step.CALL_OFF),
        (holds and reserved, Step.SAY),
        (holds or preemption.stage is PreemptionStage.HANDED, Step.CLOSE),
        (bool(why), Step.CALL_OFF),
        (preemption.stage is PreemptionStage.OPENED, Step.TELL),
        (preemption.stage is PreemptionStage.ANNOUNCED and now < preemption.evict_at, Step.WAIT),
        (bool(preemption.left), Step.EVICT),
        (preemption.wanted is None, Step.CLOSE),
        (bool(seen.leased), Step.WAIT),
        (True, Step.HAND_OVER),
    )
    return next((step, why) for holds_now, step in table if holds_now)


def _over(read: StoredPreemption, seen: Seen, affairs: PreemptionState, now: float) -> str:
    """Say why a preemption has become pointless, or nothing."""
    preemption, need = read.preemption, need_of(read.preemption)
    if need is not None and seen.lease is not None:
        return "the pod in need has found another place"
    if need is not None and not seen.waits:
        return "the pod in need is gone"
    if need is not None and not read.claimed:
        return "the ledger was rebuilt meanwhile"
    if now >= preemption.expires_at:
        return "it took too long"
    spared = [each for each in preemption.left if not may_still_evict(each, need, affairs, now)]
    if spared:
        return f"{spared[0].namespace}/{spared[0].name} may keep what it holds after all"
    return ""


def expiry(victims: Collection[Victim], notice_s: float, now: float) -> float:
    """Return when a preemption is given up: after notice, the longest grace, and some slack."""
    return now + notice_s + max((each.grace_s for each in victims), default=0.0) + SLACK_S

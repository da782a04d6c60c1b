"""The next step of a preemption, from its observed state: a table, read from the top; pure.

The leader decides from that state every time, so a binder can be replaced at any point.
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
"""How much longer than notice and grace period a preemption may last."""


class Step(StrEnum):
    """The next step of a preemption."""

    ANNOUNCE = "announce"
    """Check by a dry run whether all victims may be evicted, and announce it to them."""
    WAIT = "wait"
    EVICT = "evict"
    RESERVE = "reserve"
    """Reserve the freed devices for the pending pod."""
    BIND = "bind"
    """Publish the placement of the pending pod."""
    CLOSE = "close"
    """The preemption is done."""
    CANCEL = "cancel"
    """Victims that were not evicted stay, and the devices are free for all pods again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPreemption:
    """The observed state of a preemption's pods."""

    waiting: bool
    """Whether the pending pod waits."""
    lease: Lease | None
    """The pending pod's lease."""
    leased_victims: Collection[PodUid]
    """Victims whose leases are live."""


def pending_pod_of(preemption: Preemption) -> PendingPod | None:
    """Return the pod that the preemption is for; None: for none."""
    if preemption.wanted is None:
        return None
    return PendingPod(
        pod=preemption.wanted.pod,
        namespace=preemption.wanted.namespace,
        priority=preemption.priority,
        preempts=preemption.preempts,
    )


def next_step(
    read: StoredPreemption, observed: ObservedPreemption, state: PreemptionState, now: float
) -> tuple[Step, str]:
    """Return the next step, and the reason if it is to cancel."""
    preemption, lease = read.preemption, observed.lease
    has_lease = preemption.wanted is not None and lease is not None
    reserved = lease is not None and lease.state is LeaseState.RESERVED
    handed = preemption.stage is PreemptionStage.HANDED
    reason = "" if handed else _cancel_reason(read, observed, state, now)
    announced = preemption.stage is PreemptionStage.ANNOUNCED
    table = (
        (has_lease and bool(preemption.left), Step.CANCEL),
        (has_lease and reserved, Step.BIND),
        (has_lease or handed, Step.CLOSE),
        (bool(reason), Step.CANCEL),
        (preemption.stage is PreemptionStage.OPENED, Step.ANNOUNCE),
        (announced and now < preemption.evict_at, Step.WAIT),
        (bool(preemption.left), Step.EVICT),
        (preemption.wanted is None, Step.CLOSE),
        (bool(observed.leased_victims), Step.WAIT),
        (True, Step.RESERVE),
    )
    return next((step, reason) for applies, step in table if applies)


def _cancel_reason(
    read: StoredPreemption, observed: ObservedPreemption, state: PreemptionState, now: float
) -> str:
    """Return why a preemption has become pointless; empty: it has not."""
    preemption, pending = read.preemption, pending_pod_of(read.preemption)
    if pending is not None and observed.lease is not None:
        return "the pending pod was placed elsewhere"
    if pending is not None and not observed.waiting:
        return "the pending pod is gone"
    if pending is not None and not read.claimed:
        return "the ledger was rebuilt meanwhile"
    if now >= preemption.expires_at:
        return "it took too long"
    spared = [each for each in preemption.left if not may_still_evict(each, pending, state, now)]
    if spared:
        return f"{spared[0].namespace}/{spared[0].name} may keep its lease after all"
    return ""


def expiry(victims: Collection[Victim], notice_s: float, now: float) -> float:
    """Return when a preemption is given up: after notice, the longest grace period, and slack."""
    return now + notice_s + max((each.grace_s for each in victims), default=0.0) + SLACK_S

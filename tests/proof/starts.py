"""Checks of planned starts: what pods are promised, and what is let in before; pure."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime

from tests.proof.history import Finding, History
from tests.proof.liveness import RESUMED_S, fits_on, free_devices, resumed_s, waits
from tests.proof.observations import RawClaim, RawLease, RawLedger, Sample, SeenPod

LATE_S = 30.0
"""After the promised time, a start that is late is withdrawn."""
TOLD_S = 5.0
"""The condition of a pod changes at most this often, so that it may lag behind an Event."""
GRACE_S = 30
MARGINS_S = 75
"""Between a lease's beginning and its end, beside its maximum run time."""
_PROMISE = re.compile(r"starts by (\S+) at the latest")


def promised_at(message: str) -> float | None:
    """Return the time by which a pod is promised to start, in its condition or an Event."""
    match = _PROMISE.search(message)
    is_taken_back = "no longer starts by" in message
    return datetime.fromisoformat(match[1]).timestamp() if match and not is_taken_back else None


def s11_a_start_is_kept_or_withdrawn(sample: Sample, history: History) -> Iterator[Finding]:
    """A pod that still waits after the promised time is no longer promised it."""
    for pod in (sample.pods or {}).values():
        at = promised_at(pod.message) if waits(pod) else None
        if at is not None and at < sample.at:
            bound_s = LATE_S + resumed_s(history)
            yield history.about("S11", pod.uid, f"it waits: {pod.message}", bound_s, counts_from=at)


def s11_a_promise_is_withdrawn_with_its_event(
    sample: Sample, history: History
) -> Iterator[Finding]:
    """A waiting pod that is promised a later start than before, or none, has an Event why."""
    for uid, (at, seen_at) in sorted(history.promises.items()):
        pod = (sample.pods or {}).get(uid)
        if pod is None or not waits(pod) or sample.withdrawn.get(uid, 0.0) > seen_at - TOLD_S:
            continue
        now = promised_at(pod.message)
        if now is None or now > at:
            text = f"it was promised a start by {at:.0f}, no Event withdraws it: {pod.message}"
            yield history.about("S11", uid, text, RESUMED_S)


def let_in(ledger: RawLedger, history: History) -> Iterator[tuple[RawLease, RawClaim]]:
    """Yield the leases that are new on devices which are claimed, before and after.

    A lease that is restored has a version from before.
    """
    newest = max(history.lease_versions.values(), default=0.0)
    for claim in ledger.claims.values():
        if history.claims.get(claim.pod) != claim:
            continue
        marked = {
            uuid for uuid in claim.devices if (d := ledger.devices.get(uuid)) and d.is_claimed
        }
        for lease in ledger.leases.values():
            is_new = lease.pod not in history.lease_versions and lease.version > newest
            if is_new and lease.devices & marked:
                yield lease, claim


def s11_what_is_let_in_before_a_start_ends_in_time(
    sample: Sample, history: History
) -> Iterator[Finding]:
    """A lease on devices that are claimed ends before they are needed, by its own term."""
    if sample.ledger is None or history.redis_lost or history.is_clock_off(sample.at):
        return
    for lease, claim in let_in(sample.ledger, history):
        longest = lease.term.get("max_run_s")
        margins_s = lease.term.get("grace_s", GRACE_S) + MARGINS_S
        if longest is None or lease.created_at + longest + margins_s > claim.until:
            text = f"it is let onto {sorted(claim.devices)}, claimed for {claim.pod}, for too long"
            yield history.about("S11", lease.pod, text)


def p9_what_fits_starts_if_all_before_it_end(sample: Sample, history: History) -> Iterator[Finding]:
    """A pod that fits if no other runs starts once those before it must have ended.

    Each of them has a maximum run time, and in the worst case they run one after the other. What
    ResourceClaims get meanwhile does not end: a pod that no longer fits beside it is owed nothing.
    """
    pods = sample.pods or {}
    for uid, by in _owed(sample):
        history.owed.setdefault(uid, by)
    for uid, by in sorted(history.owed.items()):
        if uid not in pods or not waits(pods[uid]) or _is_taken_by_claims(pods[uid], sample):
            del history.owed[uid]
        elif by < sample.at:
            text = (
                f"all before it should have ended {sample.at - by:.0f} s ago: {pods[uid].message}"
            )
            yield history.about("P9", uid, text, RESUMED_S)


def _owed(sample: Sample) -> Iterator[tuple[str, float]]:
    """Yield pods that wait, and when all others must have ended, if all must end."""
    ledger = sample.ledger
    pods = [pod for pod in (sample.pods or {}).values() if not pod.ended]
    if ledger is None or not ledger.ready or sum(pod.max_run_s is None for pod in pods) > 1:
        return
    for pod in pods:
        simple = waits(pod) and not (pod.gang or pod.spread or pod.want.mig or pod.want.either)
        others = [other.max_run_s for other in pods if other is not pod]
        if simple and _fits_beside(pod, (), sample, ledger):
            longest_s = sum(
                duration + GRACE_S + MARGINS_S for duration in others if duration is not None
            )
            if None not in others:
                yield pod.uid, sample.at + longest_s + LATE_S


def _is_taken_by_claims(pod: SeenPod, sample: Sample) -> bool:
    """Whether a pod fits if no other runs, and does not beside the leases of ResourceClaims."""
    ledger = sample.ledger
    pods = sample.pods or {}
    if ledger is None or not ledger.ready:
        return False
    of_claims = [uid for uid in ledger.leases if uid in pods and pods[uid].of_claim]
    return _fits_beside(pod, (), sample, ledger) and not _fits_beside(
        pod, of_claims, sample, ledger
    )


def _fits_beside(pod: SeenPod, others: Iterable[str], sample: Sample, ledger: RawLedger) -> bool:
    """Whether a pod fits on a node if only some other leases last, and no device is claimed."""
    devices = {uuid: replace(raw, is_claimed=False) for uuid, raw in ledger.devices.items()}
    leases = {uid: ledger.leases[uid] for uid in others}
    left = replace(ledger, leases=leases, devices=devices)
    free = free_devices(replace(sample, pods={}), left)
    return any(fits_on(pod.want, free[node], sample) for node in free)

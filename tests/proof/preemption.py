"""Checks of preemption: which pods are evicted, and for which; pure."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from tests.proof.history import Finding, History
from tests.proof.liveness import fits_on, free_devices, resumed_s, waits
from tests.proof.observations import Sample, SeenPod

NOTICE_S = 2.0
"""Between the announcement of an eviction and the eviction."""
SERVED_S = 20.0
"""Notice, eviction, and the end of the evicted pods."""
SETTLED_S = 5.0
"""Younger pods may not be evicted yet."""


def m2_an_eviction_is_announced_and_for_a_higher_priority(
    sample: Sample, history: History
) -> Iterator[Finding]:
    """A pod is evicted after notice, only for one of higher priority, and not against its will."""
    for uid, at in sorted(sample.evicted.items()):
        pod = history.pods.get(uid)
        if pod is None or uid in history.judged_evictions:
            continue
        history.judged_evictions.add(uid)
        if text := _wrong(pod, at, sample, history):
            yield history.about("M2", uid, f"evicted although {text}")


def _wrong(pod: SeenPod, at: float, sample: Sample, history: History) -> str:
    """Return why the eviction of a pod is wrong, or nothing if it is right."""
    if pod.spared:
        return "its label or a PodDisruptionBudget forbids that"
    announced_after = history.announced_after.get(pod.uid)
    if announced_after is None:
        is_there = sample.pods is not None and pod.uid in sample.pods
        return "that was not announced" if is_there else ""
    if at - announced_after < NOTICE_S and not history.is_clock_off(at):
        return f"it was announced {at - announced_after:.1f} s before, at most"
    waiting = (
        other
        for uid, other in history.pods.items()
        if other.priority > pod.priority
        and not other.forged
        and history.first_seen[uid] <= at
        and history.last_seen[uid] >= announced_after
        and history.bound_at.get(uid, inf) >= announced_after
    )
    return "" if any(waiting) else "no pod of higher priority waited"


def m3_a_pod_of_higher_priority_is_served_by_evictions(
    sample: Sample, history: History
) -> Iterator[Finding]:
    """The only pod of high priority that waits gets room if evictable pods have it.

    A pod that was evicted before may be spared for long under the same name.
    """
    ledger = sample.ledger
    pods = sample.pods or {}
    urgent = [pod for pod in pods.values() if waits(pod) and pod.priority]
    if ledger is None or len(urgent) != 1 or urgent[0].gang or urgent[0].want.mig:
        return
    evicted = {history.pods[uid].name for uid in history.judged_evictions if uid in history.pods}
    evictable = {
        pod.uid
        for pod in pods.values()
        if pod.priority < urgent[0].priority
        and not (pod.spared or pod.gang or pod.resized or pod.forged or pod.name in evicted)
        and sample.at - history.bound_at.get(pod.uid, inf) > SETTLED_S
    }
    without = replace(
        ledger,
        leases={uid: lease for uid, lease in ledger.leases.items() if uid not in evictable},
        devices={uuid: replace(raw, is_claimed=False) for uuid, raw in ledger.devices.items()},
    )
    others = {uid: pod for uid, pod in pods.items() if uid not in evictable}
    free = free_devices(replace(sample, pods=others), without)
    node = next(
        (node for node in sorted(free) if fits_on(urgent[0].want, free[node], sample)), None
    )
    if node is not None:
        text = f"{urgent[0].want} would fit on {node} after evictions: {urgent[0].message}"
        since = history.quiet_since + resumed_s(history)
        yield history.about("M3", urgent[0].uid, text, SERVED_S, counts_from=since)

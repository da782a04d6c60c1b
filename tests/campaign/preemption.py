"""Checks of preemption: which pods are evicted, and for which; pure."""

from collections.abc import Iterator
from math import inf

from tests.campaign.history import History, Violation
from tests.campaign.observations import Sample, SeenPod
from tests.campaign.workload import NOTICE_S


def m2_an_eviction_is_announced_and_for_a_higher_priority(
    sample: Sample, history: History
) -> Iterator[Violation]:
    """A pod is evicted after notice, only for one of higher priority, and not against its will."""
    for uid, at in sorted(sample.evicted.items()):
        pod = history.pods.get(uid)
        if pod is None or uid in history.judged_evictions:
            continue
        history.judged_evictions.add(uid)
        if text := _wrong(pod, at, sample, history):
            yield Violation(
                check="M2",
                subject=f"pod {history.name(uid)}",
                text=f"evicted although {text}",
                at=sample.at,
                pods=frozenset({uid}),
                devices=frozenset(pod.devices),
            )


def _wrong(pod: SeenPod, at: float, sample: Sample, history: History) -> str:
    """Return why the eviction of a pod is wrong; empty: it is not."""
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

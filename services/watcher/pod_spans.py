"""The spans of a pod that no other service sees whole: its root, review, wait and start."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.model.names import PodUid
from shared.pods.observed_pod import ObservedPod
from shared.runtime.span_attributes import NAMESPACE, NODE, POD_NAME, POD_UID, REASON
from shared.runtime.telemetry import REVIEW, ROOT, Tracing

WHOLE = "start pod"
"""From its review, or else its creation, until its containers run."""
WAIT = "wait for capacity"
START = "start containers"
_MOST_REASONS = 20
_SKEW_NS = 60_000_000_000
"""A review further from the pod's creation is not believed."""


@dataclass(slots=True)
class _Start:
    """Times are in ns, 0 if the pod is not bound."""

    began: int
    bound: int = 0
    reasons: list[tuple[int, str]] = field(default_factory=list)


class PodSpans:
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._starting: dict[PodUid, _Start] = {}

    def observe(self, batch: Sequence[tuple[ObservedPod | None, ObservedPod | None]]) -> None:
        for now, before in batch:
            if now is not None and now.ours:
                start = self._starting.get(now.pod) or self._begin(now)
                if start is not None:
                    self._follow(now, start)
            elif before is not None and (start := self._starting.get(before.pod)):
                self._end(before, start, fault="it was deleted before its containers ran")

    def _begin(self, pod: ObservedPod) -> _Start | None:
        if pod.phase != "Pending":
            return None
        created = int(pod.created_at * 1e9) or time.time_ns()
        review = _review_of(pod, created)
        if review is not None:
            self._tracing.record(REVIEW, _facts(pod), *review, service="webhook")
        start = self._starting[pod.pod] = _Start(review[0] if review else created)
        # The same times from every watcher: creation is rounded down to seconds.
        self._tracing.record(
            ROOT, _facts(pod), start.began, max(created, review[1] if review else 0)
        )
        return start

    def _follow(self, pod: ObservedPod, start: _Start) -> None:
        now = time.time_ns()
        last_reason = start.reasons[-1][1] if start.reasons else ""
        if pod.reason not in ("", last_reason) and len(start.reasons) < _MOST_REASONS:
            start.reasons.append((now, pod.reason))
        if pod.node and not start.bound:
            start.bound = now
            if start.reasons:
                since = start.reasons[0][0]
                facts = _facts(pod) | {REASON: start.reasons[-1][1]}
                self._tracing.record(WAIT, facts, since, now, notes=start.reasons)
        if pod.phase == "Failed":
            self._end(pod, start, fault=pod.rejection or "it failed before its containers ran")
        elif pod.phase != "Pending":
            self._tracing.record(START, _facts(pod), start.bound or now, now)
            self._end(pod, start)

    def _end(self, pod: ObservedPod, start: _Start, *, fault: str = "") -> None:
        del self._starting[pod.pod]
        self._tracing.record(WHOLE, _facts(pod), start.began, time.time_ns(), fault=fault)


def _review_of(pod: ObservedPod, created: int) -> tuple[int, int] | None:
    began, _, ended = pod.reviewed.partition("-")
    if not (began.isdecimal() and ended.isdecimal() and len(pod.reviewed) < 50):
        return None
    times = int(began), int(ended)
    is_near = all(abs(time_ns - created) < _SKEW_NS for time_ns in times)
    return times if is_near and times[0] <= times[1] else None


def _facts(pod: ObservedPod) -> dict[str, str]:
    facts = {POD_UID: pod.pod, NAMESPACE: pod.namespace, POD_NAME: pod.name}
    return facts | ({NODE: pod.node} if pod.node else {})

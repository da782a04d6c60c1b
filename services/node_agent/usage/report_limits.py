"""How many violations become Events; pure."""

from collections import Counter
from collections.abc import Iterable

from shared.model.events.node_events import ViolationFound
from shared.model.names import Namespace, PodUid

WINDOW_S = 300.0
"""Time over which the reports about one pod are counted."""
MOST_OF_POD = 8
MOST_AT_ONCE = 10
"""Binders look up 32 pods without a lease of a node within 10 s, in which there can be three
scans."""


class ReportLimits:
    """Namespaces take turns."""

    def __init__(self) -> None:
        self._reports: dict[PodUid, tuple[float, int]] = {}

    def admit(self, due: Iterable[ViolationFound], now: float) -> list[ViolationFound]:
        self._reports = {
            pod: (began, count)
            for pod, (began, count) in self._reports.items()
            if now - began < WINDOW_S
        }
        turns = Counter[Namespace]()
        queue: list[tuple[int, ViolationFound]] = []
        for violation in due:
            queue.append((turns[violation.namespace], violation))
            turns[violation.namespace] += 1
        queue.sort(key=lambda entry: entry[0])
        admitted: list[ViolationFound] = []
        for _, violation in queue:
            began, count = self._reports.get(violation.pod, (now, 0))
            if len(admitted) < MOST_AT_ONCE and count < MOST_OF_POD:
                self._reports[violation.pod] = (began, count + 1)
                admitted.append(violation)
        return admitted

"""The amounts of the last hour, and the pods that finished within a day, in memory."""

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan

from msgspec import structs

from services.api.reports.history import (
    ALL_CORES,
    AMOUNTS,
    CLUSTER,
    COLUMNS,
    DEVICE,
    HARDWARE,
    KINDS,
    NAMESPACE,
    POD,
    RANGES,
    UNUSED,
    WAITING,
    HistoryRange,
    RecordedValues,
    Sample,
    Subject,
    Values,
)
from shared.model.names import PodUid
from shared.model.quantity import DAY_S, HOUR_S
from shared.model.views.pods import FinishedPod

MEANS = (*AMOUNTS, UNUSED)
MOST_SERIES = 20_000
"""Of each kind, and finished pods. An hour of as many pods takes about 50 MB."""


@dataclass(slots=True)
class _Means:
    sums: list[float] = field(default_factory=lambda: [0.0] * len(MEANS))
    numbers: list[int] = field(default_factory=lambda: [0] * len(MEANS))

    def add(self, values: Values) -> None:
        for column, value in enumerate(values):
            if value is not None:
                self.sums[column] += value
                self.numbers[column] += 1

    def of(self, name: str) -> float | None:
        column = MEANS.index(name)
        number = self.numbers[column]
        return self.sums[column] / number if number else None


class _Kind:
    """Each subject has an array with a row for each instant."""

    def __init__(self, kind: str) -> None:
        self.columns = COLUMNS.get(kind, AMOUNTS)
        self.series: dict[str, array[float]] = {}
        self.seen: dict[str, float] = {}
        # A namespace that a sample lacks holds nothing, and no pod waits for such a reason; of
        # other subjects nothing is known then.
        self.absent = [0.0 if kind in {NAMESPACE, WAITING} else nan] * len(self.columns)

    def add(self, sample: Mapping[str, Values], now: float, rows: int) -> None:
        """New subjects have had no values for `rows` instants."""
        for name in sample.keys() - self.series.keys():
            if len(self.series) < MOST_SERIES:
                self.series[name] = array("f", [nan] * len(self.columns) * rows)
        for name, values in self.series.items():
            row: Sequence[float] = self.absent
            if name in sample:
                self.seen[name] = now
                row = [nan if value is None else value for value in sample[name]]
            values.extend(row)

    def forget(self, rows: int, before: float) -> None:
        for name in [name for name, at in self.seen.items() if at <= before]:
            del self.seen[name]
            del self.series[name]
        if rows:
            for values in self.series.values():
                del values[: rows * len(self.columns)]

    def read(self, name: str, rows: slice) -> dict[str, Values]:
        values = self.series.get(name)
        if values is None:
            return {}
        width = len(self.columns)
        return {
            column: [None if isnan(value) else round(value, 1) for value in values[at::width][rows]]
            for at, column in enumerate(self.columns)
        }


class RecentHistory:
    """Begins when the process starts."""

    name = "memory"
    longest = RANGES[0]

    def __init__(self) -> None:
        self._at: deque[float] = deque()
        self._kinds = {kind: _Kind(kind) for kind in KINDS}
        self._means: dict[PodUid, _Means] = {}
        self._finished: dict[PodUid, FinishedPod] = {}

    def add(self, sample: Sample, now: float) -> None:
        for kind, recorded in self._kinds.items():
            recorded.add(sample.get(kind, {}), now, len(self._at))
        self._at.append(now)
        before = now - self.longest.span_s
        outdated = sum(at <= before for at in self._at)
        for recorded in self._kinds.values():
            recorded.forget(outdated, before)
        for _ in range(outdated):
            self._at.popleft()
        pods = self._kinds[POD].series
        self._means = {pod: means for pod, means in self._means.items() if pod in pods}
        unused = sample.get(UNUSED, {})
        for name, values in sample.get(POD, {}).items():
            if name in pods:
                means = self._means.setdefault(PodUid(name), _Means())
                means.add((*values, *unused.get(name, (None,))))

    async def read(self, subject: Subject, within: HistoryRange, now: float) -> RecordedValues:
        begin = sum(at <= now - within.span_s for at in self._at)
        rows = slice(begin, sum(at <= now for at in self._at))
        columns = self._kinds[subject.kind].read(subject.name, rows)
        if subject.kind == DEVICE:
            columns |= self._kinds[HARDWARE].read(subject.name, rows)
        waiting: dict[str, Values] = {}
        if subject.kind == CLUSTER:
            reasons = self._kinds[WAITING]
            waiting = {name: reasons.read(name, rows)["pods"] for name in reasons.series}
        return RecordedValues(at=list(self._at)[rows], columns=columns, waiting=waiting)

    def add_finished(self, pods: Sequence[FinishedPod], now: float) -> None:
        for pod in pods:
            self._finished[pod.pod] = _with_usage(pod, self._means.pop(pod.pod, _Means()))
        newest = sorted(self._finished.values(), key=lambda pod: pod.ended, reverse=True)
        self._finished = {pod.pod: pod for pod in newest[:MOST_SERIES] if pod.ended > now - DAY_S}

    def finished(self, now: float) -> list[FinishedPod]:
        return [pod for pod in self._finished.values() if pod.ended > now - DAY_S]

    def finished_pod(self, pod: PodUid, now: float) -> FinishedPod | None:
        finished = self._finished.get(pod)
        return finished if finished is not None and finished.ended > now - DAY_S else None


def _with_usage(pod: FinishedPod, means: _Means) -> FinishedPod:
    memory = means.of("used_memory")
    cores = means.of("used_cores")
    unused = means.of(UNUSED)
    hours = (pod.ended - pod.started) / HOUR_S
    return structs.replace(
        pod,
        used_memory_mib=None if memory is None else round(memory),
        used_cores_percent=None if cores is None else round(cores),
        idle_gpu_hours=None if unused is None else round(unused / ALL_CORES * hours, 4),
    )

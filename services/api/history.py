"""Leased and measured amounts of the last day, per device and namespace, in memory; pure.

Every `INTERVAL_S` one sample of everything is stored, so that 5,000 devices take 15 MB. Nothing
survives a restart, and each replica has its own samples.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from shared.model.budget import UNITS_PER_GPU_MINUTE, Account, BudgetWindow, ChargeEntry
from shared.model.names import DeviceUuid, Namespace
from shared.model.views import BudgetHistory, BudgetPoint, DeviceView, NamespaceView

INTERVAL_S = 120.0
SAMPLES = 720
"""A day of them."""
MOST_ABSENT = 1024
"""Names without an amount now, of which samples are kept: a node agent can report others again and
again."""
BUDGET_POINTS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """Amounts at one instant. Devices: percent; namespaces: MiB, and percent of one device."""

    memory: int
    cores: int
    used_memory: int | None = None
    """Measured; None: not measured."""
    used_cores: int | None = None


class Samples:
    """The points of many names at the same instants. A typecode of `array` holds the amounts."""

    def __init__(self, typecode: str) -> None:
        self.times: deque[float] = deque(maxlen=SAMPLES)
        self._empty = array(typecode)
        self._unknown = (1 << 8 * self._empty.itemsize) - 1
        self._points: dict[str, array[int]] = {}
        self._latest: dict[str, int] = {}
        """Of each name, the number of its latest sample: names without any are removed."""
        self._number = 0

    def add(self, points: Mapping[str, HistoryPoint], now: float) -> None:
        """Add one sample; names that it lacks have no amounts at this instant."""
        self._number += 1
        unknown, missing = self._unknown, len(self.times)
        self.times.append(now)
        for name in points.keys() - self._points.keys():
            self._points[name] = self._empty + array(
                self._empty.typecode, [unknown] * min(missing, SAMPLES - 1) * 4
            )
        for name, stored in self._points.items():
            point = points.get(name)
            if point is not None:
                self._latest[name] = self._number
            stored.extend([unknown] * 4 if point is None else self._encode(point))
            del stored[: -SAMPLES * 4]
        absent = sorted(self._points.keys() - points.keys(), key=self._latest.__getitem__)
        old = [one for one in absent if self._number - self._latest[one] >= SAMPLES]
        for name in {*old, *absent[:-MOST_ABSENT]}:
            del self._points[name], self._latest[name]

    def _encode(self, point: HistoryPoint) -> list[int]:
        amounts = (point.memory, point.cores, point.used_memory, point.used_cores)
        return [
            self._unknown if amount is None else min(max(amount, 0), self._unknown - 1)
            for amount in amounts
        ]

    def of(self, name: str) -> list[HistoryPoint | None]:
        """Return the points of a name at all times; None: it did not exist."""
        stored = [
            None if amount == self._unknown else amount for amount in self._points.get(name, ())
        ]
        return [
            None
            if memory is None or cores is None
            else HistoryPoint(
                memory=memory, cores=cores, used_memory=used_memory, used_cores=used_cores
            )
            for memory, cores, used_memory, used_cores in zip(*[iter(stored)] * 4, strict=True)
        ] or [None] * len(self.times)


class UsageHistory:
    """The samples of devices and of namespaces."""

    def __init__(self) -> None:
        self.devices = Samples("B")
        self.namespaces = Samples("I")

    def sample(
        self, devices: Iterable[DeviceView], namespaces: Iterable[NamespaceView], now: float
    ) -> None:
        """Add a sample of everything."""
        views = list(devices)
        used = measured_by_namespace(views)
        self.devices.add({view.uuid: device_point(view) for view in views}, now)
        self.namespaces.add(
            {view.namespace: namespace_point(view, used) for view in namespaces}, now
        )


def device_point(view: DeviceView) -> HistoryPoint:
    """Return the amounts of a device now, percent of it."""
    whole = max(view.memory_mib, 1)
    memory = [m.memory_mib for s in view.shares if (m := s.measured) and m.memory_mib is not None]
    cores = [
        m.cores_percent for s in view.shares if (m := s.measured) and m.cores_percent is not None
    ]
    return HistoryPoint(
        memory=round(100 * view.used_memory_mib / whole),
        cores=view.used_cores_percent,
        used_memory=round(100 * sum(memory) / whole) if memory else None,
        used_cores=sum(cores) if cores else None,
    )


Measured = Mapping[Namespace, tuple[int, int]]
"""MiB, and percent of one device, by namespace."""


def measured_by_namespace(devices: Iterable[DeviceView]) -> Measured:
    """Add up what the shares of namespaces are measured to use."""
    found: dict[Namespace, tuple[int, int]] = {}
    for share in chain.from_iterable(view.shares for view in devices):
        if share.measured is not None:
            memory, cores = found.get(share.namespace, (0, 0))
            found[share.namespace] = (
                memory + (share.measured.memory_mib or 0),
                cores + (share.measured.cores_percent or 0),
            )
    return found


def namespace_point(view: NamespaceView, used: Measured) -> HistoryPoint:
    """Return the amounts of a namespace now, MiB and percent of one device."""
    memory, cores = used.get(view.namespace, (None, None))
    return HistoryPoint(
        memory=view.memory_mib, cores=view.cores_percent, used_memory=memory, used_cores=cores
    )


def history_of(
    samples: Samples, name: DeviceUuid | Namespace, current: HistoryPoint, now: float
) -> list[tuple[float, HistoryPoint | None]]:
    """Return the samples of a name, and its amounts now, from its first sample on."""
    points = [*zip(samples.times, samples.of(name), strict=True), (now, current)]
    first = next(number for number, (_, point) in enumerate(points) if point is not None)
    return points[first:]


def budget_history(
    account: Account, window: BudgetWindow, entries: Iterable[ChargeEntry], *, at_ms: int
) -> BudgetHistory:
    """Return the GPU-minutes used in a window, at up to `BUDGET_POINTS` instants until `at_ms`.

    A charge counts at the end of its interval; at the last instant, what is not charged yet counts
    as well, as in the balance that the timekeeper reports.
    """
    charges = sorted(
        (max(entry.to_ms, window.start_ms), entry.units)
        for entry in entries
        if entry.kind == "charge" and entry.window == window.id
    )
    span_ms = max(at_ms - window.start_ms, 1)
    instants = [
        window.start_ms + span_ms * number // BUDGET_POINTS for number in range(BUDGET_POINTS + 1)
    ]
    used = _running_sum(charges, instants)
    used[-1] = window.used_units + sum(
        lease.weight * max(0, min(at_ms, lease.ended_ms or at_ms) - lease.charged_ms)
        for lease in account.leases
    )
    allowed = window.allowed_units
    return BudgetHistory(
        window=window.id,
        start=window.start_ms / 1000,
        end=None if window.end_ms is None else window.end_ms / 1000,
        limit_minutes=None if allowed is None else allowed / UNITS_PER_GPU_MINUTE,
        points=tuple(
            BudgetPoint(at=instant / 1000, minutes=units / UNITS_PER_GPU_MINUTE)
            for instant, units in zip(instants, used, strict=True)
        ),
    )


def _running_sum(charges: Sequence[tuple[int, int]], instants: Iterable[int]) -> list[int]:
    sums: list[int] = []
    used = taken = 0
    for instant in instants:
        while taken < len(charges) and charges[taken][0] <= instant:
            used += charges[taken][1]
            taken += 1
        sums.append(used)
    return sums

"""Amounts over time, in MiB and percent of one device; pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil

from services.api.projection.lease_views import by_pod, is_idle, unused_milli_gpu
from services.api.projection.page_views import BudgetHistory, BudgetPoint, Column
from shared.model.budgets.budget import UNITS_PER_GPU_MINUTE, Account, BudgetWindow, ChargeEntry
from shared.model.budgets.weights import milli_gpu_of
from shared.model.devices.device import Hardware
from shared.model.errors import RequestError
from shared.model.names import DeviceUuid
from shared.model.quantity import DAY_S, peak
from shared.model.views.gpus import DeviceView, HeldShare

BUDGET_POINTS = 60
CLUSTER = "cluster"
NODE = "node"
DEVICE = "device"
POD = "pod"
NAMESPACE = "namespace"
WAITING = "waiting"
HARDWARE = "hardware"
UNUSED = "unused"
"""Of pods, in percent of one device: what costs count as idle, also before it is marked so."""
KINDS = (CLUSTER, NODE, DEVICE, POD, NAMESPACE, WAITING, HARDWARE)
AMOUNTS = ("memory", "cores", "used_memory", "used_cores", "idle")
MEASURED = frozenset({"used_memory", "used_cores", "idle"})
COLUMNS: Mapping[str, tuple[str, ...]] = {
    WAITING: ("pods",),
    HARDWARE: ("temperature", "power", "clock", "busy"),
}
ALL_CORES = 100
GAP = 2.5
"""More steps between two points are a gap."""

Values = Sequence[float | None]
Sample = Mapping[str, Mapping[str, Values]]
"""By kind and name, a value for each column."""


@dataclass(frozen=True, slots=True)
class HistoryRange:
    name: str
    span_s: float
    step_s: float


RANGES = (
    HistoryRange("1h", 3600.0, 30.0),
    HistoryRange("1d", 86_400.0, 600.0),
    HistoryRange("7d", 604_800.0, 3600.0),
)


PERIOD = "period"
PERIOD_POINTS = 150
LONGEST_PERIOD_S = 400 * DAY_S
"""The longest period that a viewer may ask for, so that a query has a bound."""


def range_of(name: str) -> HistoryRange:
    """Return a day for an empty name. Raises RequestError."""
    chosen = next(
        (recorded_range for recorded_range in RANGES if recorded_range.name == (name or "1d")), None
    )
    if chosen is None:
        names = ", ".join(recorded_range.name for recorded_range in RANGES)
        raise RequestError(f"range={name} is not one of {names}")
    return chosen


def period_of(start: float, end: float) -> HistoryRange:
    """Return a range of about 150 points. Raises RequestError."""
    span_s = end - start
    if not 0 < span_s <= LONGEST_PERIOD_S:
        raise RequestError("from must be before to and before now, by 400 days at most")
    step_s = max(RANGES[0].step_s, ceil(span_s / PERIOD_POINTS))
    return HistoryRange(PERIOD, span_s, step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    kind: str
    name: str = ""
    """UUID, UID, or name."""
    devices: tuple[DeviceUuid, ...] = ()
    namespace: str = ""
    pod: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedValues:
    """Oldest first."""

    at: Sequence[float]
    columns: Mapping[str, Values]
    waiting: Mapping[str, Values]
    """By reason."""


def sample_of(
    devices: Iterable[DeviceView],
    reasons: Iterable[str],
    hardware: Mapping[DeviceUuid, Hardware],
) -> Sample:
    kinds = (NODE, DEVICE, POD, NAMESPACE, UNUSED)
    by_kind: dict[str, dict[str, _Amounts]] = {kind: {} for kind in kinds}
    cluster = _all()
    for view in devices:
        amounts = _all(None if view.shares else 0)
        for shares in by_pod(view.shares):
            held = _amounts_of(shares)
            _add(amounts, held)
            if pod := shares[0].pod:
                _add(by_kind[POD].setdefault(pod, _all()), held)
                unused = unused_milli_gpu(shares)
                percent = None if unused is None else unused * ALL_CORES / 1000
                _add(by_kind[UNUSED].setdefault(pod, [None]), (percent,))
                _add(by_kind[NAMESPACE].setdefault(shares[0].namespace, _all()), held)
        amounts[:2] = view.used_memory_mib, view.used_cores_percent
        by_kind[DEVICE][view.uuid] = amounts
        _add(by_kind[NODE].setdefault(view.node, _all()), amounts)
        _add(cluster, amounts)
    return {
        **by_kind,
        CLUSTER: {"": cluster},
        WAITING: {reason: (count,) for reason, count in Counter(reasons).items()},
        HARDWARE: {
            uuid: (
                sensors.temperature_c,
                sensors.power_w,
                sensors.sm_clock_mhz,
                sensors.busy_percent,
            )
            for uuid, sensors in hardware.items()
        },
    }


_Amounts = list[float | None]


def _all(value: float | None = None) -> _Amounts:
    return [value] * len(AMOUNTS)


def _amounts_of(shares: Sequence[HeldShare]) -> _Amounts:
    total = _all()
    for share in shares:
        if not share.init and (measured := share.measured):
            _add(total, (None, None, measured.memory_mib, measured.cores_percent, 0.0))
    total[0] = peak(((share.memory_mib, share.init) for share in shares), 0)
    total[1] = peak(((share.booked_cores, share.init) for share in shares), 0)
    if is_idle(shares):
        total[AMOUNTS.index("idle")] = milli_gpu_of(shares) * ALL_CORES / 1000
    return total


def _add(total: _Amounts, more: Values) -> None:
    for place, value in enumerate(more):
        if value is not None:
            total[place] = value + (total[place] or 0)


def history_columns(
    recorded: RecordedValues, within: HistoryRange
) -> tuple[tuple[float, ...], dict[str, Column], dict[str, Column]]:
    """Return the instants, the columns and the waiting pods, from the first known value on.

    Where points are missing, there is one without values.
    """
    columns = {name: recorded.columns.get(name, ()) for name in AMOUNTS} | dict(recorded.columns)
    has_values = [any(value is not None for value in row) for row in zip_longest(*columns.values())]
    first = has_values.index(True) if True in has_values else len(recorded.at)
    at: list[float] = []
    places: list[int | None] = []
    for place, instant in enumerate(recorded.at[first:], start=first):
        if at and instant - at[-1] > GAP * within.step_s:
            at.append(at[-1] + within.step_s)
            places.append(None)
        at.append(instant)
        places.append(place)

    def shown(values: Values, absent: float | None = None) -> Column:
        """Replace unknown values by `absent` where others are known."""
        return tuple(
            None
            if place is None or not values
            else absent
            if values[place] is None
            else values[place]
            for place in places
        )

    return (
        tuple(at),
        {name: shown(values) for name, values in columns.items()},
        {reason: shown(values, 0.0) for reason, values in recorded.waiting.items()},
    )


def budget_history(
    account: Account, window: BudgetWindow, entries: Iterable[ChargeEntry], *, at_ms: int
) -> BudgetHistory:
    """Return the GPU-minutes used in a window, at up to `BUDGET_POINTS` instants until `at_ms`.

    A charge counts at the end of its interval; what is not charged yet counts at the last instant.
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
    used = 0
    taken = 0
    for instant in instants:
        while taken < len(charges) and charges[taken][0] <= instant:
            used += charges[taken][1]
            taken += 1
        sums.append(used)
    return sums

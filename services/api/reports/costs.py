"""Reports of costs: recorded amounts, times the prices of a file; also in OpenCost's form."""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from itertools import pairwise
from typing import Any

import msgspec

from services.api.api_call import ApiCall
from shared.credentials.authorization import Viewer
from shared.kubernetes.kinds.gpu_prices import PriceFile, Prices
from shared.ledger.budgets import Budgets
from shared.model.budgets.budget import HOUR_MS
from shared.model.budgets.cost_records import (
    FREE,
    UNITS_PER_GPU_HOUR,
    USES,
    CostHour,
    CostLine,
    CostView,
    add_up,
    hours_of,
)
from shared.model.errors import RequestError
from shared.model.names import Namespace

DAY_MS = 24 * HOUR_MS
MOST_DAYS = 400
MOST_PERIODS = 1000
STEPS_MS = {"": 1 << 50, "hour": HOUR_MS, "day": DAY_MS}
"""Lengths of periods; without a name, one period."""
OTHERS = Namespace("(others)")
"""Namespaces that the viewer may not see."""
UNALLOCATED = "__idle__"
ALLOCATION = {
    "window": "today, lastmonth, 7d, or two times with a comma, as for OpenCost",
    "step": "the length of periods; an hour at least",
    "aggregate": "namespace",
    "includeIdle": "true: and what was free",
}
NOT_OF_GPUS = (
    "cpuCores cpuCoreRequestAverage cpuCoreUsageAverage cpuCoreHours cpuCost cpuCostAdjustment "
    "cpuEfficiency gpuCostAdjustment networkTransferBytes networkReceiveBytes networkCost "
    "networkCrossZoneCost networkCrossRegionCost networkInternetCost networkCostAdjustment "
    "loadBalancerCost loadBalancerCostAdjustment pvBytes pvByteHours pvCost pvCostAdjustment "
    "ramBytes ramByteRequestAverage ramByteUsageAverage ramByteHours ramCost ramCostAdjustment "
    "ramEfficiency sharedCost externalCost"
)
"""All 0: OpenCost's exporter fails where one is missing."""
_LENGTH = re.compile(r"([1-9][0-9]{0,4})([mhd])")
_UNITS_MS = {"m": 60_000, "h": HOUR_MS, "d": DAY_MS}


class AllocationReply(msgspec.Struct, frozen=True, kw_only=True):
    """Allocations by name, for each step of the window. They have costs of GPUs only."""

    code: int = 200
    data: tuple[dict[str, dict[str, Any]], ...]


async def cost_report(call: ApiCall, budgets: Budgets, prices: PriceFile) -> CostView:
    step = call.query.get("step", "")
    if step not in STEPS_MS:
        raise RequestError(f"step={step} is not hour or day")
    return await _report(call.viewer, budgets, prices, call.period_ms(), STEPS_MS[step])


async def allocation_report(
    call: ApiCall, budgets: Budgets, prices: PriceFile, now: float
) -> AllocationReply:
    query = call.query
    if query.get("aggregate", "namespace") != "namespace":
        raise RequestError(f"aggregate={query['aggregate']} is not namespace")
    step_ms = length_ms(query["step"], "step") if query.get("step") else STEPS_MS[""]
    window = window_ms(query.get("window", ""), now)
    view = await _report(call.viewer, budgets, prices, window, max(step_ms, HOUR_MS))
    return allocations(view, with_idle=query.get("includeIdle") == "true")


async def _report(
    viewer: Viewer,
    budgets: Budgets,
    prices: PriceFile,
    period_ms: tuple[int | None, int | None],
    step_ms: int,
) -> CostView:
    from_ms, to_ms = period_ms
    recorded_ms = (await budgets.costs(0, 0)).at_ms
    end = min(recorded_ms if to_ms is None else to_ms, recorded_ms)
    earliest = max(end - 30 * DAY_MS if from_ms is None else from_ms, end - MOST_DAYS * DAY_MS)
    hours = (await budgets.costs(earliest, end)).hours
    if from_ms is None:
        earliest = max(earliest, min((hour.from_ms for hour in hours.values()), default=0))
    begin = min(earliest, end)
    starts = range(begin - begin % step_ms + step_ms, end, step_ms)
    if len(starts) >= MOST_PERIODS:
        raise RequestError(
            f"{len(starts)} periods are more than {MOST_PERIODS}: ask for a shorter time, or "
            "for longer steps"
        )
    names = {name for hour in hours.values() for name in hour.sums} - {FREE}
    seen = await viewer.visible(names)
    visible = {FREE, *(names if seen is None else seen)}
    return await asyncio.to_thread(
        cost_view,
        hours,
        prices,
        pairwise([begin, *starts, end]),
        lambda name: name if name in visible else OTHERS,
    )


def cost_view(
    hours: Mapping[int, CostHour],
    prices: PriceFile,
    periods: Iterable[tuple[int, int]],
    shown: Callable[[Namespace], Namespace],
) -> CostView:
    rates, periods = prices.read(), tuple(periods)
    begin, end = periods[0][0], periods[-1][1]
    _, capacity, recorded = add_up(hours.values(), begin, end)
    return CostView(
        start=begin / 1000,
        end=end / 1000,
        recorded_s=float(recorded / 1000),
        currency=rates.currency,
        problem=prices.problem,
        capacity_units={model: str(round(units)) for model, units in sorted(capacity.items())},
        lines=tuple(line for period in periods for line in _lines(hours, rates, *period, shown)),
    )


def _lines(
    hours: Mapping[int, CostHour],
    prices: Prices,
    from_ms: int,
    to_ms: int,
    shown: Callable[[Namespace], Namespace],
) -> Iterator[CostLine]:
    inside = [hours[start] for start in hours_of(from_ms, to_ms) if start in hours]
    sums, _, _ = add_up(inside, from_ms, to_ms, shown=shown)
    for (name, model), amounts in sorted(sums.items()):
        price = prices.of(model)
        for use, units in zip(USES, amounts, strict=True):
            if units:
                gpu_hours = Fraction(units) / UNITS_PER_GPU_HOUR
                yield CostLine(
                    start=from_ms / 1000,
                    end=to_ms / 1000,
                    namespace=name,
                    model=model,
                    use=use,
                    gpu_hours=_decimal(gpu_hours),
                    units=str(round(units)),
                    price=None if price is None else _decimal(price),
                    cost=None if price is None else _decimal(gpu_hours * price),
                )


def _decimal(value: Fraction) -> str:
    micro = round(value * 10**6)
    return f"{micro // 10**6}.{micro % 10**6:06d}"


def allocations(view: CostView, *, with_idle: bool) -> AllocationReply:
    steps: dict[float, dict[str, list[CostLine]]] = {}
    for line in view.lines:
        by_name = steps.setdefault(line.start, {})
        if with_idle or line.namespace != FREE:
            by_name.setdefault(line.namespace or UNALLOCATED, []).append(line)
    return AllocationReply(
        data=tuple(
            {name: _allocation(name, lines) for name, lines in by_name.items()}
            for by_name in steps.values()
        )
    )


def _allocation(name: str, lines: list[CostLine]) -> dict[str, Any]:
    begin, end = lines[0].start, lines[0].end
    start, stop = (f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}" for at in (begin, end))
    hours = sum(int(line.units) for line in lines) / UNITS_PER_GPU_HOUR
    used = sum(int(line.units) for line in lines if line.use == USES[0]) / UNITS_PER_GPU_HOUR
    cost = round(sum(float(line.cost or 0) for line in lines), 6)
    efficiency = round(used / hours, 6) if hours else 0
    return {
        "name": name,
        "properties": {} if name == UNALLOCATED else {"namespace": name},
        "window": {"start": start, "end": stop},
        "start": start,
        "end": stop,
        "minutes": (end - begin) / 60,
        **dict.fromkeys(NOT_OF_GPUS.split(), 0),
        "gpuCount": round(hours * 3600 / (end - begin), 6),
        "gpuHours": round(hours, 6),
        "gpuCost": cost,
        "gpuEfficiency": efficiency,
        "totalCost": cost,
        "totalEfficiency": efficiency,
    }


def length_ms(text: str, name: str) -> int:
    """Parse a length such as `12h`. Raises RequestError."""
    match = _LENGTH.fullmatch(text)
    if match is None:
        raise RequestError(f"{name}={text} is not a length such as 30m, 12h or 7d")
    return int(match[1]) * _UNITS_MS[match[2]]


def window_ms(text: str, now: float) -> tuple[int, int]:
    """Parse a word, a length until now, or two instants, RFC 3339."""
    today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    week = today - timedelta(days=(today.weekday() + 1) % 7)
    month = today.replace(day=1)
    later = today + timedelta(days=1)
    words = {
        "today": (today, later),
        "yesterday": (today - timedelta(days=1), today),
        "week": (week, later),
        "lastweek": (week - timedelta(days=7), week),
        "month": (month, later),
        "lastmonth": ((month - timedelta(days=1)).replace(day=1), month),
    }
    if text not in words and "," not in text:
        return round(now * 1000) - length_ms(text, "window"), round(now * 1000)
    try:
        begin, end = words.get(text) or map(datetime.fromisoformat, text.split(","))
        return round(begin.timestamp() * 1000), round(end.timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise RequestError(f"window={text} is not two times with a comma, RFC 3339") from error

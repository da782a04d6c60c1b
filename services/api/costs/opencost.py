"""Costs in the form of OpenCost's API: the sets of /allocation, and its windows; pure."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from shared.model.budget import HOUR_MS
from shared.model.costs.cost_records import FREE, UNITS_PER_GPU_HOUR, USES, CostLine, CostView
from shared.model.errors import RequestError

IDLE = "__idle__"
"""The name of what is not allocated."""
NO_COSTS = "cpu ram pv network loadBalancer shared external"
_LENGTH = re.compile(r"([1-9][0-9]{0,4})([mhd])")
_UNITS_MS = {"m": 60_000, "h": HOUR_MS, "d": 24 * HOUR_MS}


class AllocationReply(msgspec.Struct, frozen=True, kw_only=True):
    """Allocations by name, for each step of the window. They have costs of GPUs only."""

    code: int = 200
    data: tuple[dict[str, dict[str, Any]], ...]


def allocations(view: CostView, *, with_idle: bool) -> AllocationReply:
    """Return the namespaces of a report as allocations; `with_idle`: and what was free."""
    steps: dict[float, dict[str, list[CostLine]]] = {}
    for line in view.lines:
        by_name = steps.setdefault(line.start, {})
        if with_idle or line.namespace != FREE:
            by_name.setdefault(line.namespace or IDLE, []).append(line)
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
        "properties": {} if name == IDLE else {"namespace": name},
        "window": {"start": start, "end": stop},
        "start": start,
        "end": stop,
        "minutes": (end - begin) / 60,
        **{f"{resource}Cost": 0 for resource in NO_COSTS.split()},
        "gpuCount": round(hours * 3600 / (end - begin), 6),
        "gpuHours": round(hours, 6),
        "gpuCost": cost,
        "gpuEfficiency": efficiency,
        "totalCost": cost,
        "totalEfficiency": efficiency,
    }


def length_ms(text: str, name: str) -> int:
    """Parse a length such as `12h`. Raises RequestError for other texts."""
    found = _LENGTH.fullmatch(text)
    if found is None:
        raise RequestError(f"{name}={text} is not a length such as 30m, 12h or 7d")
    return int(found[1]) * _UNITS_MS[found[2]]


def window_ms(text: str, now: float) -> tuple[int, int]:
    """Parse a window: a word, a length until now, or two instants, RFC 3339."""
    today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    week, month = today - timedelta(days=(today.weekday() + 1) % 7), today.replace(day=1)
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

"""Printer columns: the columns of the tables that `kubectl get` shows; pure."""

from collections.abc import Callable
from dataclasses import dataclass

from simcluster.apimachinery.objects import Json, JsonValue, metadata, name_of, parse_time

UNKNOWN = "<unknown>"


@dataclass(frozen=True, slots=True)
class Column:
    """One column; `kubectl get` shows it with `-o wide` only if its priority is above 0."""

    name: str
    cell: Callable[[Json, float], JsonValue]
    priority: int = 0
    type: str = "string"
    format: str = ""


def format_age(since: object, now: float) -> str:
    """Format the time since an instant, in at most two units."""
    try:
        return format_duration(max(now - parse_time(str(since)), 0))
    except ValueError:
        return UNKNOWN


def format_duration(seconds: float) -> str:
    """Format a duration as kubectl does."""
    total = int(seconds)
    minutes = total // 60
    hours = total // 3600
    days = total // 86400
    steps = (
        (total < 120, f"{total}s"),
        (minutes < 10, _two_units(minutes, "m", total % 60, "s")),
        (minutes < 180, f"{minutes}m"),
        (hours < 8, _two_units(hours, "h", minutes % 60, "m")),
        (hours < 48, f"{hours}h"),
        (days < 8, _two_units(days, "d", hours % 24, "h")),
        (days < 730, f"{days}d"),
    )
    return next((text for fits, text in steps if fits), f"{days // 365}y{days % 365}d")


def _two_units(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large}{large_unit}{small}{small_unit}" if small else f"{large}{large_unit}"


def _created(obj: Json, now: float) -> str:
    return format_age(metadata(obj).get("creationTimestamp"), now)


NAME = Column("Name", lambda obj, _now: name_of(obj), format="name")
AGE = Column("Age", _created)
DEFAULT_COLUMNS = (NAME, AGE)

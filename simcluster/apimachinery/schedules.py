"""Schedules of CronJobs: the five fields of cron; pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Self

_MACROS = {
    "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *", "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0", "@daily": "0 0 * * *", "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}  # fmt: skip
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_BOUNDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_MINUTE = timedelta(minutes=1)
_HORIZON = timedelta(days=4 * 366)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The minutes, hours, days, months and weekdays of a schedule."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either_day: bool
    """Whether a day of the month or of the week is enough: both are restricted."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a schedule; ValueError with the reason if it is malformed."""
        fields = _MACROS.get(text.strip(), text).lower().split()
        if len(fields) != len(_BOUNDS):
            raise ValueError(f"expected exactly 5 fields, found {len(fields)}: {fields}")
        read = [
            frozenset(_values(field, *bounds))
            for field, bounds in zip(fields, _BOUNDS, strict=True)
        ]
        minutes, hours, days, months, weekdays = read
        starred = any(fields[at][0] in "*?" for at in (2, 4))
        return cls(minutes, hours, days, months, frozenset(d % 7 for d in weekdays), not starred)

    def next(self, after: datetime) -> datetime | None:
        """Return the first time after this one, None if there is none within four years."""
        at = after.replace(second=0, microsecond=0) + _MINUTE
        end = after + _HORIZON
        while at < end:
            if not self._has_day(at):
                at = (at + timedelta(days=1)).replace(hour=0, minute=0)
            elif at.hour not in self.hours:
                at = at.replace(minute=0) + timedelta(hours=1)
            elif at.minute not in self.minutes:
                at += _MINUTE
            else:
                return at
        return None

    def last(self, until: datetime, after: datetime) -> datetime | None:
        """Return the last time after one and until the other, or None."""
        latest = None
        at = self.next(after)
        while at is not None and at <= until:
            latest, at = at, self.next(at)
        return latest

    def _has_day(self, at: datetime) -> bool:
        if at.month not in self.months:
            return False
        in_month = at.day in self.days
        in_week = at.isoweekday() % 7 in self.weekdays
        return in_month or in_week if self.either_day else in_month and in_week


def _values(field: str, low: int, high: int) -> Iterator[int]:
    for part in field.split(","):
        span, slash, step = part.partition("/")
        first, dash, last = span.partition("-")
        if first in {"*", "?"}:
            start, end = low, high
        else:
            start = _number(first, high)
            end = _number(last, high) if dash else (high if slash else start)
        if not low <= start <= end <= high:
            raise ValueError(f"{part!r} is not within {low} to {high}")
        stride = _number(step, high) if slash else 1
        if stride < 1:
            raise ValueError(f"step of range should be a positive number: {part}")
        yield from range(start, end + 1, stride)


def _number(text: str, high: int) -> int:
    names = {12: _MONTHS, 7: _DAYS}.get(high, [])
    if text in names:
        return names.index(text) + (1 if high == 12 else 0)
    if not text.isdecimal():
        raise ValueError(f"failed to parse int from {text}")
    return int(text)

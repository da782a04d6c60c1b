"""Schedules of CronJobs."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from simcluster.apimachinery.schedules import Schedule

FRIDAY = datetime(2026, 1, 30, 10, 7, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("schedule", "following"),
    [
        ("* * * * *", "2026-01-30T10:08"),
        ("*/15 * * * *", "2026-01-30T10:15"),
        ("5 8-10/2 * * *", "2026-01-31T08:05"),
        ("@hourly", "2026-01-30T11:00"),
        ("0 0 1,15 * *", "2026-02-01T00:00"),
        ("0 9 * * mon-fri", "2026-02-02T09:00"),
        ("0 9 * * 7", "2026-02-01T09:00"),
        ("0 0 13 * fri", "2026-02-06T00:00"),
        ("0 0 29 feb *", "2028-02-29T00:00"),
        ("0 0 31 feb *", None),
    ],
)
def test_a_schedule_names_its_next_time(schedule: str, following: str | None) -> None:
    next_at = Schedule.parse(schedule).next(FRIDAY)

    assert (next_at and next_at.strftime("%Y-%m-%dT%H:%M")) == following


def test_of_several_missed_times_the_last_counts() -> None:
    hourly = Schedule.parse("@hourly")

    assert hourly.last(FRIDAY, FRIDAY.replace(hour=3)) == datetime(2026, 1, 30, 10, tzinfo=UTC)
    assert hourly.last(FRIDAY, FRIDAY.replace(minute=1)) is None


def test_hours_are_those_of_the_time_zone() -> None:
    berlin = FRIDAY.astimezone(ZoneInfo("Europe/Berlin"))

    next_at = Schedule.parse("0 12 * * *").next(berlin)

    assert next_at is not None
    assert next_at.astimezone(UTC).hour == 11


@pytest.mark.parametrize("text", ["", "* * * *", "60 * * * *", "*/0 * * * *", "x * * * *", "@now"])
def test_malformed_schedules_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"fields|within|positive|parse"):
        Schedule.parse(text)

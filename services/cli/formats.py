"""Formats of durations and instants in the commands' output; pure."""

from datetime import UTC, datetime


def age(seconds: float) -> str:
    """Format a duration as kubectl does: 12s, 5m, 3h, 2d."""
    whole = max(int(seconds), 0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def timestamp(at_s: float) -> str:
    """Format Unix seconds as Kubernetes does, to the second."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

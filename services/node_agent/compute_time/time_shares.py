"""What containers that share a GPU's time may use now; pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.node_agent.compute_time.time_layouts import LONGEST_WAIT_NS, SCALES, TimeUse

OFF = "off"
POLICIES = ("force", "default")
"""HAMi's words: a limit is a ceiling, or a share of which others may use what is left."""
ALL = 100
S = 1_000_000_000
ACTIVE_NS = S
"""A container that launched nothing for so long leaves its part to others."""
LONG_NS = 2 * S
_AHEAD_NS = S
_OVER_PERCENT = 10
"""Kernels that compete are measured too long."""
JUDGED_NS = 10 * S
DEFAULT_PRIORITY = 1
"""As HAMi has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShare:
    percent: int
    """0 is no limit."""
    use: TimeUse
    priority: int = DEFAULT_PRIORITY
    """A smaller number comes first: HAMi's `nvidia.com/priority`."""

    def is_active(self, now_ns: int) -> bool:
        return self.use.asked_at > now_ns - ACTIVE_NS


def allowed_percents(shares: Sequence[TimeShare], policy: str, now_ns: int) -> list[int]:
    """Return what each container may use of the GPU now.

    By the policy `default`, those of the first priority that compute divide what all leave unused.

    >>> idle, busy = TimeUse(), TimeUse(asked_at=5 * S)
    >>> shares = [TimeShare(percent=20, use=busy), TimeShare(percent=50, use=idle)]
    >>> allowed_percents(shares, "default", 5 * S), allowed_percents(shares, "force", 5 * S)
    ([100, 50], [20, 50])
    >>> first = TimeShare(percent=50, use=busy, priority=0)
    >>> allowed_percents([shares[0], first], "default", 5 * S)
    [20, 80]
    """
    active = [share for share in shares if share.is_active(now_ns)]
    unused = ALL - sum(share.percent for share in active)
    is_limited = all(share.percent > 0 for share in shares)
    if policy != "default" or not active or not is_limited or unused <= 0:
        return [share.percent for share in shares]
    priority = min(share.priority for share in active)
    total = sum(share.percent for share in active if share.priority == priority)
    return [
        share.percent + unused * share.percent // total
        if share.priority == priority and share.is_active(now_ns)
        else share.percent
        for share in shares
    ]


def need_measurement(shares: Sequence[TimeShare], now_ns: int) -> bool:
    """A measurement costs NVML 5 ms of CPU on an H200."""
    uses = [share.use for share in shares if share.is_active(now_ns)]
    has_long = any(use.long_at > now_ns - LONG_NS for use in uses)
    return has_long and (len(uses) > 1 or any(use.shared_at > now_ns - LONG_NS for use in uses))


def forgeries(use: TimeUse, now_ns: int) -> Iterator[str]:
    latest = now_ns + _AHEAD_NS
    if use.compared_at and use.scale not in SCALES:
        yield f"its charges are multiplied by {use.scale} of 1024"
    if use.compared_at > latest:
        yield "its last measurement is in the future"
    if use.ready_at > now_ns + LONGEST_WAIT_NS:
        yield "it waits for days"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPeriod:
    began_ns: int
    charged_ns: int
    allowed: int

    def is_over(self, now_ns: int) -> bool:
        return now_ns - self.began_ns >= JUDGED_NS

    def overcharge(self, use: TimeUse, now_ns: int) -> str:
        """Return what was taken beyond the limit, or an empty text."""
        percent = ALL * (use.charged_ns - self.charged_ns) // max(1, now_ns - self.began_ns)
        if percent <= self.allowed + _OVER_PERCENT:
            return ""
        return f"its kernels took {percent} % of the GPU's time, and {self.allowed} % is its limit"

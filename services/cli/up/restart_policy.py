"""When a process that ended is started again: fast at first, slower while it keeps ending."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How patient the supervisor is with a part that keeps ending."""

    first_s: float = 0.2
    """Pause before the first restart; each further exit in a row doubles it."""
    most_s: float = 5.0
    steady_s: float = 10.0
    """Whoever ran this long starts with the first pause again."""
    starts: int = 4
    """A part that ended this often and was never ready will not get ready by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What has become of one part so far."""

    restarts: int = 0
    exits_in_row: int = 0
    ever_ready: bool = False


def after_exit(life: Life, policy: RestartPolicy, *, ran_s: float) -> Life:
    """Count an exit of a part that ran for `ran_s` seconds."""
    in_row = 1 if ran_s >= policy.steady_s else life.exits_in_row + 1
    return replace(life, restarts=life.restarts + 1, exits_in_row=in_row)


def pause_s(life: Life, policy: RestartPolicy) -> float:
    """Return how long to wait before the part is started again."""
    doublings = min(max(life.exits_in_row - 1, 0), 30)
    return min(policy.first_s * 2.0**doublings, policy.most_s)


def is_hopeless(life: Life, policy: RestartPolicy) -> bool:
    """Say whether starting the part again is pointless: it has never been ready."""
    return not life.ever_ready and life.restarts >= policy.starts

"""Restarts of components that exit, after a pause that doubles; pure."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often and how fast the supervisor restarts a component that keeps exiting."""

    first_pause_s: float = 0.2
    """Pause before the first restart; each further exit in a row doubles it."""
    max_pause_s: float = 5.0
    stable_s: float = 10.0
    """After a run of this length the next restart has the first pause again."""
    max_starts: int = 4
    """A component that exited this often and was never ready is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartHistory:
    """The exits of one component so far."""

    restarts: int = 0
    exits_in_row: int = 0
    ever_ready: bool = False


def after_exit(history: RestartHistory, policy: RestartPolicy, *, ran_s: float) -> RestartHistory:
    """Count an exit of a component that ran for `ran_s` seconds."""
    in_row = 1 if ran_s >= policy.stable_s else history.exits_in_row + 1
    return replace(history, restarts=history.restarts + 1, exits_in_row=in_row)


def pause_s(history: RestartHistory, policy: RestartPolicy) -> float:
    """Return the pause before the next restart."""
    doublings = min(max(history.exits_in_row - 1, 0), 30)
    return min(policy.first_pause_s * 2.0**doublings, policy.max_pause_s)


def is_given_up(history: RestartHistory, policy: RestartPolicy) -> bool:
    """Return whether the component is not restarted, since it has never been ready."""
    return not history.ever_ready and history.restarts >= policy.max_starts

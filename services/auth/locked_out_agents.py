"""Agents whose logins are refused for a time, since they flood NATS.

A binder closes their connections, and they would be back within milliseconds.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.auth.auth_callout import AuthorizationRefusedError
from shared.model.clock import ExpiringMap
from shared.nats import subjects

logger = logging.getLogger(__name__)

FIRST_S = 30.0
"""How long the first lockout of an agent lasts; each later one lasts twice as long."""
LONGEST_S = 600.0
"""The longest lockout."""
FORGOTTEN_S = 3600.0
"""After this time, a lockout counts as the first one again."""
MOST_AGENTS = 10_000


@dataclass(frozen=True, slots=True)
class _LockOut:
    lasts_s: float
    until: float


class LockedOutAgents:
    """Every replica receives the reports of every binder."""

    def __init__(self, ticks: Callable[[], float]) -> None:
        self._ticks = ticks
        self._agents: ExpiringMap[str, _LockOut] = ExpiringMap(
            ticks, expires_s=FORGOTTEN_S, most=MOST_AGENTS
        )

    def note(self, user: str) -> None:
        """Reports during a lockout do not count."""
        if not subjects.is_agent(user) or self._left_s(user):
            return
        before = self._agents.get(user)
        lasts_s = min(before.lasts_s * 2, LONGEST_S) if before else FIRST_S
        self._agents.set(user, _LockOut(lasts_s, self._ticks() + lasts_s))
        logger.warning("%s floods NATS: its logins are refused for %g s", user, lasts_s)

    def _left_s(self, user: str) -> float:
        lock_out = self._agents.get(user)
        return max(lock_out.until - self._ticks(), 0.0) if lock_out else 0.0

    def check(self, user: str) -> None:
        if left_s := self._left_s(user):
            raise AuthorizationRefusedError(
                f"{user} is refused for {left_s:.0f} s more, since it has flooded NATS: another "
                "program probably uses its token"
            )

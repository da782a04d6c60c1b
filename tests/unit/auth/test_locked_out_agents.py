"""How long the logins of agents that flood NATS are refused."""

import pytest

from services.auth.auth_callout import AuthorizationRefusedError
from services.auth.locked_out_agents import FORGOTTEN_S, LONGEST_S, LockedOutAgents
from tests.support.clock import FakeClock

AGENT = "node-agent.node-a"
OTHER = "node-agent.node.b"


def locked_s(agents: LockedOutAgents, clock: FakeClock, user: str = AGENT) -> float:
    """Return how long a user is refused, by advancing the clock."""
    began = clock.ticks()
    while True:
        try:
            agents.check(user)
        except AuthorizationRefusedError:
            clock.advance(1)
        else:
            return clock.ticks() - began


def test_an_agent_is_refused_for_twice_as_long_each_time_and_others_are_not() -> None:
    clock = FakeClock()
    agents = LockedOutAgents(clock.ticks)
    lasted = []
    for _ in range(8):
        for _ in range(3):
            agents.note(AGENT)
        agents.check(OTHER)
        lasted.append(locked_s(agents, clock))

    assert lasted == [30, 60, 120, 240, 480, LONGEST_S, LONGEST_S, LONGEST_S]
    clock.advance(FORGOTTEN_S)
    agents.note(AGENT)
    assert locked_s(agents, clock) == 30


def test_no_service_is_refused() -> None:
    agents = LockedOutAgents(FakeClock().ticks)
    for user in ("binder", "placer", "", "node-agent"):
        agents.note(user)
        agents.check(user)


def test_a_refusal_says_why_and_for_how_long() -> None:
    agents = LockedOutAgents(FakeClock().ticks)
    agents.note(AGENT)

    with pytest.raises(AuthorizationRefusedError, match=f"{AGENT} is refused for 30 s more"):
        agents.check(AGENT)

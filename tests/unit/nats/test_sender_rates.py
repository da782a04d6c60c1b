"""How much of an agent is received in a second, and what is dropped."""

import pytest

from shared.model.events.event import Event
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import Heartbeat, PodQueued
from shared.nats import subjects
from shared.nats.sender_rates import LEAST_BYTES, MOST_BYTES, SenderRates
from tests.support.clock import FakeClock

USER = "node-agent.node.a"


class Receiver:
    """What one connection receives."""

    def __init__(self, kind: type[Event] = DeviceReported) -> None:
        self.clock = FakeClock()
        self.rates = SenderRates(self.clock.ticks)
        self.flooding = list[str]()
        self.rates.on_excess = self.flooding.append
        self.rates.watch(1, kind)
        self.kind = kind

    def accepted(self, count: int, size: int, route: str = "node.a") -> int:
        subject = subjects.publish_subject(self.kind, route).encode()
        return sum(self.rates.allows(1, subject, size) for _ in range(count))


@pytest.mark.parametrize(("count", "size"), [(10_000, 3), (40, 2**20)])
def test_what_an_agent_sends_beyond_its_rate_is_dropped_until_the_next_second(
    count: int, size: int
) -> None:
    receiver = Receiver()
    most = MOST_BYTES // max(size, LEAST_BYTES) - 1

    assert receiver.accepted(count, size) == most
    assert receiver.accepted(3, 2**20, "node-b") == 3
    assert set(receiver.flooding) == {USER}
    assert len(receiver.flooding) == count * max(size, LEAST_BYTES) // MOST_BYTES
    receiver.clock.advance(1)
    assert receiver.accepted(1, size) == 1


def test_heartbeats_of_agents_count_and_those_of_services_do_not() -> None:
    receiver = Receiver(Heartbeat)

    assert receiver.accepted(10_000, 3, USER) < 10_000
    assert receiver.accepted(10_000, 3, "binder") == 10_000
    assert set(receiver.flooding) == {USER}


def test_what_services_send_is_not_counted() -> None:
    receiver = Receiver(PodQueued)

    assert receiver.accepted(10_000, 3, "") == 10_000


def test_names_of_senders_are_forgotten() -> None:
    receiver = Receiver()
    for number in range(1_000):
        receiver.accepted(1, 3, f"node-{number}")
    receiver.clock.advance(1)
    receiver.accepted(1, 3)

    assert len(receiver.rates._bytes) == 1

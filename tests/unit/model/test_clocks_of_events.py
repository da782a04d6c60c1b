"""Our own events are accepted whatever the clocks of their senders do."""

import asyncio
from collections.abc import Sequence

import pytest

from shared.model.bounds import LATEST_S
from shared.model.budgets.balance import exhaustion_ms
from shared.model.budgets.budget import Budget, BudgetWindow
from shared.model.events.event import Event
from shared.model.events.pod_events import BudgetChanged, Heartbeat, PodBound
from shared.model.names import Namespace
from shared.nats import wire
from shared.runtime.run import sending_heartbeats
from tests.support import build


@pytest.mark.parametrize("latency_s", [-3600.0, -1e-9, 0.0, 1e9])
def test_a_pod_is_bound_also_before_its_lease_was_made_by_another_clock(latency_s: float) -> None:
    event = PodBound(lease=build.lease(), latency_s=latency_s)

    assert wire.decode(wire.encode([event]), PodBound) == [event]


def test_a_budget_that_lasts_for_millennia_has_an_end_that_is_accepted_or_none() -> None:
    budget = Budget(namespace=Namespace("team"), limit_units=2**62)
    window = BudgetWindow(id="w", start_ms=0)
    ends = []
    for exponent in range(20, 63):
        at_ms = exhaustion_ms(budget, window, 2**exponent, 1, 1_787_000_000_000)
        if at_ms is not None:
            event = BudgetChanged(
                namespace=budget.namespace,
                state="ok",
                previous_state="ok",
                lease_class="guaranteed",
                exhausted_at=at_ms / 1000,
            )
            assert wire.decode(wire.encode([event]), BudgetChanged) == [event]
            ends.append(at_ms)
    beyond = exhaustion_ms(budget, window, round(LATEST_S) * 1000, 1, 1_787_000_000_000)

    assert ends
    assert beyond is None


@pytest.mark.parametrize("now", [-5.0, 1e18])
async def test_a_heartbeat_is_accepted_whatever_its_senders_clock_shows(
    now: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Event] = []
    monkeypatch.setattr("shared.runtime.run.time.time", lambda: now)

    async def publish(events: Sequence[Event]) -> None:
        sent.extend(events)

    async with sending_heartbeats(publish, {}, service="binder", instance="b-1"):
        while not sent:
            await asyncio.sleep(0)

    assert wire.decode(wire.encode(sent[:1]), Heartbeat) == sent[:1]


async def test_a_heartbeat_with_long_reasons_is_accepted() -> None:
    sent: list[Event] = []

    async def publish(events: Sequence[Event]) -> None:
        sent.extend(events)

    probes = {"api": lambda: "the API server: " + "x" * 100_000}
    async with sending_heartbeats(publish, probes, service="binder", instance="b-1"):
        while not sent:
            await asyncio.sleep(0)

    for heartbeat in sent:
        assert isinstance(heartbeat, Heartbeat)
        assert wire.decode(wire.encode([heartbeat]), Heartbeat) == [heartbeat]

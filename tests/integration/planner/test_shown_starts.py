"""What pods read about their start: from the planner by a binder, in Events and conditions."""

from collections.abc import Sequence

import pytest

from services.binder.report.event_writer import MIN_INTERVAL_S
from services.binder.report.explanations import NO_END, PLANNED, WITHDRAWN
from services.planner.start_planner import MAX_PLAN_S, StartReports
from shared.model.errors import UnavailableError
from shared.model.events.event import Event
from shared.model.events.plan_events import StartDecision, StartReported
from shared.model.leases.preemption import StoredStart
from shared.model.quantity import timestamp
from shared.model.requests.request import NO_TERM, Term
from shared.placing.starts import MOST_TRIED, SOON_S
from tests.support.binder.world import running as background
from tests.support.planner.scene import (
    HOUR,
    Replicas,
    Scene,
    events,
    idle_node,
    promised,
    running,
    starts,
    step,
)
from tests.support.waiting import until

at = idle_node
__all__ = ["at"]


async def condition(at: Scene, binder: Replicas, wanted: str) -> None:
    """The condition of pod `new` of namespace `b` gets this message."""

    async def message() -> str:
        found = await at.get_pod("new", "b") or {}
        at.clock.advance(MIN_INTERVAL_S)
        conditions = found["status"].get("conditions", [])
        return "".join(each["message"] for each in conditions if each["type"] == "PodScheduled")

    async with background(binder.starts.conditions.write_conditions):
        await until(message, lambda found: found == wanted)


def no_end(who: str) -> str:
    return (
        f"no end in sight: no maximum run time (leasehold.dev/max-run-time) is set for {who}, "
        "which would have to end first"
    )


async def test_no_end_in_sight_is_said_once_until_it_is_no_longer_so(at: Scene) -> None:
    old = await at.running("old", namespace="b", gpu=0, mib=16_000, age_s=0)
    other = await running(at, 1, NO_TERM)
    await at.waiting("new", mib=16_000, gpus=2)
    binder = at.binder()
    at.clock.advance(60)
    for _ in range(3):
        await step(at, binder)
        at.clock.advance(MAX_PLAN_S)

    assert await starts(at) == ()
    text = no_end("b/old and 1 more")
    assert events(at, NO_END) == [text]
    await condition(at, binder, f"Planned start: {text}")

    await at.terminate(old)
    at.clock.advance(MAX_PLAN_S)
    await step(at, binder)
    assert events(at, NO_END) == [text, no_end("a pod of another namespace")]

    await at.terminate(other)
    await at.running("brief", gpu=1, mib=16_000, age_s=0, term=HOUR)
    at.clock.advance(MAX_PLAN_S)
    await step(at, binder)
    [start] = await starts(at)
    await condition(at, binder, f"Planned start: {start.text}")
    assert len(events(at, NO_END)) == 2


async def test_no_end_in_sight_is_taken_back_from_a_pod_for_which_others_are_preempted(
    at: Scene,
) -> None:
    await running(at, 0, NO_TERM)
    await running(at, 1, HOUR)
    new = await at.waiting("new", mib=16_000, gpus=2)
    binder = at.binder()
    at.clock.advance(60)
    await step(at, binder)
    await condition(at, binder, f"Planned start: {no_end('a pod of another namespace')}")

    await at.save_budget("a")
    at.clock.advance(at.rules.preemption_min_runtime_s)
    for _ in range(2):
        await step(at, binder)
    assert [each.preemption.id for each in (await at.state()).open] == [new]
    at.clock.advance(MAX_PLAN_S)
    await step(at, binder)
    await condition(at, binder, "")


async def test_only_the_first_pods_are_told_that_no_end_is_in_sight(at: Scene) -> None:
    await running(at, 0, NO_TERM)
    await running(at, 1, NO_TERM)
    for number in range(MOST_TRIED + 1):
        await at.waiting(f"new-{number}", mib=16_000)
    at.clock.advance(60)
    await step(at, at.binder())

    assert len(events(at, NO_END)) == MOST_TRIED


async def test_what_is_expected_is_no_promise(at: Scene) -> None:
    await running(at, 0, Term(expected_run_s=600))
    await running(at, 1, NO_TERM)
    await at.waiting("new", mib=16_000)

    await step(at, at.binder())

    [text] = events(at, PLANNED)
    assert text.startswith("expected to start at ")
    assert text.endswith("not promised: 1 pod before it has no maximum run time")


async def test_no_device_is_claimed_for_long_for_what_is_only_expected(at: Scene) -> None:
    old = await running(at, 0, Term(expected_run_s=int(SOON_S) + 60), mib=8_000)
    await running(at, 1, NO_TERM)
    await at.waiting("new", mib=16_000)
    binder = at.binder()
    for _ in range(3):
        await step(at, binder)
    assert await starts(at) == ()
    end = timestamp((old.activated_at or 0) + SOON_S + 60)
    text = f"expected to start at {end}, not promised: 1 pod before it has no maximum run time"
    assert events(at, PLANNED) == [text]
    await condition(at, binder, f"Planned start: {text}")

    at.clock.advance(60)
    await step(at, binder)
    assert len(await starts(at)) == 1


def report_of(start: StoredStart, decision: StartDecision, text: str) -> StartReported:
    [pod] = start.wanted
    return StartReported(
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        decision=decision,
        text=text,
        opened_at=start.opened_at if decision is StartDecision.PLANNED else 0.0,
    )


async def test_a_late_report_of_a_start_that_has_ended_is_not_shown(at: Scene) -> None:
    _, binder, start = await promised(at, other=HOUR)
    await at.preemptions.close_start(start)
    shown = events(at, PLANNED)

    await binder.starts.show_starts([report_of(start, StartDecision.PLANNED, start.text)])

    assert events(at, PLANNED) == shown != []


async def test_a_late_withdrawal_leaves_the_newer_start_in_the_condition(at: Scene) -> None:
    _, binder, start = await promised(at, other=HOUR)

    await binder.starts.show_starts([report_of(start, StartDecision.WITHDRAWN, "it was full")])

    assert events(at, WITHDRAWN) == ["it was full"]
    await condition(at, binder, f"Planned start: {start.text}")


async def test_reports_are_kept_while_nats_is_away(at: Scene) -> None:
    _, _, start = await promised(at, other=HOUR)
    received: list[Event] = []
    away = [True]

    async def publish(reports: Sequence[Event]) -> None:
        if away:
            away.clear()
            raise UnavailableError("NATS is away")
        received.extend(reports)

    reports = StartReports(publish)
    reports.add(start.wanted, StartDecision.WITHDRAWN, "it was full")
    with pytest.raises(UnavailableError):
        await reports.publish()
    await reports.publish()
    await reports.publish()

    assert [report.text for report in received if isinstance(report, StartReported)] == [
        "it was full"
    ]

"""Recent events, and the history of a budget."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from services.dashboard.api_responses import HISTORY_POINTS, budget_history
from services.dashboard.projection import EVENTS, Projection
from services.dashboard.recent_events import RecentEvents
from shared.model.budget import UNITS_PER_GPU_MINUTE, BudgetWindow, ChargeEntry
from shared.model.events.node_events import ShareActivated
from shared.model.events.pod_events import (
    LeaseResized,
    PlacementChosen,
    PlacementRefused,
    PodBound,
    PodTerminated,
)
from shared.model.lease import ShareSize
from shared.model.names import Namespace, PodUid
from shared.model.placement import Refusal
from tests.support import build
from tests.support.build import allocation_of
from tests.support.dashboard.board import budget, lease


def steps(pod: str = "uid-1") -> list[Any]:
    held = lease(pod)
    allocation = allocation_of(held, device_ids=())
    return [
        build.pod_queued(pod),
        PlacementChosen(lease=held),
        PodBound(lease=held),
        ShareActivated(node=held.node, allocation=allocation),
    ]


def test_each_step_has_the_time_since_the_previous_one() -> None:
    recent = RecentEvents()
    for number, event in enumerate(steps()):
        recent.add([event], 10.0 + number * number)

    steps_shown = [(event.kind, event.latency_s) for event in recent.latest]
    assert steps_shown == [("queued", None), ("placed", 1.0), ("bound", 3.0), ("running", 5.0)]


def test_a_repeated_step_is_ignored() -> None:
    recent = RecentEvents()

    assert recent.add(steps(), 1.0)
    assert not recent.add(steps(), 2.0)
    assert len(recent.latest) == 4


def test_every_resize_is_listed_with_both_sizes() -> None:
    recent, lease_of_pod = RecentEvents(), build.lease("p", "n", build.share())
    sizes = [ShareSize(memory_mib=mib, cores_percent=mib // 100) for mib in (1_000, 2_000, 50)]

    for before, after in pairwise(sizes):
        event = LeaseResized(lease=lease_of_pod, container="main", before=before, after=after)
        assert recent.add([event], 1.0)

    assert [(event.kind, event.text) for event in recent.latest] == [
        ("resized", "main: 1000 to 2000 MiB, 10 to 20 % of the cores"),
        ("resized", "main: 2000 to 50 MiB, 20 to any % of the cores"),
    ]


def test_an_offer_of_freed_capacity_is_ignored_and_a_refusal_is_listed() -> None:
    recent = RecentEvents()
    refused = PlacementRefused(
        pod=PodUid("p"), namespace=Namespace("a"), name="x", refusal=Refusal(reason="full")
    )

    assert not recent.add([replace(build.pod_queued("p"), requeue_number=7)], 1.0)
    assert recent.add([refused], 2.0)
    assert (recent.latest[0].kind, recent.latest[0].text) == ("waiting", "full")


def test_a_pod_that_terminates_has_its_phase() -> None:
    board = Projection()
    terminated = PodTerminated(
        pod=PodUid("p"), namespace=Namespace("a"), name="x", node=None, phase="Succeeded"
    )

    assert board.add_events([terminated], 1.0) == {EVENTS}
    assert board.events.latest[0].text == "Succeeded"


def test_an_older_budget_event_is_ignored() -> None:
    board = Projection()
    board.update_budgets([budget(state="exhausted", at=5.0)])
    board.update_budgets([budget(state="ok", at=4.0)])

    (shown,) = board.namespaces()
    assert shown.budget is not None
    assert shown.budget.state == "exhausted"


def test_a_budgets_history_goes_down_by_charges() -> None:
    minute = UNITS_PER_GPU_MINUTE
    window = BudgetWindow(id="w", start_ms=0, limit_units=10 * minute)
    entries = [
        ChargeEntry(window="w", kind="charge", units=4 * minute, to_ms=30_000),
        ChargeEntry(window="w", kind="charge", units=2 * minute, to_ms=60_000),
        ChargeEntry(window="w", kind="grant", units=9 * minute, to_ms=10),
        ChargeEntry(window="before", kind="charge", units=9 * minute, to_ms=10),
    ]

    points = budget_history(window, entries, at_ms=60_000)

    assert len(points) == HISTORY_POINTS + 1
    assert [
        points[at]["minutes"]
        for at in (0, HISTORY_POINTS // 2 - 1, HISTORY_POINTS // 2, HISTORY_POINTS)
    ] == [
        10.0,
        10.0,
        6.0,
        4.0,
    ]

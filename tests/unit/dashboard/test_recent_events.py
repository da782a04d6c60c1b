"""What the page tells as news, and how budgets stand there."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from services.dashboard.budget_history import POINTS, burn_down
from services.dashboard.projection import TICKER, Projection
from services.dashboard.recent_events import Ticker
from shared.model.budget import UNITS_PER_GPU_MINUTE, BudgetWindow, ChargeEntry
from shared.model.events.node_events import Allocation, ShareActivated
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
from tests.support.dashboard.board import budget, lease


def steps(pod: str = "uid-1") -> list[Any]:
    held = lease(pod)
    told = Allocation(
        pod=held.pod,
        namespace=held.namespace,
        name=held.name,
        container="main",
        resource="r",
        device_ids=(),
        lease=held,
    )
    return [
        build.pod_queued(pod),
        PlacementChosen(lease=held),
        PodBound(lease=held),
        ShareActivated(node=held.node, allocation=told),
    ]


def test_the_ticker_tells_each_step_with_the_time_since_the_one_before() -> None:
    ticker = Ticker()
    for number, event in enumerate(steps()):
        ticker.hear([event], 10.0 + number * number)

    told = [(tick.kind, tick.latency_s) for tick in ticker.lines]
    assert told == [("queued", None), ("placed", 1.0), ("bound", 3.0), ("running", 5.0)]


def test_a_step_heard_twice_is_told_once() -> None:
    ticker = Ticker()

    assert ticker.hear(steps(), 1.0)
    assert not ticker.hear(steps(), 2.0)
    assert len(ticker.lines) == 4


def test_every_resize_is_told_with_both_sizes() -> None:
    ticker, held = Ticker(), build.lease("p", "n", build.share())
    sizes = [ShareSize(memory_mib=mib, cores_percent=mib // 100) for mib in (1_000, 2_000, 50)]

    for before, after in pairwise(sizes):
        event = LeaseResized(lease=held, container="main", before=before, after=after)
        assert ticker.hear([event], 1.0)

    assert [(tick.kind, tick.text) for tick in ticker.lines] == [
        ("resized", "main: 1000 to 2000 MiB, 10 to 20 % of the cores"),
        ("resized", "main: 2000 to 50 MiB, 20 to any % of the cores"),
    ]


def test_an_offer_of_what_was_freed_is_no_news_and_a_refusal_is() -> None:
    ticker = Ticker()
    refused = PlacementRefused(
        pod=PodUid("p"), namespace=Namespace("a"), name="x", refusal=Refusal(reason="full")
    )

    assert not ticker.hear([replace(build.pod_queued("p"), offer=7)], 1.0)
    assert ticker.hear([refused], 2.0)
    assert (ticker.lines[0].kind, ticker.lines[0].text) == ("waits", "full")


def test_a_pod_that_ends_says_how() -> None:
    board = Projection()
    gone = PodTerminated(
        pod=PodUid("p"), namespace=Namespace("a"), name="x", node=None, phase="Succeeded"
    )

    assert board.hear([gone], 1.0) == {TICKER}
    assert board.ticker.lines[0].text == "Succeeded"


def test_an_older_word_about_a_budget_is_passed_over() -> None:
    board = Projection()
    board.take_budgets([budget(state="exhausted", at=5.0)])
    board.take_budgets([budget(state="ok", at=4.0)])

    (shown,) = board.namespaces()
    assert shown.budget is not None
    assert shown.budget.state == "exhausted"


def test_a_budget_goes_down_by_what_was_charged() -> None:
    minute = UNITS_PER_GPU_MINUTE
    window = BudgetWindow(id="w", start_ms=0, limit_units=10 * minute)
    entries = [
        ChargeEntry(window="w", kind="charge", units=4 * minute, to_ms=30_000),
        ChargeEntry(window="w", kind="charge", units=2 * minute, to_ms=60_000),
        ChargeEntry(window="w", kind="grant", units=9 * minute, to_ms=10),
        ChargeEntry(window="before", kind="charge", units=9 * minute, to_ms=10),
    ]

    points = burn_down(window, entries, at_ms=60_000)

    assert len(points) == POINTS + 1
    assert [points[at]["minutes"] for at in (0, POINTS // 2 - 1, POINTS // 2, POINTS)] == [
        10.0,
        10.0,
        6.0,
        4.0,
    ]

"""Recent events, the changes after a reader's position, budgets, and settings."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from services.api.projection.projection import EVENTS, NAMESPACES, Projection
from services.api.projection.recent_events import RecentEvents
from services.api.reports.history import BUDGET_POINTS, budget_history
from services.api.service import MAX_CHANGES, ChangeFeed
from services.api.settings import ApiSettings
from shared.credentials.authorization import is_loopback
from shared.model.budgets.budget import (
    UNITS_PER_GPU_MINUTE,
    Account,
    BudgetWindow,
    ChargedLease,
    ChargeEntry,
)
from shared.model.errors import RequestError
from shared.model.events.node_events import ShareActivated, ShareRefused
from shared.model.events.pod_events import (
    LeaseResized,
    PlacementChosen,
    PlacementRefused,
    PodBound,
    PodTerminated,
)
from shared.model.leases.lease import ShareSize
from shared.model.leases.preemption import EvictionOutcome, PreemptionState
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.placement import Refusal
from tests.support import build
from tests.support.api.board import budget, eviction, lease, seen
from tests.support.build import allocation_of


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
    recent = RecentEvents(lambda _: None)
    for number, event in enumerate(steps()):
        recent.add([event], 10.0 + number * number)

    steps_shown = [(event.kind, event.latency_s) for event in recent.latest]
    assert steps_shown == [("queued", None), ("placed", 1.0), ("bound", 3.0), ("running", 5.0)]


def test_what_one_agent_reports_leaves_the_events_of_others() -> None:
    recent = RecentEvents(lambda _: None)
    recent.add(steps(), 10.0)
    shown = [event.kind for event in recent.latest]
    for number in range(1_000):
        reason = f"invented {number}"
        recent.add([ShareRefused(node=NodeName("stolen"), reason=reason)], 11.0)

    assert [event.kind for event in recent.latest][: len(shown)] == shown
    of_agent = [event.text for event in recent.latest if event.node == "stolen"]
    assert of_agent == [f"invented {number}" for number in range(980, 1_000)]


def refused(pod: str, code: str, nodes: int = 1) -> PlacementRefused:
    refusal = Refusal(reason=f"{nodes} nodes are available", counts=((code, nodes),))
    return PlacementRefused(
        pod=PodUid(pod), namespace=Namespace("default"), name=pod, refusal=refusal
    )


def test_a_pod_that_waits_on_for_the_same_reason_is_one_event() -> None:
    recent = RecentEvents(lambda _: None)

    for number in range(1, 5):
        recent.add([refused("a", "Insufficient GPU memory", number)], float(number))
    recent.add([refused("a", "Quota")], 5.0)

    assert [(event.at, event.kind) for event in recent.latest] == [
        (1.0, "waiting"),
        (5.0, "waiting"),
    ]


def test_a_pod_that_waits_again_after_it_was_placed_is_a_new_event() -> None:
    recent = RecentEvents(lambda _: None)
    for at in (1.0, 3.0):
        recent.add([refused("uid-1", "Quota")], at)
        recent.add([PlacementChosen(lease=lease("uid-1"))], at + 1.0)

    assert [event.at for event in recent.latest if event.kind == "waiting"] == [1.0, 3.0]


def test_a_budget_that_changes_often_leaves_the_events_of_others() -> None:
    recent = RecentEvents(lambda _: None)
    recent.add_budget_state(Namespace("b"), "exhausted", 1.0)
    for number in range(1_000):
        recent.add_budget_state(Namespace("a"), "ok", float(number))

    assert (recent.latest[0].namespace, len(recent.latest)) == ("b", 11)


def test_many_waiting_pods_leave_the_steps_of_others_and_problems() -> None:
    recent = RecentEvents(lambda _: None)
    recent.add(steps(), 1.0)
    for _ in range(2):
        recent.add_problems({("GPU 3 of n", "Unhealthy: XID 79")}, 2.0)

    recent.add([refused(f"p{number}", "Quota") for number in range(1_000)], 3.0)

    assert [event.kind for event in recent.latest][:5] == [
        "queued",
        "placed",
        "bound",
        "running",
        "problem",
    ]
    assert len(recent.latest) == 105


def test_a_problem_that_has_ended_stays_in_the_events_with_its_duration() -> None:
    recent = RecentEvents(lambda _: None)
    sick = {("GPU 3 of n", "Unhealthy: XID 79")}

    assert not recent.add_problems(sick, 10.0)  # it may be a component that is about to report
    assert recent.add_problems(sick, 12.0)
    assert not recent.add_problems(sick, 14.0)
    assert recent.add_problems(set(), 20.0)

    assert [(event.kind, event.name, event.text, event.latency_s) for event in recent.latest] == [
        ("problem", "GPU 3 of n", "Unhealthy: XID 79", None),
        ("solved", "GPU 3 of n", "Unhealthy: XID 79", 8.0),
    ]


def test_a_gpu_that_fails_again_and_again_leaves_the_problems_of_others() -> None:
    recent = RecentEvents(lambda _: None)
    for _ in range(2):
        recent.add_problems({("node-agent of b", "No heartbeats")}, 1.0)

    for number in range(100):
        for _ in range(2):
            recent.add_problems(
                {("node-agent of b", "No heartbeats"), ("GPU 0 of a", f"XID {number}")}, 2.0
            )

    assert recent.latest[0].name == "node-agent of b"
    assert len(recent.latest) == 11


def test_a_repeated_step_is_ignored() -> None:
    recent = RecentEvents(lambda _: None)

    assert recent.add(steps(), 1.0)
    assert not recent.add(steps(), 2.0)
    assert len(recent.latest) == 4


def test_every_resize_is_listed_with_both_sizes() -> None:
    recent = RecentEvents(lambda _: None)
    lease_of_pod = build.lease("p", "n", build.share())
    sizes = [ShareSize(memory_mib=mib, cores_percent=mib // 100) for mib in (1_000, 2_000, 50)]

    for before, after in pairwise(sizes):
        event = LeaseResized(
            lease=lease_of_pod, container="main", before=before, after=after, actor="ada"
        )
        assert recent.add([event], 1.0)

    assert [(event.kind, event.text) for event in recent.latest] == [
        ("resized", "main: 1000 to 2000 MiB, 10 % to 20 % of the cores, by ada"),
        ("resized", "main: 2000 to 50 MiB, 20 % to no limit of the cores, by ada"),
    ]


def test_an_offer_of_freed_capacity_is_ignored_and_refusals_and_ends_have_their_text() -> None:
    board = Projection()
    named: dict[str, Any] = {"pod": PodUid("p"), "namespace": Namespace("a"), "name": "x"}
    refused = PlacementRefused(**named, refusal=Refusal(reason="full"))
    ended = PodTerminated(**named, node=None, phase="Succeeded")

    assert not board.add_events([replace(build.pod_queued("p"), requeue_number=7)], 1.0)
    assert board.add_events([refused, ended], 2.0) == {EVENTS}
    shown = [(event.kind, event.text) for event in board.events.latest]
    assert shown == [("waiting", "full"), ("terminated", "Succeeded")]


def test_an_older_budget_event_is_ignored() -> None:
    board = Projection()
    board.update_budgets([budget(state="exhausted", at=5.0)])
    board.update_budgets([budget(state="ok", at=4.0)])

    (shown,) = board.namespaces()
    assert shown.budget is not None
    assert shown.budget.state == "exhausted"


def test_each_change_of_a_budgets_state_is_an_event() -> None:
    board = Projection()
    for at, state in enumerate(["ok", "ok", "exhausted", "ok"]):
        board.update_budgets([budget(state=state, at=float(at))])

    shown = [(event.at, event.kind, event.namespace, event.text) for event in board.events.latest]
    assert shown == [(2.0, "budget", "a", "exhausted"), (3.0, "budget", "a", "ok")]


def test_everybody_sees_problems_but_not_the_pods_of_others_in_them() -> None:
    board = Projection()
    of_pod = "Processes of pod other/train still hold memory"
    for _ in range(2):
        board.add_problems({("GPU 0 of n", "Unhealthy: XID 79"), ("GPU 1 of n", of_pod)}, 1.0)
    board.update_budgets([budget("other", "ok", 1.0)])
    board.update_budgets([budget("other", "exhausted", 2.0)])

    of_team = seen(board, {Namespace("team")}.__contains__).events()
    of_admin = seen(board).events()

    assert [event.name for event in of_team] == ["GPU 0 of n"]
    assert [event.text for event in of_admin] == ["Unhealthy: XID 79", of_pod, "exhausted"]


def test_a_budgets_history_rises_by_charges_to_the_reported_balance() -> None:
    minute = UNITS_PER_GPU_MINUTE
    window = BudgetWindow(id="w", start_ms=0, limit_units=10 * minute, used_units=6 * minute)
    running = ChargedLease(
        id="l", pod=PodUid("p"), name="p", weight=500, since_ms=0, charged_ms=60_000
    )
    account = Account(namespace=Namespace("a"), windows=(window,), leases=(running,))
    entries = [
        ChargeEntry(window="w", kind="charge", units=4 * minute, to_ms=30_000),
        ChargeEntry(window="w", kind="charge", units=2 * minute, to_ms=60_000),
        ChargeEntry(window="w", kind="grant", units=9 * minute, to_ms=10),
        ChargeEntry(window="before", kind="charge", units=9 * minute, to_ms=10),
    ]

    history = budget_history(account, window, entries, at_ms=120_000)

    minutes = [point.minutes for point in history.points]
    quarter = BUDGET_POINTS // 4
    assert len(minutes) == BUDGET_POINTS + 1
    assert [minutes[0], minutes[quarter - 1], minutes[quarter]] == [0.0, 0.0, 4.0]
    assert minutes[-2:] == [6.0, 6.5]
    assert history.limit_minutes == 10.0


def test_an_eviction_is_listed_once_with_its_cause() -> None:
    board = Projection()
    first, second = eviction("p1", 5.0), eviction("p2", 6.0, outcome=EvictionOutcome.BLOCKED)

    assert EVENTS in board.update_preemptions(PreemptionState(evictions=(first,)))
    assert EVENTS in board.update_preemptions(PreemptionState(evictions=(first, second)))
    assert not board.update_preemptions(PreemptionState(evictions=(second,)))

    shown = [(event.at, event.name, event.kind, event.text) for event in board.events.latest]
    assert shown == [
        (5.0, "p1", "evicted", "a pod of higher priority needs its devices"),
        (6.0, "p2", "eviction blocked", "a pod of higher priority needs its devices"),
    ]


def test_the_pod_that_benefits_is_named_to_those_who_may_see_it() -> None:
    board = Projection()
    board.update_preemptions(PreemptionState(evictions=(eviction("p1", 5.0),)))

    (all_seen,) = seen(board).events()
    (of_victim,) = seen(board, {Namespace("a")}.__contains__).events()

    assert (all_seen.beneficiary, of_victim.beneficiary) == ("b/urgent", "")
    assert Namespace("b") in board.known_namespaces()


def test_budgets_are_known_from_the_stored_state() -> None:
    board = Projection()
    stored = {Namespace("a"): budget(state="exhausted")}

    assert board.update_preemptions(PreemptionState(budgets=stored)) == {NAMESPACES}
    assert not board.update_preemptions(PreemptionState(budgets=stored))
    assert board.budgets[Namespace("a")].state == "exhausted"


def test_the_steps_of_a_pod_are_a_waterfall() -> None:
    recent = RecentEvents(lambda _: None)
    for number, event in enumerate(steps()):
        recent.add([event], 10.0 + number * number)

    drawn = recent.spans_of(PodUid("uid-1"))

    assert [(one.name, one.start_s, one.duration_s) for one in drawn] == [
        ("until placed", 0.0, 1.0),
        ("until bound", 1.0, 3.0),
        ("until running", 4.0, 5.0),
    ]
    assert recent.spans_of(PodUid("unknown")) == ()


def test_what_a_node_says_of_a_pod_without_a_lease_there_is_an_event_of_the_node_alone() -> None:
    held = build.lease("p", "n1", namespace="team")
    events = RecentEvents({held.pod: held}.get)
    told: dict[str, Any] = {
        "pod": held.pod,
        "namespace": held.namespace,
        "name": held.name,
        "reason": "it lies",
    }

    events.add([ShareRefused(**told, node=NodeName(name)) for name in ("n1", "n2")], 1.0)

    shown = [(each.pod, each.namespace, each.name, each.node) for each in events.latest]
    assert shown == [(held.pod, "team", "p", "n1"), (None, "", "", "n2")]


def test_a_reader_receives_what_changed_after_its_position() -> None:
    feed = ChangeFeed()
    feed.publish({("device", "a")})
    position = feed.position
    feed.publish({("device", "b")})
    feed.publish({EVENTS, ("device", "b")})

    assert feed.since(position) == frozenset({("device", "b"), EVENTS})
    assert feed.since(feed.position) == frozenset()


@pytest.mark.parametrize("position", ["", "other-1", "x", "{feed_id}-9", "{feed_id}--1"])
def test_an_unknown_position_means_to_start_anew(position: str) -> None:
    feed = ChangeFeed()
    feed.publish({EVENTS})

    assert feed.since(position.format(feed_id=feed.id)) is None


def test_a_reader_that_is_too_far_behind_starts_anew() -> None:
    feed = ChangeFeed()
    position = feed.position
    for _ in range(MAX_CHANGES):
        feed.publish({EVENTS})

    assert feed.since(position) == frozenset({EVENTS})
    feed.publish({EVENTS})
    assert feed.since(position) is None


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:80", True),
        ("127.8.0.1", True),
        ("localhost:8080", True),
        ("[::1]:80", True),
        ("::1", True),
        ("0.0.0.0:80", False),
        (":80", False),
        ("[::]:80", False),
        ("10.0.0.1:80", False),
        ("localhost.example.org:80", False),
        ("127.0.0.1.example.org:80", False),
    ],
)
def test_loopback_addresses_are_recognised(address: str, here: bool) -> None:
    assert is_loopback(address) is here


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"listen": "0.0.0.0:80"}, "--auth none shows everything to any client"),
        ({"tokens": "t"}, "add --auth tokens"),
    ],
)
def test_contradictory_and_unsafe_settings_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ApiSettings(**changes).check()

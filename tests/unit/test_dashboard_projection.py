"""What the page shows of what was heard: nodes, leases, queue, news, silence; and of whom not."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dashboard.burn import POINTS, burn_down
from services.dashboard.hub import ROUNDS_KEPT, Hub
from services.dashboard.plain import page
from services.dashboard.projection import NAMESPACES, TICKER, WAITING, Projection
from services.dashboard.settings import DashboardSettings
from services.dashboard.shapes import device_shape, everything, state_shape, waiting_shape
from services.dashboard.silence import FORGET_S, PATIENCE_S, Parts
from services.dashboard.ticker import Ticker
from shared.model.budget import UNITS_PER_GPU_MINUTE, Entry, Window
from shared.model.errors import RequestError
from shared.model.events import (
    BudgetChanged,
    LeaseResized,
    PartReported,
    PlacementChosen,
    PlacementRefused,
    PodBound,
    PodGone,
)
from shared.model.lease import Lease, LeaseState, MigPlace, Size
from shared.model.ledger import NodeAccount, Waiting, counted_use
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.node_events import Activation, ShareActivated
from shared.model.placement import Refusal
from shared.runtime.doors import is_loopback
from tests.support import build

EVIL = '<img src=x onerror="alert(1)">'


def account(*leases: Lease, name: str = "n1", devices: int = 2, **fields: Any) -> NodeAccount:
    """A node whose totals are those of its leases."""
    uses, _ = counted_use(leases)
    held = [
        (device, uses[device.uuid]) if device.uuid in uses else device
        for device in build.devices(devices, name)
    ]
    return NodeAccount(node=build.ledger_node(name, *held, **fields), leases=leases)


def lease(pod: str = "p1", gpu: int = 0, **fields: Any) -> Lease:
    node = fields.pop("node", "n1")
    share = build.share(f"GPU-{node}-{gpu}", gpu, slot=fields.pop("slot", 0), fence=1)
    return build.lease(pod, node, share, state=fields.pop("state", LeaseState.BOUND), **fields)


def waiting(pod: str, *, namespace: str = "a", priority: int = 0, since: float = 5.0) -> Waiting:
    wanted = build.request(build.gpu(), priority=priority)
    return Waiting(
        queued=build.pod_queued(pod, wanted, namespace=namespace),
        refusal=Refusal(reason="0/2 nodes", hint="try less"),
        capacity=1,
        waiting_since=since,
    )


def projected(*accounts: NodeAccount) -> Projection:
    made = Projection()
    made.take_nodes([], accounts)
    return made


def test_a_lease_is_in_its_device_with_all_that_is_said_of_it() -> None:
    board = projected(account(lease(namespace="team", name="train", created_at=7.0)))

    shape = device_shape(board.devices[DeviceUuid("GPU-n1-0")], everything)

    (share,) = shape["shares"]
    assert shape["used_mib"] == share["memory_mib"] == 1000
    assert (share["namespace"], share["name"], share["container"]) == ("team", "train", "main")
    assert (share["state"], share["created_at"], share["slot"]) == ("bound", 7.0, 0)


def test_an_instance_is_shown_with_its_profile_and_position() -> None:
    place = MigPlace(layout="g1", position=2, profile="1g.10gb")
    one = build.lease("p", "n1", build.share("GPU-n1-0", slot=2, mig=place))

    board = projected(account(one))

    (share,) = device_shape(board.devices[DeviceUuid("GPU-n1-0")], everything)["shares"]
    assert share["mig"] == {"layout": "g1", "position": 2, "profile": "1g.10gb"}


def test_hearing_the_same_again_changes_nothing() -> None:
    board, same = Projection(), account(lease())

    first = board.take_nodes([], [same])

    assert {("node", "n1"), ("device", "GPU-n1-0"), NAMESPACES} <= first
    assert board.take_nodes(["n1"], [same]) == frozenset()  # type: ignore[list-item]


def test_only_what_differs_is_told() -> None:
    board = projected(account(lease()))

    changed = board.take_nodes([], [account(lease(state=LeaseState.ACTIVE))])

    assert changed == {("device", "GPU-n1-0"), NAMESPACES}


def test_a_node_that_was_asked_for_and_is_not_there_is_gone_with_its_devices() -> None:
    board = projected(account(lease()))

    changed = board.take_nodes([NodeName("n1")], [])

    assert changed == {("node", "n1"), ("device", "GPU-n1-0"), ("device", "GPU-n1-1"), NAMESPACES}
    assert (board.nodes, board.devices, board.namespaces()) == ({}, {}, [])


LEASES = st.lists(
    st.builds(
        lambda pod, gpu, namespace, state: lease(f"p{pod}", gpu, namespace=namespace, state=state),
        st.integers(0, 5),
        st.integers(0, 1),
        st.sampled_from(["a", "b"]),
        st.sampled_from([LeaseState.RESERVED, LeaseState.BOUND, LeaseState.ACTIVE]),
    ),
    max_size=4,
    unique_by=lambda one: one.pod,
)


@given(st.lists(LEASES, min_size=1, max_size=5))
def test_however_it_came_about_the_end_is_what_was_read_last(history: list[list[Lease]]) -> None:
    board = Projection()
    for leases in history:
        board.take_nodes([], [account(*leases)])

    fresh = projected(account(*history[-1]))
    assert board.devices == fresh.devices
    assert board.namespaces() == fresh.namespaces()


def test_the_queue_is_by_priority_then_by_age_and_places_count_everybody() -> None:
    board = Projection()
    board.take_waiting([waiting("late", since=9), waiting("early", since=1, namespace="b")])
    board.take_waiting([waiting("first", priority=5, since=20)], asked=[PodUid("first")])

    shape = waiting_shape(board.queue(), lambda namespace: namespace == "a")

    assert [(pod["name"], pod["place"]) for pod in shape["pods"]] == [("first", 1), ("late", 3)]
    assert (shape["total"], shape["hidden"]) == (3, 1)


def test_whoever_was_asked_for_and_does_not_wait_leaves_the_queue() -> None:
    board = Projection()
    board.take_waiting([waiting("p1"), waiting("p2")])

    changed = board.take_waiting([], asked=[PodUid("p1")])

    assert changed == {WAITING, NAMESPACES}
    assert list(board.waiting) == ["p2"]
    assert board.take_waiting([], asked=[PodUid("p1")]) == frozenset()


def test_of_others_namespaces_only_that_something_is_in_use_is_shown() -> None:
    secret = lease("uid-secret", namespace="secret", name="hidden-name", dialect="d", gang="g")
    board = projected(account(secret, lease("mine", 1, namespace="mine")))
    board.take_waiting([waiting("waits", namespace="secret")])
    board.hear([PodBound(lease=secret)], 1.0)
    board.take_budgets([budget("secret")])

    shape = state_shape(board, [], {"mine"}.__contains__, id_="x", now=2.0)

    assert "secret" not in str(shape)
    assert "hidden-name" not in str(shape)
    assert "waits" not in str(shape["waiting"]["pods"])
    (share,) = next(one for one in shape["devices"] if one["index"] == 0)["shares"]
    assert share.keys() == {"state", "memory_mib", "cores_percent", "slot", "init"}
    assert [one["namespace"] for one in shape["namespaces"]] == ["mine"]


def test_names_are_inert_in_the_page_without_scripts() -> None:
    board = projected(account(lease(namespace=EVIL, name=EVIL), name="n1"))
    board.take_waiting([waiting("w", namespace=EVIL)])

    text = page(board, [], everything, number=1, only_table=True, signed_in=False, now=1.0)

    assert "<img" not in text
    assert "<script" not in text
    assert "&lt;img src=x onerror=&quot;alert(1)&quot;&gt;" in text


def test_many_devices_are_on_pages_that_link_to_each_other() -> None:
    board = projected(account(devices=250))

    text = page(board, [], everything, number=2, only_table=False, signed_in=False, now=1.0)

    assert "page 2 of 3" in text
    assert text.count("Tesla V100") == 100
    assert 'href="/?page=1"' in text
    assert 'href="/?page=3"' in text


# News


def steps(pod: str = "uid-1") -> list[Any]:
    held = lease(pod)
    told = Activation(
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
        ShareActivated(node=held.node, activation=told),
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
    sizes = [Size(memory_mib=mib, cores_percent=mib // 100) for mib in (1_000, 2_000, 50)]

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
    gone = PodGone(
        pod=PodUid("p"), namespace=Namespace("a"), name="x", node=None, phase="Succeeded"
    )

    assert board.hear([gone], 1.0) == {TICKER}
    assert board.ticker.lines[0].text == "Succeeded"


# Budgets


def budget(namespace: str = "a", state: str = "ok", at: float = 1.0) -> BudgetChanged:
    return BudgetChanged(
        namespace=Namespace(namespace),
        state=state,
        previous="ok",
        lease_class="guaranteed",
        at=at,
    )


def test_an_older_word_about_a_budget_is_passed_over() -> None:
    board = Projection()
    board.take_budgets([budget(state="exhausted", at=5.0)])
    board.take_budgets([budget(state="ok", at=4.0)])

    (shown,) = board.namespaces()
    assert shown.budget is not None
    assert shown.budget.state == "exhausted"


def test_a_budget_goes_down_by_what_was_charged() -> None:
    minute = UNITS_PER_GPU_MINUTE
    window = Window(id="w", start_ms=0, limit_units=10 * minute)
    entries = [
        Entry(window="w", kind="charge", units=4 * minute, to_ms=30_000),
        Entry(window="w", kind="charge", units=2 * minute, to_ms=60_000),
        Entry(window="w", kind="grant", units=9 * minute, to_ms=10),
        Entry(window="before", kind="charge", units=9 * minute, to_ms=10),
    ]

    points = burn_down(window, entries, at_ms=60_000)

    assert len(points) == POINTS + 1
    assert [points[at]["minutes"] for at in (0, POINTS // 2 - 1, POINTS // 2, POINTS)] == [
        10.0,
        10.0,
        6.0,
        4.0,
    ]


# Silence


def report(service: str, instance: str = "", **fields: Any) -> PartReported:
    return PartReported(service=service, instance=instance or service, **fields)


def all_report(parts: Parts, now: float) -> None:
    for service in ("watcher", "placer", "binder"):
        parts.hear(report(service), now)


def test_a_replica_that_was_heard_and_fell_silent_is_named_and_one_that_left_is_not() -> None:
    parts = Parts(0.0)
    all_report(parts, 100.0)
    parts.hear(report("placer", "placer-1"), 100.0)
    parts.hear(report("placer", "placer-2"), 100.0)
    parts.hear(report("placer", "placer-2", leaving=True), 101.0)
    all_report(parts, 116.0)

    assert [one.text for one in parts.silent([], 116.0)] == ["placer (placer-1) is silent"]
    all_report(parts, 100.0 + FORGET_S + 1)
    assert parts.silent([], 100.0 + FORGET_S + 1) == []


def test_what_is_needed_and_was_never_heard_of_is_missed_after_a_while() -> None:
    parts = Parts(0.0)
    parts.hear(report("watcher"), PATIENCE_S)

    assert parts.silent([], PATIENCE_S - 1) == []
    assert [one.service for one in parts.silent([], PATIENCE_S)] == ["placer", "binder"]


def test_agents_of_two_nodes_on_one_host_are_two() -> None:
    parts = Parts(0.0)
    all_report(parts, 20.0)
    for node in ("n1", "n2"):
        parts.hear(report("node-agent", "on-one-host", node=node), 20.0)

    assert parts.silent([NodeName("n1"), NodeName("n2")], 21.0) == []


def test_a_node_with_devices_and_without_an_agent_is_named() -> None:
    parts = Parts(0.0)
    all_report(parts, 20.0)
    parts.hear(report("node-agent", "agent-a", node="n1"), 20.0)

    (missed,) = parts.silent([NodeName("n1"), NodeName("n2")], 21.0)

    assert missed.text == "no node-agent of n2 is heard of"


def test_a_replica_that_is_not_ready_is_named_with_its_own_words() -> None:
    parts = Parts(0.0)
    all_report(parts, 20.0)
    parts.hear(report("binder", missing=("nats: not connected",)), 20.0)

    (missed,) = parts.silent([], 21.0)

    assert missed.text == "binder (binder) is not ready: nats: not connected"


# Rounds


def test_a_reader_hears_what_changed_since_its_place() -> None:
    hub = Hub()
    hub.publish({("device", "a")})
    place = hub.place
    hub.publish({("device", "b")})
    hub.publish({TICKER, ("device", "b")})

    assert hub.since(place) == frozenset({("device", "b"), TICKER})
    assert hub.since(hub.place) == frozenset()


@pytest.mark.parametrize("place", ["", "other-1", "x", "{life}-9", "{life}--1"])
def test_a_place_that_nobody_knows_means_to_start_anew(place: str) -> None:
    hub = Hub()
    hub.publish({TICKER})

    assert hub.since(place.format(life=hub.life)) is None


def test_a_reader_that_is_too_far_behind_starts_anew() -> None:
    hub = Hub()
    place = hub.place
    for _ in range(ROUNDS_KEPT):
        hub.publish({TICKER})

    assert hub.since(place) == frozenset({TICKER})
    hub.publish({TICKER})
    assert hub.since(place) is None


# Settings


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
def test_what_is_this_machine(address: str, here: bool) -> None:
    assert is_loopback(address) is here


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"listen": "0.0.0.0:80"}, "--auth none would show everything to anybody"),
        ({"auth": "both"}, "none of none, tokens, kube"),
        ({"tokens": "t"}, "add --auth tokens"),
        ({"trace_url": "javascript:alert(1)"}, "no http://"),
    ],
)
def test_settings_that_would_let_anybody_in_are_refused(changes: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        DashboardSettings(**changes).check()

"""What the page shows of devices, leases and who waits, from what was read last."""

from hypothesis import given
from hypothesis import strategies as st

from services.dashboard.api_responses import device_shape, everything, state_shape, waiting_shape
from services.dashboard.projection import NAMESPACES, WAITING, Projection
from services.dashboard.static_page import page
from shared.model.events.pod_events import (
    PodBound,
)
from shared.model.lease import Lease, LeaseState, MigPlacement
from shared.model.names import DeviceUuid, NodeName, PodUid
from tests.support import build
from tests.support.dashboard.board import EVIL, account, budget, lease, projected, waiting


def test_a_lease_is_in_its_device_with_all_that_is_said_of_it() -> None:
    board = projected(account(lease(namespace="team", name="train", created_at=7.0)))

    shape = device_shape(board.devices[DeviceUuid("GPU-n1-0")], everything)

    (share,) = shape["shares"]
    assert shape["used_mib"] == share["memory_mib"] == 1000
    assert (share["namespace"], share["name"], share["container"]) == ("team", "train", "main")
    assert (share["state"], share["created_at"], share["slot"]) == ("bound", 7.0, 0)


def test_an_instance_is_shown_with_its_profile_and_position() -> None:
    place = MigPlacement(layout="g1", position=2, profile="1g.10gb")
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

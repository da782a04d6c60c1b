"""The devices, leases and waiting pods of the page, from the latest reads; a pod to try."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from services.api.first_pod import EXAMPLES, first_pod
from services.api.projection import NAMESPACES, WAITING, Projection
from services.api.static_page import page
from services.webhook.admission import AdmissionPolicy, decide
from shared.model.events.pod_events import PodBound
from shared.model.lease import Lease, LeaseState, MigPlacement
from shared.model.names import DeviceUuid, NodeName, PodUid
from tests.support import build
from tests.support.api.board import EVIL, budget, lease, node_totals, projected, seen, waiting
from tests.support.webhook.reviews import reviewed


@pytest.mark.parametrize("resource", EXAMPLES)
def test_the_pod_to_try_is_admitted_and_requests_a_gpu(resource: str) -> None:
    manifest = first_pod(["other", resource])
    assert manifest is not None
    pod = reviewed(yaml.safe_load(manifest), "default")

    decision = decide(pod, AdmissionPolicy())

    assert decision.allowed, decision.message
    assert decision.requests_gpu
    assert resource in manifest


def test_there_is_none_if_no_node_serves_a_resource() -> None:
    assert first_pod([]) is None


def test_a_device_contains_its_leases_with_their_fields() -> None:
    board = projected(node_totals(lease(namespace="team", name="train", created_at=7.0)))

    device = board.devices[DeviceUuid("GPU-n1-0")]

    (share,) = device.shares
    assert device.used_memory_mib == share.memory_mib == 1000
    assert (share.namespace, share.name, share.container) == ("team", "train", "main")
    assert (share.state, share.created_at, share.slot) == ("bound", 7.0, 0)


def test_an_instance_is_shown_with_its_profile_and_position() -> None:
    place = MigPlacement(layout="g1", position=2, profile="1g.10gb")
    one = build.lease("p", "n1", build.share("GPU-n1-0", slot=2, mig=place))

    board = projected(node_totals(one))

    (share,) = board.devices[DeviceUuid("GPU-n1-0")].shares
    assert share.mig == place


def test_a_duplicate_changes_nothing() -> None:
    board, same = Projection(), node_totals(lease())

    first = board.update_nodes([], [same])

    assert {("node", "n1"), ("device", "GPU-n1-0"), NAMESPACES} <= first
    assert board.update_nodes(["n1"], [same]) == frozenset()  # type: ignore[list-item]


def test_only_changes_are_returned() -> None:
    board = projected(node_totals(lease()))

    changed = board.update_nodes([], [node_totals(lease(state=LeaseState.ACTIVE))])

    assert changed == {("device", "GPU-n1-0"), NAMESPACES}


def test_a_requested_node_that_is_not_found_is_removed_with_its_devices() -> None:
    board = projected(node_totals(lease()))

    changed = board.update_nodes([NodeName("n1")], [])

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
def test_the_projection_is_the_latest_read_after_any_history(history: list[list[Lease]]) -> None:
    board = Projection()
    for leases in history:
        board.update_nodes([], [node_totals(*leases)])

    fresh = projected(node_totals(*history[-1]))
    assert board.devices == fresh.devices
    assert board.namespaces() == fresh.namespaces()


def test_the_queue_is_by_priority_then_by_age_and_positions_count_all_pods() -> None:
    board = Projection()
    board.update_waiting([waiting("late", since=9), waiting("early", since=1, namespace="b")])
    board.update_waiting([waiting("first", priority=5, since=20)], requested=[PodUid("first")])

    queue = seen(board, lambda namespace: namespace == "a").queue()

    assert [(pod.name, pod.position) for pod in queue.pods] == [("first", 1), ("late", 3)]
    assert (queue.total, queue.hidden) == (3, 1)


def test_a_requested_pod_that_does_not_wait_leaves_the_queue() -> None:
    board = Projection()
    board.update_waiting([waiting("p1"), waiting("p2")])

    changed = board.update_waiting([], requested=[PodUid("p1")])

    assert changed == {WAITING, NAMESPACES}
    assert list(board.waiting) == ["p2"]
    assert board.update_waiting([], requested=[PodUid("p1")]) == frozenset()


def test_only_the_use_of_other_namespaces_is_shown() -> None:
    secret = lease("uid-secret", namespace="secret", name="hidden-name", dialect="d", gang="g")
    board = projected(node_totals(secret, lease("mine", 1, namespace="mine")))
    board.update_waiting([waiting("waits", namespace="secret")])
    board.add_events([PodBound(lease=secret)], 1.0)
    board.update_budgets([budget("secret")])

    state = seen(board, {"mine"}.__contains__, now=2.0).state("x")

    assert "secret" not in str(state)
    assert "hidden-name" not in str(state)
    assert "waits" not in str(state.waiting.pods)
    (share,) = next(one for one in state.devices if one.index == 0).shares
    hidden = {"pod", "namespace", "name", "container", "dialect", "gang", "created_at", "fence"}
    assert not any(getattr(share, name) for name in hidden)
    assert (share.state, share.memory_mib, share.slot) == ("bound", 1000, 0)
    assert [one.namespace for one in state.namespaces] == ["mine"]


def test_names_are_escaped_in_the_page_without_scripts() -> None:
    board = projected(node_totals(lease(namespace=EVIL, name=EVIL), name="n1"))
    board.update_waiting([waiting("w", namespace=EVIL)])

    text = page(seen(board).state("x"), number=1, only_table=True, signed_in=False)

    assert "<img src=x" not in text
    assert "<script" not in text
    assert "&lt;img src=x onerror=&quot;alert(1)&quot;&gt;" in text


def test_many_devices_are_on_pages_with_links() -> None:
    board = projected(node_totals(devices=250))

    text = page(seen(board).state("x"), number=2, only_table=False, signed_in=False)

    assert "page 2 of 3" in text
    assert text.count("Tesla V100") == 100
    assert 'href="/?page=1"' in text
    assert 'href="/?page=3"' in text

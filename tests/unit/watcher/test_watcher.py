"""What the watcher says of pods."""

from dataclasses import replace

import pytest

from services.watcher.changes import TURNS, Nodes, Pods
from services.watcher.observed_pod import PodSeen
from shared.model.events.pod_events import PodGated, PodQueued, PodRejected, PodTerminated
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.request import PodRequest

WAITING = PodSeen(
    pod=PodUid("u1"),
    namespace=Namespace("ns"),
    name="p",
    resource_version="5",
    ours=True,
    created_at=100.0,
    resources={"cpu": 500, "pods": 1},
    request=PodRequest(priority=1),
)


BOUND = replace(WAITING, node=NodeName("a"), leased=True, resource_version="6")


FOREIGN = replace(BOUND, pod=PodUid("u2"), ours=False, leased=False)


def test_a_waiting_pod_is_told_once_however_often_its_status_changes() -> None:
    known = Pods()

    first = known.see(WAITING, None)
    again = known.see(replace(WAITING, resource_version="7", explained=True), WAITING)

    assert [type(event) for event in first] == [PodQueued]
    assert again == []


def test_a_pod_whose_request_changes_is_told_again() -> None:
    known = Pods()
    known.see(WAITING, None)

    events = known.see(replace(WAITING, request=PodRequest(priority=2)), WAITING)

    assert [type(event) for event in events] == [PodQueued]


def test_a_pod_that_cannot_be_read_is_rejected_with_the_reason() -> None:
    events = Pods().see(replace(WAITING, request=None, fault="cores 101"), None)

    assert [(type(e), getattr(e, "reason", "")) for e in events] == [(PodRejected, "cores 101")]


def test_a_bound_pod_that_ends_is_gone_once() -> None:
    known = Pods()
    known.see(BOUND, None)
    ended = replace(BOUND, phase="Succeeded")

    events = [*known.see(ended, BOUND), *known.see(ended, ended), *known.miss(ended)]

    assert [(type(e), getattr(e, "phase", "")) for e in events] == [(PodTerminated, "Succeeded")]


def test_a_deleted_pod_is_gone_without_a_phase() -> None:
    known = Pods()
    known.see(BOUND, None)

    assert [
        (type(e), e.node, e.phase) for e in known.miss(BOUND) if isinstance(e, PodTerminated)
    ] == [(PodTerminated, "a", "")]


@pytest.mark.parametrize(
    "pod",
    [
        replace(WAITING, ours=False),
        replace(WAITING, deleting=True),
        replace(WAITING, gated=True),
        BOUND,
    ],
    ids=["not ours", "deleting", "gated", "bound"],
)
def test_pods_that_want_nothing_from_us_are_not_queued(pod: PodSeen) -> None:
    assert Pods().see(pod, None) == []


def test_a_pod_at_the_budgets_gate_is_told_once_and_queued_when_the_gate_is_open() -> None:
    known, held = Pods(), replace(WAITING, gated=True, held=True, priority=3)

    first = known.see(held, None)
    again = known.see(replace(held, resource_version="7"), held)
    reminded = known.again(9)
    turns = [event for turn in range(TURNS) for event in known.take_turn(5, turn)]
    opened = known.see(WAITING, held)

    assert [(type(event), event.pod) for event in first] == [(PodGated, WAITING.pod)]
    assert again == []
    assert [type(event) for event in reminded] == [PodGated]
    assert [type(event) for event in turns] == [PodGated]
    assert [type(event) for event in opened] == [PodQueued]
    assert known.held == {}
    assert [type(event) for event in known.again(10)] == [PodQueued]


def test_a_gated_pod_that_is_deleted_is_held_no_longer() -> None:
    known, held = Pods(), replace(WAITING, gated=True, held=True)
    known.see(held, None)

    known.see(replace(held, deleting=True), held)

    assert known.again(1) == []


def test_only_pods_without_a_lease_occupy_their_node() -> None:
    known = Pods()
    told = Nodes(known)
    told.see(NodeFacts(name=NodeName("a")), now_s=1.0)
    known.see(BOUND, None)
    known.see(FOREIGN, None)

    (change,) = told.occupied(now_s=2.0)

    assert change.node.used_by_others == {"cpu": 500, "pods": 1}
    assert told.occupied(now_s=2.0) == []
    known.miss(FOREIGN)
    assert [c.node.used_by_others for c in told.occupied(now_s=2.0)] == [{}]


def test_unexplained_pods_are_told_again_and_the_ids_differ() -> None:
    known = Pods()
    (first,) = known.see(WAITING, None)

    (second,) = known.again(1, unexplained_before=101.0)

    assert first.event_id != second.event_id
    assert known.again(2, unexplained_before=99.0) == []


def test_explained_pods_have_their_turn_to_be_told_again_once_in_a_round() -> None:
    known = Pods()
    for number in range(50):
        pod = replace(WAITING, pod=PodUid(f"u{number}"), explained=number > 0)
        known.see(pod, None)

    told = [event for turn in range(TURNS) for event in known.take_turn(turn + 1, turn)]

    assert sorted(event.pod for event in told) == sorted(f"u{n}" for n in range(1, 50))
    assert not any(getattr(event, "unexplained", True) for event in told)


def test_a_pod_that_nobody_explained_is_told_again_as_such() -> None:
    known = Pods()
    (first,) = known.see(WAITING, None)

    (again,) = known.again(1)

    assert isinstance(first, PodQueued)
    assert isinstance(again, PodQueued)
    assert (first.unexplained, again.unexplained) == (False, True)


def test_a_pod_whose_binding_failed_is_told_again_if_it_still_waits() -> None:
    known = Pods()
    (first,) = known.see(WAITING, None)

    (again,) = known.tell([WAITING.pod, PodUid("gone")], 7)

    assert isinstance(again, PodQueued)
    assert (again.pod, again.event_id) != (first.pod, first.event_id)
    assert again.pod == WAITING.pod

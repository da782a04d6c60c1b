"""Which events follow from the observed states of pods and nodes."""

import time
from dataclasses import replace

import pytest
from msgspec import structs

from services.watcher.trackers import RESYNC_SHARDS, NodeTracker, PodTracker
from shared.model.events.pod_events import PodGated, PodQueued, PodRejected, PodTerminated
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.request import PodRequest
from shared.pods.observed_pod import ObservedPod

WAITING = ObservedPod(
    pod=PodUid("u1"),
    namespace=Namespace("ns"),
    name="p",
    resource_version="5",
    ours=True,
    created_at=100.0,
    resources={"cpu": 500, "pods": 1},
    request=PodRequest(priority=1),
)


BOUND = structs.replace(WAITING, node=NodeName("a"), has_lease=True, resource_version="6")


FOREIGN = structs.replace(BOUND, pod=PodUid("u2"), ours=False, has_lease=False)


def test_a_pending_pod_is_published_once_however_often_its_status_changes() -> None:
    pods = PodTracker()

    first = pods.update(WAITING, None)
    again = pods.update(structs.replace(WAITING, resource_version="7", shown=1), WAITING)

    assert [type(event) for event in first] == [PodQueued]
    assert again == []


def test_a_leased_pod_uses_of_its_node_beside_the_lease_what_it_has_grown_by() -> None:
    pods = PodTracker()
    pods.update(BOUND, None)
    grown = structs.replace(BOUND, grown={"cpu": 7000})

    pods.update(grown, BOUND)
    assert pods.with_usage(NodeFacts(name=NodeName("a"))).used_by_others == {"cpu": 7000}
    pods.remove(grown)
    assert pods.with_usage(NodeFacts(name=NodeName("a"))).used_by_others == {}


def test_a_pod_whose_request_changes_is_published_again() -> None:
    pods = PodTracker()
    pods.update(WAITING, None)

    events = pods.update(structs.replace(WAITING, request=PodRequest(priority=2)), WAITING)

    assert [type(event) for event in events] == [PodQueued]


def test_a_pod_with_an_invalid_request_is_rejected_with_the_reason() -> None:
    events = PodTracker().update(
        structs.replace(WAITING, request=None, request_error="cores 101"), None
    )

    assert [(type(e), getattr(e, "reason", "")) for e in events] == [(PodRejected, "cores 101")]


def test_a_bound_pod_terminates_once() -> None:
    pods = PodTracker()
    pods.update(BOUND, None)
    ended = structs.replace(BOUND, phase="Succeeded")

    events = [*pods.update(ended, BOUND), *pods.update(ended, ended), *pods.remove(ended)]

    assert [(type(e), getattr(e, "phase", "")) for e in events] == [(PodTerminated, "Succeeded")]


def test_a_deleted_pod_terminates_without_a_phase() -> None:
    pods = PodTracker()
    pods.update(BOUND, None)

    assert [
        (type(e), e.node, e.phase) for e in pods.remove(BOUND) if isinstance(e, PodTerminated)
    ] == [(PodTerminated, "a", "")]


@pytest.mark.parametrize(
    "pod",
    [
        structs.replace(WAITING, ours=False),
        structs.replace(WAITING, gated=True),
        BOUND,
    ],
    ids=["not ours", "gated", "bound"],
)
def test_bound_finished_and_foreign_pods_are_not_queued(pod: ObservedPod) -> None:
    assert PodTracker().update(pod, None) == []


def test_a_waiting_pod_that_a_finalizer_keeps_has_ended_once_it_is_deleted() -> None:
    pods, deleting = PodTracker(), structs.replace(WAITING, deleting=True)
    pods.update(WAITING, None)

    ended = pods.update(deleting, WAITING)

    assert [type(event) for event in ended] == [PodTerminated]
    assert pods.update(structs.replace(deleting, resource_version="9"), deleting) == []
    assert [type(event) for event in PodTracker().update(deleting, None)] == [PodTerminated]


def test_a_bound_pod_that_is_deleted_has_not_ended() -> None:
    pods, deleting = PodTracker(), structs.replace(BOUND, deleting=True)
    pods.update(BOUND, None)

    assert pods.update(deleting, BOUND) == []


def test_a_pod_at_the_budgets_gate_is_published_once_and_queued_without_the_gate() -> None:
    pods, gated = PodTracker(), structs.replace(WAITING, gated=True, budget_gated=True, priority=3)

    first = pods.update(gated, None)
    again = pods.update(structs.replace(gated, resource_version="7"), gated)
    resynced = pods.resync(9)
    turns = [event for turn in range(RESYNC_SHARDS) for event in pods.resync_shard(5, turn)]
    opened = pods.update(WAITING, gated)

    assert [(type(event), event.pod) for event in first] == [(PodGated, WAITING.pod)]
    assert again == []
    assert [type(event) for event in resynced] == [PodGated]
    assert [type(event) for event in turns] == [PodGated]
    assert [type(event) for event in opened] == [PodQueued]
    assert pods.budget_gated == {}
    assert [type(event) for event in pods.resync(10)] == [PodQueued]


def test_a_gated_pod_that_is_deleted_is_forgotten() -> None:
    pods, gated = PodTracker(), structs.replace(WAITING, gated=True, budget_gated=True)
    pods.update(gated, None)

    pods.update(structs.replace(gated, deleting=True), gated)

    assert pods.resync(1) == []


def test_only_pods_without_a_lease_count_as_usage_of_their_node() -> None:
    pods = PodTracker()
    nodes = NodeTracker(pods)
    nodes.update(NodeFacts(name=NodeName("a")), 1)
    pods.update(BOUND, None)
    pods.update(FOREIGN, None)

    (change,) = nodes.update_usage()

    assert change.node.used_by_others == {"cpu": 500, "pods": 1}
    assert nodes.update_usage() == []
    pods.remove(FOREIGN)
    assert [c.node.used_by_others for c in nodes.update_usage()] == [{}]


def test_unexplained_pods_are_published_again() -> None:
    pods = PodTracker()
    (first,) = pods.update(WAITING, None)

    assert pods.resync_unexplained(1) == pods.resync_unexplained(2) == [], "not for long yet"
    (second,) = pods.resync_unexplained(3)

    assert isinstance(first, PodQueued)
    assert second == replace(first, requeue_number=-3)


def test_pods_that_wait_for_their_turn_are_published_again_less_and_less_often() -> None:
    pods = PodTracker()
    pods.update(WAITING, None)

    published = [number for number in range(1, 80) if pods.resync_unexplained(number)]

    assert published == [3, 6, 12, 24, 48, 72]


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_the_clock_of_the_api_server_does_not_delay_unexplained_pods(ahead_s: float) -> None:
    pods = PodTracker()
    pods.update(structs.replace(WAITING, created_at=time.time() + ahead_s), None)

    assert [len(pods.resync_unexplained(number)) for number in range(1, 5)] == [0, 0, 1, 0]


def test_each_explained_pod_is_published_again_in_one_shard() -> None:
    pods = PodTracker()
    for number in range(50):
        pod = structs.replace(WAITING, pod=PodUid(f"u{number}"), shown=number)
        pods.update(pod, None)

    published = [
        event for turn in range(RESYNC_SHARDS) for event in pods.resync_shard(turn + 1, turn)
    ]

    assert sorted(event.pod for event in published) == sorted(f"u{n}" for n in range(1, 50))
    assert all(isinstance(event, PodQueued) and event.shown for event in published)


def test_a_pod_whose_binding_failed_is_requeued_if_it_is_still_pending() -> None:
    pods = PodTracker()
    (first,) = pods.update(WAITING, None)

    (again,) = pods.requeue([WAITING.pod, PodUid("gone")], 7)

    assert isinstance(first, PodQueued)
    assert again == replace(first, requeue_number=-7)

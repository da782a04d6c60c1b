"""Which events follow from the observed states of pods and nodes."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from services.watcher.node_trackers import NodeTracker
from services.watcher.pod_tracker import FORGET_S, RESYNC_SHARDS, BindingBackoff, PodTracker
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiPod
from shared.model.bounds import MOST, MOST_ENTRIES
from shared.model.devices.node import AntiAffinityTerm, LabelRequirement, NodeFacts
from shared.model.events.pod_events import (
    NodeChanged,
    PodGated,
    PodQueued,
    PodRejected,
    PodTerminated,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import PodRequest
from shared.nats import wire
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_anti_affinity import PodAntiAffinity
from shared.pods.pod_parser import PodParser

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


REPELS = (
    PodAntiAffinity(
        topology_key="kubernetes.io/hostname", selector=(), namespaces=frozenset({BOUND.namespace})
    ),
)
NODE = NodeFacts(name=NodeName("a"), allocatable={"cpu": 4000, "pods": 110})


INVALID = structs.replace(WAITING, request=None, request_error="cores 101")
ENDED = structs.replace(BOUND, phase="Succeeded")
DELETING = structs.replace(WAITING, deleting=True)


def test_a_pod_whose_binding_always_fails_is_retried_after_pauses_up_to_30_s() -> None:
    backoff = BindingBackoff()
    now = 0.0
    pauses = list[float]()

    assert backoff.add([WAITING.pod], now) == [WAITING.pod]
    for _ in range(8):
        failed_at = now
        assert backoff.add([WAITING.pod], now) == []
        assert backoff.add([WAITING.pod], now) == []
        while not (due := backoff.due(now)):
            now += 0.5
        assert due == [WAITING.pod]
        pauses.append(now - failed_at)

    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff.due(now + FORGET_S) == []
    assert backoff.add([WAITING.pod], now + FORGET_S) == [WAITING.pod]


def newer(pod: ObservedPod, **changes: Any) -> ObservedPod:
    return structs.replace(pod, resource_version="9", **changes)


@pytest.mark.parametrize(
    ("observed", "published"),
    [
        pytest.param((WAITING, newer(WAITING, shown=1)), [PodQueued], id="a status changes"),
        pytest.param(
            (WAITING, newer(WAITING, request=PodRequest(priority=2))),
            [PodQueued, PodQueued],
            id="a request changes",
        ),
        pytest.param((INVALID,), [PodRejected], id="an invalid request"),
        pytest.param((BOUND, ENDED, ENDED, None), [PodTerminated], id="a bound pod ends once"),
        pytest.param((BOUND, None), [PodTerminated], id="deleted"),
        pytest.param((structs.replace(WAITING, ours=False),), [], id="not ours"),
        pytest.param((structs.replace(WAITING, gated=True),), [], id="gated"),
        pytest.param((BOUND, structs.replace(BOUND, deleting=True)), [], id="bound and deleting"),
        pytest.param(
            (WAITING, DELETING, newer(DELETING)), [PodQueued, PodTerminated], id="a finalizer"
        ),
        pytest.param((DELETING,), [PodTerminated], id="a finalizer, seen late"),
    ],
)
def test_what_is_published_of_a_pod(
    observed: Sequence[ObservedPod | None], published: list[type]
) -> None:
    pods = PodTracker()
    before = None
    events = list[Any]()
    for now in observed:
        if now is not None:
            events += pods.update(now, before)
        elif before is not None:
            events += pods.remove(before)
        before = now

    assert [type(event) for event in events] == published
    for event in events:
        if isinstance(event, PodTerminated) and event.node:
            assert event.phase == ("Succeeded" if ENDED in observed else "")
        assert not isinstance(event, PodRejected) or event.reason == "cores 101"


def test_a_leased_pod_uses_of_its_node_beside_the_lease_what_it_has_grown_by() -> None:
    pods = PodTracker()
    pods.update(BOUND, None)
    grown = structs.replace(BOUND, grown={"cpu": 7000})

    pods.update(grown, BOUND)
    assert pods.with_usage(NODE).used_by_others == {"cpu": 7000}
    pods.remove(grown)
    assert pods.with_usage(NODE).used_by_others == {}


def test_a_node_whose_gpus_pods_reserve_for_another_scheduler_says_so_until_they_end() -> None:
    pods = PodTracker()
    pod = structs.replace(FOREIGN, namespace=Namespace("kai-resource-reservation"))

    pods.update(pod, None)
    reserved = pods.with_usage(NODE).other_manager
    pods.update(structs.replace(pod, phase="Failed"), pod)
    ended = pods.with_usage(NODE).other_manager

    assert reserved == "pods of namespace kai-resource-reservation"
    assert (ended, pods.changed_nodes) == ("", {pod.node})


def test_pods_of_any_amounts_leave_the_facts_of_their_node_within_bounds() -> None:
    pods = PodTracker()
    nodes = NodeTracker(pods)
    for number in range(2):
        names = {f"example.com/{number}-{each}": 1 for each in range(MOST_ENTRIES)}
        resources = names | {"cpu": MOST, "example.com/many": MOST}
        pod = structs.replace(FOREIGN, pod=PodUid(f"many-{number}"), resources=resources)
        pods.update(pod, None)

    [change] = nodes.update(NODE, 1)

    assert wire.decode(wire.encode([change]), NodeChanged) == [change]
    assert change.node.used_by_others == {"cpu": MOST}


def test_a_pod_at_the_budgets_gate_is_published_once_and_queued_without_the_gate() -> None:
    pods = PodTracker()
    gated = structs.replace(WAITING, gated=True, budget_gated=True, priority=3)

    first = pods.update(gated, None)
    again = pods.update(structs.replace(gated, resource_version="7"), gated)
    resynced = pods.resync(9)
    turns = [event for turn in range(RESYNC_SHARDS) for event in pods.resync_shard(5, turn)]
    opened = pods.update(WAITING, gated)

    [event] = first
    assert isinstance(event, PodGated)
    assert event.pod == WAITING.pod
    assert again == []
    assert [type(event) for event in resynced] == [PodGated]
    assert [type(event) for event in turns] == [PodGated]
    assert [type(event) for event in opened] == [PodQueued]
    assert pods.budget_gated == {}
    assert [type(event) for event in pods.resync(10)] == [PodQueued]


def test_a_gated_pod_that_is_deleted_is_forgotten() -> None:
    pods = PodTracker()
    gated = structs.replace(WAITING, gated=True, budget_gated=True)
    pods.update(gated, None)

    pods.update(structs.replace(gated, deleting=True), gated)

    assert pods.resync(1) == []


def test_only_pods_without_a_lease_count_as_usage_of_their_node() -> None:
    pods = PodTracker()
    nodes = NodeTracker(pods)
    nodes.update(NODE, 1)
    pods.update(BOUND, None)
    pods.update(FOREIGN, None)

    (change,) = nodes.update_usage()

    assert change.node.used_by_others == {"cpu": 500, "pods": 1}
    assert nodes.update_usage() == []
    pods.remove(FOREIGN)
    assert [c.node.used_by_others for c in nodes.update_usage()] == [{}]


def test_nodes_that_pods_name_and_that_do_not_exist_are_forgotten_with_the_pods() -> None:
    pods = PodTracker()
    repelling = structs.replace(FOREIGN, repels=REPELS, ours=True)
    invented = [
        structs.replace(repelling, pod=PodUid(f"p{number}"), node=NodeName(f"invented-{number}"))
        for number in range(100)
    ]
    for pod in invented:
        pods.update(pod, None)
    assert len(pods.usage) == len(pods.anti_affinity) == len(pods.repelling_pods) == 100

    for pod in invented:
        pods.remove(pod)

    assert pods.usage == pods.anti_affinity == pods.repelling_pods == {}


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


def test_each_explained_pod_is_published_again_in_one_shard() -> None:
    pods = PodTracker()
    for number in range(50):
        pod = structs.replace(WAITING, pod=PodUid(f"u{number}"), shown=number)
        pods.update(pod, None)

    published = [
        event for turn in range(RESYNC_SHARDS) for event in pods.resync_shard(turn + 1, turn)
    ]

    queued = [event for event in published if isinstance(event, PodQueued) and event.shown]
    assert sorted(event.pod for event in queued) == sorted(f"u{n}" for n in range(1, 50))
    assert len(queued) == len(published)


def test_a_pod_whose_binding_failed_is_requeued_if_it_is_still_pending() -> None:
    pods = PodTracker()
    (first,) = pods.update(WAITING, None)

    (again,) = pods.requeue([WAITING.pod, PodUid("gone")], 7)

    assert isinstance(first, PodQueued)
    assert again == replace(first, requeue_number=-7)


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
HOST = "kubernetes.io/hostname"
PARSER = PodParser(frozenset({"leasehold"}), Rules())
NOISY = {"matchLabels": {"app": "noisy"}}
IS_NOISY = (LabelRequirement("app", "In", ("noisy",)),)


def running(name: str = "p", *terms: dict[str, Any], **fields: Any) -> ObservedPod:
    spec = {
        "nodeName": "n1",
        "containers": [{"name": "c"}],
        "affinity": {"podAntiAffinity": {REQUIRED: [{"topologyKey": HOST, **t} for t in terms]}},
    }
    status = {"phase": fields.pop("phase", "Running")}
    meta = {"name": name, "namespace": "team-a", "uid": name, **fields}
    raw = msgspec.json.encode({"metadata": meta, "spec": spec, "status": status})
    return PARSER.parse(msgspec.json.decode(raw, type=ApiPod))


class Watched:
    """One node n1, and what is published of it."""

    def __init__(self) -> None:
        self.pods = PodTracker()
        self.nodes = NodeTracker(self.pods)
        self.nodes.update(NodeFacts(name=NodeName("n1")), 1)

    def terms(self) -> tuple[AntiAffinityTerm, ...]:
        self.nodes.update_usage()
        return self.nodes.published[NodeName("n1")].anti_affinity


def of(*namespaces: str, **fields: Any) -> AntiAffinityTerm:
    names = tuple(map(Namespace, namespaces))
    return AntiAffinityTerm(topology_key=HOST, selector=IS_NOISY, namespaces=names, **fields)


@pytest.mark.parametrize(
    ("fields", "published"),
    [
        ({}, of("team-a")),
        ({"namespaces": ["team-c", "team-b"]}, of("team-b", "team-c")),
        ({"namespaceSelector": {}}, of(all_namespaces=True)),
        ({"namespaceSelector": {"matchLabels": {"tier": "gold"}}}, of("team-b")),
        (
            {
                "namespaces": ["team-c"],
                "namespaceSelector": {
                    "matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]
                },
            },
            of("team-a", "team-c"),
        ),
    ],
)
def test_namespaces_are_those_that_kubernetes_documents(
    fields: dict[str, Any], published: AntiAffinityTerm
) -> None:
    watched = Watched()
    gold = {"tier": "gold"}
    plain = dict[str, str]()
    watched.pods.update_namespaces({Namespace("team-a"): plain, Namespace("team-b"): gold})

    watched.pods.update(running("p", {"labelSelector": NOISY, **fields}), None)

    assert watched.terms() == (published,)


def test_expressions_are_read_and_a_term_without_a_selector_selects_nothing() -> None:
    watched = Watched()
    expression = {"key": "app", "operator": "Exists"}

    watched.pods.update(running("p", {"labelSelector": {"matchExpressions": [expression]}}), None)
    watched.pods.update(running("q", {}), None)

    (term,) = watched.terms()
    assert term.selector == (LabelRequirement("app", "Exists"),)


def test_many_selectors_are_not_compared_with_every_namespace() -> None:
    watched = Watched()
    watched.pods.update_namespaces({Namespace(f"n{n}"): {"name": f"n{n}"} for n in range(3000)})
    for pod in range(50):
        terms = [
            {
                "labelSelector": NOISY,
                "namespaceSelector": {
                    "matchExpressions": [
                        {"key": "name", "operator": "In", "values": [f"{pod}-{n}"]}
                    ]
                },
            }
            for n in range(150)
        ]
        watched.pods.update(running(f"p{pod}", *terms), None)
    began = time.process_time()

    assert of(all_namespaces=True) in watched.terms()
    assert time.process_time() - began < 1


def test_a_term_stays_as_long_as_a_pod_with_it_runs() -> None:
    watched = Watched()
    term = {"labelSelector": NOISY}
    one, two = running("one", term), running("two", term)
    watched.pods.update(one, None)
    watched.pods.update(two, None)

    watched.pods.update(running("one", term, phase="Succeeded"), one)
    assert watched.terms() == (of("team-a"),)
    watched.pods.remove(two)
    assert watched.terms() == ()


def test_labels_of_namespaces_are_followed() -> None:
    watched = Watched()
    team_b = Namespace("team-b")
    selector = {"namespaceSelector": {"matchLabels": {"tier": "gold"}}, "labelSelector": NOISY}
    watched.pods.update(running("p", selector), None)
    assert watched.terms() == (of(),)

    watched.pods.update_namespaces({team_b: {"tier": "gold"}})
    assert watched.terms() == (of("team-b"),)
    watched.pods.update_namespaces({team_b: None})
    assert watched.terms() == (of(),)


def test_a_waiting_pod_is_published_with_its_labels_and_again_when_they_change() -> None:
    tracker = PodTracker()

    def waiting(app: str) -> ObservedPod:
        spec = {"schedulerName": "leasehold", "containers": [{"name": "c"}]}
        meta = {"name": "p", "namespace": "ns", "uid": "u", "labels": {"app": app}}
        raw = msgspec.json.encode({"metadata": meta, "spec": spec})
        return PARSER.parse(msgspec.json.decode(raw, type=ApiPod))

    first = waiting("a")
    same = waiting("a")
    changed = waiting("b")

    (queued,) = tracker.update(first, None)
    assert isinstance(queued, PodQueued)
    assert queued.labels == {"app": "a"}
    assert tracker.update(same, first) == []
    (again,) = tracker.update(changed, same)
    assert isinstance(again, PodQueued)
    assert again.labels == {"app": "b"}


def test_terms_that_no_api_server_stores_are_an_error_of_the_request() -> None:
    spec = {
        "schedulerName": "leasehold",
        "affinity": {"podAntiAffinity": {REQUIRED: [{"topologyKey": 1}]}},
        "containers": [{"name": "c"}],
    }
    raw = msgspec.json.encode({"metadata": {"uid": "u"}, "spec": spec})

    seen = PARSER.parse(msgspec.json.decode(raw, type=ApiPod))

    assert "podAntiAffinity" in seen.request_error


def test_pods_that_may_have_leases_are_named_while_they_repel_others() -> None:
    watched = Watched()
    asked = structs.replace(running("asked", {"labelSelector": NOISY}), ours=True)
    ended = structs.replace(asked, phase="Succeeded")
    node = NodeName("n1")

    watched.pods.update(running("other", {"labelSelector": NOISY}), None)
    watched.pods.update(asked, None)
    watched.nodes.update_usage()
    named = watched.nodes.published[node].repelling_pods
    watched.pods.update(ended, asked)
    watched.nodes.update_usage()

    assert named == ("asked",)
    assert watched.nodes.published[node].repelling_pods == ()

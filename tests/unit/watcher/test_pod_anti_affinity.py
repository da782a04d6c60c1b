"""Required anti-affinity, from pods of the API server to the facts of nodes."""

import time
from typing import Any

import msgspec
import pytest
from msgspec import structs

from services.watcher.trackers import NodeTracker, PodTracker
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiPod
from shared.model.events.pod_events import PodQueued
from shared.model.names import Namespace, NodeName
from shared.model.node import AntiAffinityTerm, LabelRequirement, NodeFacts
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_parser import PodParser

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
    gold, plain = {"tier": "gold"}, dict[str, str]()
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
    watched, term = Watched(), {"labelSelector": NOISY}
    one, two = running("one", term), running("two", term)
    watched.pods.update(one, None)
    watched.pods.update(two, None)

    watched.pods.update(running("one", term, phase="Succeeded"), one)
    assert watched.terms() == (of("team-a"),)
    watched.pods.remove(two)
    assert watched.terms() == ()


def test_labels_of_namespaces_are_followed() -> None:
    watched, team_b = Watched(), Namespace("team-b")
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

    first, same, changed = waiting("a"), waiting("a"), waiting("b")

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


def test_pods_that_the_extender_was_asked_about_are_named_while_they_repel_others() -> None:
    watched = Watched()
    asked = structs.replace(running("asked", {"labelSelector": NOISY}), by_kube_scheduler=True)
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

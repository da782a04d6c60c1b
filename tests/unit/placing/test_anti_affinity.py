"""Required anti-affinity of running pods keeps pods off their topology domains."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placer.rounds.decisions import DecisionContext
from shared.model.devices.node import AntiAffinityTerm, LabelRequirement
from shared.model.events.pod_events import PodQueued
from shared.model.leases.ledger import LedgerNode
from shared.model.names import Namespace, NodeName
from shared.model.requests.placement import Refusal
from shared.model.requests.request import NodeOrder, NodeRequirements, NodeTerm
from shared.placing.anti_affinity import all_domains, repelled_request, selects
from shared.placing.trial_cluster import TrialCluster
from tests.support.build import device, dice, gpu, ledger_node, pod_queued, request
from tests.support.placer.placing import index_of

ZONE = "topology.kubernetes.io/zone"
HOST = "kubernetes.io/hostname"
TEAM_A = Namespace("team-a")


def term(*selector: LabelRequirement, key: str = HOST, **fields: object) -> AntiAffinityTerm:
    return AntiAffinityTerm(
        topology_key=key,
        selector=selector,
        **({"namespaces": (TEAM_A,)} | fields),  # type: ignore[arg-type]
    )


def is_app(*values: str) -> LabelRequirement:
    return LabelRequirement("app", "In", values)


def node(name: str, *terms: AntiAffinityTerm, zone: str = "a") -> LedgerNode:
    labels = {HOST: name, ZONE: zone}
    return ledger_node(name, device(f"GPU-{name}"), labels=labels, anti_affinity=terms)


def pod(app: str = "noisy", namespace: str = "team-a", **fields: object) -> PodQueued:
    wanted = request(gpu(memory=1000), node_order=NodeOrder.SPREAD)
    fields = {"labels": {"app": app}, "wanted": wanted} | fields
    return pod_queued("p", namespace=namespace, **fields)  # type: ignore[arg-type]


class Choices:
    """A placer's decisions on its mirror."""

    def __init__(self, *nodes: LedgerNode) -> None:
        self.context = DecisionContext(index_of(*nodes), dice(7))
        self.mirror = self.context.mirror

    def choose(self, event: PodQueued) -> Refusal | set[str]:
        """Return the names of the candidates."""
        self.context.candidates.note_contention()
        answer = self.context.choose(event)
        self.mirror.drop(event.pod)
        if isinstance(answer, Refusal):
            return answer
        return {placement.node for placement in answer}


@pytest.mark.parametrize(
    ("requirement", "selected"),
    [
        (is_app("noisy", "other"), True),
        (is_app("other"), False),
        (LabelRequirement("app", "NotIn", ("other",)), True),
        (LabelRequirement("app", "NotIn", ("noisy",)), False),
        (LabelRequirement("tier", "NotIn", ("x",)), True),
        (LabelRequirement("app", "Exists"), True),
        (LabelRequirement("tier", "Exists"), False),
        (LabelRequirement("tier", "DoesNotExist"), True),
        (LabelRequirement("app", "DoesNotExist"), False),
        (LabelRequirement("tier", "In", ("x",)), False),
        (LabelRequirement("app", "Near", ("noisy",)), False),
    ],
)
def test_labels_are_selected_as_in_kubernetes(
    requirement: LabelRequirement, selected: bool
) -> None:
    assert selects(term(requirement), TEAM_A, {"app": "noisy"}) == selected


def test_a_term_without_requirements_selects_every_pod_of_its_namespaces() -> None:
    everywhere = term(namespaces=(), all_namespaces=True)

    assert selects(term(), TEAM_A, {})
    assert not selects(term(), Namespace("other"), {})
    assert selects(everywhere, Namespace("other"), {})


class CountedLabels(dict[str, str]):
    """Labels that count how often one of them is compared."""

    compared = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.compared += 1
        return super().get(key, default)


def test_a_term_of_many_pods_is_compared_once_for_a_pod() -> None:
    of_others = term(is_app("noisy"), namespaces=(Namespace("team-b"),))
    context = Choices(
        *(node(f"n{n}", term(is_app("noisy")), of_others) for n in range(20)), node("free")
    ).context
    event = pod(labels=CountedLabels({"app": "noisy"}))

    restricted = context.index.restricted(event, event.request)

    [(key, values)] = restricted.node_requirements.repelled_from
    assert key == HOST
    assert values == frozenset(f"n{n}" for n in range(20))
    assert isinstance(event.labels, CountedLabels)
    assert event.labels.compared == 1


def test_a_term_is_forgotten_with_the_last_pod_that_has_it() -> None:
    everywhere = term(is_app("noisy"), namespaces=(), all_namespaces=True)
    choices = Choices(node("n1", everywhere), node("n2", everywhere))
    index = choices.context.index
    event = pod(namespace="other")

    [(_, values)] = index.restricted(event, event.request).node_requirements.repelled_from
    assert values == {"n1", "n2"}
    for name in ("n1", "n2"):
        choices.mirror.put_node(node(name))
    assert index.restricted(event, event.request) == event.request


def test_a_pod_without_gpus_is_kept_away_too() -> None:
    choices = Choices(node("n1", term(is_app("noisy"))), node("n2"))

    assert choices.choose(pod(wanted=request())) == {"n2"}


def test_the_refusal_has_the_words_of_kube_scheduler_and_names_the_domain() -> None:
    refusal = Choices(node("n1", term(is_app("noisy"))), node("n2", zone="b")).choose(
        pod(wanted=request(gpu(memory=1), node_requirements=at("n1")))
    )

    assert isinstance(refusal, Refusal)
    assert not refusal.permanent
    assert ("ExistingAntiAffinity", 1) in refusal.counts
    assert "1 node(s) didn't satisfy existing pods anti-affinity rules" in refusal.reason
    assert refusal.nearest_nodes[0].reason.endswith(f"anti-affinity rules ({HOST}=n1)")


def at(name: str) -> NodeRequirements:
    return NodeRequirements(required=((NodeTerm(key=HOST, operator="In", values=(name,)),),))


def test_no_preemption_is_planned_on_a_node_that_repels_the_pod() -> None:
    nodes = [node("n1", term(is_app("noisy"))), node("n2")]

    wanted = repelled_request(pod(), all_domains(each.facts for each in nodes))
    cluster = TrialCluster(nodes)

    found = [cluster.placement_on(each.facts.name, wanted) for each in nodes]
    assert [each is not None for each in found] == [False, True]


APPS = st.sampled_from(["a", "b", "c"])
ZONES = st.sampled_from(["x", "y", ""])
TERMS = st.builds(
    lambda apps, key, namespaces: term(is_app(*apps), key=key, namespaces=namespaces),
    st.sets(APPS, min_size=1, max_size=2).map(sorted),
    st.sampled_from([HOST, ZONE]),
    st.sampled_from([(TEAM_A,), (Namespace("team-b"),)]),
)
STATES = st.lists(
    st.tuples(st.integers(0, 3), st.booleans(), ZONES, st.lists(TERMS, max_size=2)), max_size=12
)


@given(STATES, APPS)
def test_placements_are_those_of_a_look_at_all_pods(
    states: Sequence[tuple[int, bool, str, list[AntiAffinityTerm]]], app: str
) -> None:
    choices = Choices()
    nodes: dict[str, tuple[dict[str, str], list[AntiAffinityTerm]]] = {}
    for number, exists, zone, terms in states:
        name = f"n{number}"
        labels = {HOST: name} | ({ZONE: zone} if zone else {})
        if exists:
            nodes[name] = labels, terms
            choices.mirror.put_node(
                ledger_node(name, device(f"GPU-{name}"), labels=labels, anti_affinity=tuple(terms))
            )
        else:
            nodes.pop(name, None)
            choices.mirror.remove_node(NodeName(name))
        answer = choices.choose(pod(app))
        allowed = {
            other
            for other, (there, _) in nodes.items()
            if not any(
                app in each.selector[0].values
                and TEAM_A in each.namespaces
                and each.topology_key in here
                and there.get(each.topology_key) == here[each.topology_key]
                for here, found in nodes.values()
                for each in found
            )
        }

        chosen = set() if isinstance(answer, Refusal) else answer
        assert chosen <= allowed
        assert bool(chosen) == bool(allowed)

"""Where pods may run by their affinity to pods and by spread, as kube-scheduler decides."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from services.placer.rounds.decisions import DecisionContext, RoundDecisions, decide
from services.watcher.node_sources import parse_node
from services.watcher.node_trackers import NodeTracker
from services.watcher.pod_tracker import PodTracker
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiNode, ApiPod
from shared.model.events.pod_events import PodQueued
from shared.model.names import Namespace, PodUid
from shared.model.requests.pod_rules import MOST_SELECTIONS
from shared.placing.index.node_index import NodeIndex
from shared.placing.node_filters import check_node
from shared.placing.refusal.refusals import RULE_HINTS
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_parser import PodParser
from tests.support.affinity_case import (
    AFFINITY,
    ANTI_AFFINITY,
    HOST,
    SPREAD,
    ZONE,
    Case,
    Manifest,
    db,
    pod,
    spread,
    to,
    trains,
)
from tests.support.affinity_cases import CASES
from tests.support.build import devices, dice, ledger_node
from tests.support.placer.placing import index_of

PARSER = PodParser(frozenset({"leasehold"}), Rules())
GPU = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "1000"}
WITH_GPU = {
    "schedulerName": "leasehold",
    "containers": [{"name": "main", "image": "app", "resources": {"limits": GPU}}],
}


def parsed(manifest: Manifest, **spec: Any) -> ObservedPod:
    whole = {**manifest, "spec": {**manifest["spec"], **spec}}
    return PARSER.parse(msgspec.json.decode(msgspec.json.encode(whole), type=ApiPod))


class World:
    """What a watcher knows of a case, and the index that a placer has of it."""

    def __init__(self, case: Case) -> None:
        self.pods = PodTracker()
        self.pods.update_namespaces(
            {Namespace(name): labels for name, labels in case.namespaces.items()}
        )
        self.nodes = NodeTracker(self.pods)
        for manifest in case.nodes:
            raw = msgspec.json.encode(manifest)
            self.nodes.update(parse_node(msgspec.json.decode(raw, type=ApiNode)), 1)
        for manifest in case.running:
            self.pods.update(parsed(manifest), None)

    def queued(self, *manifests: Manifest) -> list[PodQueued]:
        """Return the events of pods that wait for the placer, as they are last published."""
        for manifest in manifests:
            self.pods.update(parsed(manifest, **WITH_GPU), None)
        self.pods.update_selected(1)
        uids = {PodUid(manifest["metadata"]["uid"]) for manifest in manifests}
        events = {e.pod: e for e in self.pods.resync(1) if isinstance(e, PodQueued)}
        return [events[uid] for uid in events if uid in uids]

    def index(self) -> NodeIndex:
        self.nodes.update_usage()
        published = self.nodes.published.values()
        return index_of(
            *(
                ledger_node(
                    facts.name,
                    *devices(4, facts.name),
                    labels=facts.labels,
                    taints=facts.taints,
                    unschedulable=facts.unschedulable,
                    used_by_others=facts.used_by_others,
                    anti_affinity=facts.anti_affinity,
                )
                for facts in published
            )
        )


def names_in(index: NodeIndex, nodes: int) -> str:
    return " ".join(sorted(node.name for node in index.sets.nodes_in(nodes)))


def in_order(names: str) -> str:
    return " ".join(sorted(names.split()))


@pytest.mark.parametrize("name", CASES)
def test_a_pod_fits_the_nodes_that_kube_scheduler_finds(name: str) -> None:
    case = CASES[name]
    world = World(case)
    [event] = world.queued(case.pod)
    index = world.index()
    request = index.restricted(event, event.request)

    fitting, excluded = index.sets.split(request)

    assert names_in(index, fitting) == in_order(case.fits)
    assert {text for (_, text), nodes in excluded.items() if nodes} == set(case.reasons)
    singly = [
        node.name
        for node in index.mirror.nodes.values()
        if check_node(request.node_requirements, node.facts) is None
    ]
    assert " ".join(sorted(singly)) == in_order(case.fits)
    if case.best:
        best = next(index.sets.by_preference(request.node_requirements, fitting))
        assert names_in(index, best) == in_order(case.best)
    elif fitting:
        assert not request.node_requirements.scores


def test_the_table_is_large_enough_to_be_worth_it() -> None:
    assert len(CASES) > 120


def group(count: int, **rules: Any) -> list[Manifest]:
    return [pod(f"train-{number}", **rules) for number in range(count)]


def decided(case: Case, waiting: Sequence[Manifest]) -> RoundDecisions:
    world = World(case)
    events = world.queued(*waiting)
    return decide(events, DecisionContext(world.index(), dice()))


def nodes_of(decisions: RoundDecisions) -> list[str]:
    return sorted(candidates[0].node for _, candidates in decisions.chosen)


def test_pods_of_one_batch_that_repel_each_other_get_nodes_of_their_own() -> None:
    decisions = decided(Case(pod=pod()), group(7, apart=[to("app=train", HOST)]))

    assert nodes_of(decisions) == ["a1", "a2", "b1", "b2", "bare", "c1"]
    [(_, refusal)] = decisions.refused
    assert f"6 {ANTI_AFFINITY}" in refusal.reason
    assert refusal.counts == (("PodAntiAffinity", 6),)
    assert refusal.hint == RULE_HINTS["PodAntiAffinity"]
    assert not refusal.permanent


def test_pods_of_one_batch_are_spread() -> None:
    decisions = decided(Case(pod=pod()), group(6, spreads=[spread()]))

    zones = [node[0] for node in nodes_of(decisions)]
    assert sorted(zones) == ["a", "a", "b", "b", "c", "c"]


def test_a_spread_that_would_be_uneven_waits() -> None:
    case = Case(pod=pod(), running=trains("a1", "b1"))
    kept = spread(nodeAffinityPolicy="Ignore")
    decisions = decided(case, [pod("next", spreads=[kept], nodeSelector={ZONE: "a"})])

    [(_, refusal)] = decisions.refused
    assert f"2 {SPREAD}" in refusal.reason
    assert refusal.hint == RULE_HINTS["PodTopologySpread"]


def test_pods_of_one_batch_that_want_to_be_together_are() -> None:
    decisions = decided(Case(pod=pod()), group(5, near=[to("app=train")]))

    assert len(decisions.chosen) == 5
    assert len({node[0] for node in nodes_of(decisions)}) == 1


def test_a_pod_of_the_batch_is_kept_out_by_one_before_it() -> None:
    shy = pod("shy", "app=shy", apart=[to("app=train")], priority=1)
    decisions = decided(Case(pod=pod()), [shy, *group(12)])

    by_pod = {event.name: candidates[0].node for event, candidates in decisions.chosen}
    zone = by_pod.pop("shy")[0]
    assert len(by_pod) == 12
    assert zone == "b" or not [node for node in by_pod.values() if node[0] == zone]


def test_a_pod_whose_affinity_selects_nothing_waits_with_a_hint() -> None:
    alone = pod("alone", near=[to("app=db")])
    beyond = pod("beyond", near=[to("app=db", key="rack")])
    decisions = decided(Case(pod=pod()), [alone, beyond])

    refusals = {event.name: refusal for event, refusal in decisions.refused}
    assert f"6 {AFFINITY}" in refusals["alone"].reason
    assert refusals["alone"].hint == RULE_HINTS["PodAffinity"]
    assert refusals["beyond"].hint.startswith("label nodes with rack, the topologyKey")


def test_pods_without_rules_are_published_as_before_until_a_rule_selects_them() -> None:
    world = World(Case(pod=pod()))
    [plain] = world.queued(pod("plain", "app=db"))

    [shy, again] = world.queued(pod("shy", "app=shy", apart=[to("app=db")]), pod("plain", "app=db"))

    assert plain.request.selected_as == ()
    if again.name != "plain":
        shy, again = again, shy
    assert again.request.selected_as == shy.request.guards
    assert shy.request.selected_as == ()
    assert shy.request.uncounted == ((shy.request.guards[0], again.pod),)


def test_no_namespace_keeps_all_places_of_rules() -> None:
    world = World(Case(pod=pod()))
    rules = [[to(f"app={number}")] for number in range(MOST_SELECTIONS + 5)]
    greedy = [
        pod(f"greedy-{number}", namespace="greedy", apart=rule) for number, rule in enumerate(rules)
    ]
    shy = pod("shy", apart=[to("app=db"), to("app=web")])

    before = world.queued(*greedy)
    [event] = world.queued(shy)
    world.pods.update_selected(1)
    after = [event for event in world.pods.resync(1) if isinstance(event, PodQueued)]

    def waiting(events: Sequence[PodQueued]) -> list[str]:
        late = (e for e in events if "TooManyPodRules" in e.request.node_requirements.waits_for)
        return [e.namespace for e in late]

    assert waiting(before) == ["greedy"] * 5
    assert not waiting([event])
    assert waiting(after) == ["greedy"] * 7
    world.pods.remove(world.pods.observed[event.pod])
    world.pods.update_selected(1)
    again = [event for event in world.pods.resync(1) if isinstance(event, PodQueued)]
    assert waiting(again) == ["greedy"] * 5


def test_a_pod_that_its_lease_counts_is_not_counted_twice() -> None:
    world = World(Case(pod=pod()))
    [shy] = world.queued(pod("shy", "app=shy", apart=[to("app=db")]))
    [name] = shy.request.guards
    copied = {"leasehold.dev/lease": msgspec.json.encode({"resources": {name: 1}}).decode()}
    leased = db("a1")
    leased["metadata"]["annotations"] = copied

    world.pods.update(parsed(leased, schedulerName="leasehold"), None)
    world.pods.update(parsed(db("b1")), None)

    counts = {node: world.pods.selected.on_node(node) for node in world.nodes.observed}
    assert {node: dict(of_node) for node, of_node in counts.items() if of_node} == {"b1": {name: 1}}
    deleted = {**leased, "metadata": {**leased["metadata"], "labels": {"app": "other"}}}
    before = world.pods.observed[PodUid("uid-default-db-a1")]
    world.pods.update(parsed(deleted, schedulerName="leasehold"), before)
    assert world.pods.selected.on_node(world.pods.observed[before.pod].node or "") == {name: -1}  # type: ignore[arg-type]


def test_what_is_counted_is_what_was_counted_from_the_beginning() -> None:
    """Counts that are kept up to date are those of a watcher that starts later."""
    running = [db("a1"), db("a2"), *trains("b1", "c1")]
    case = Case(pod=pod(apart=[to("app=db")]), running=running)
    world = World(case)
    world.queued(case.pod)
    gone = world.pods.observed[PodUid("uid-default-db-a2")]
    world.pods.remove(gone)
    ended = db("a1", phase="Succeeded")
    world.pods.update(parsed(ended), world.pods.observed[PodUid("uid-default-db-a1")])
    world.pods.update(parsed(db("b2")), None)

    later = World(Case(pod=case.pod, running=[ended, db("b2"), *trains("b1", "c1")]))
    later.queued(case.pod)

    for node in world.nodes.observed:
        assert world.pods.selected.on_node(node) == later.pods.selected.on_node(node)


def test_more_selections_than_are_counted_wait_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.watcher.selected_pods.MOST_SELECTIONS", 2)
    world = World(Case(pod=pod()))
    first, second, third = (pod(name, apart=[to(f"app={name}")]) for name in ("x", "y", "z"))

    events = {event.name: event for event in world.queued(first, second, third)}

    assert events["z"].request.node_requirements.waits_for.startswith("TooManyPodRules: ")
    world.pods.remove(world.pods.observed[events["x"].pod])
    [retried] = world.queued(third)
    assert not retried.request.node_requirements.waits_for
    assert retried.request.guards

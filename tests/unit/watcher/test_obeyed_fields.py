"""The fields of a pod that the placer obeys: one case for each row of `pod_fields`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from shared.dialects.dialect import Rules
from shared.dialects.pod_groups import PodGroupKind
from shared.kubernetes.types import ApiPod
from shared.model.devices.node import NodeFacts, Taint
from shared.model.requests.host_ports import ports_in_use
from shared.model.requests.request import DeviceSelection
from shared.placing.node_filters import check_all, free_resources, preference
from shared.placing.pod_fields import FIELDS, Effect
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_parser import PodParser
from tests.support.build import facts

PARSER = PodParser(frozenset({"leasehold"}), Rules())
GPU = {"name": "main", "resources": {"limits": {"volcano.sh/vgpu-number": "1"}}}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def observed(spec: Mapping[str, object], **metadata: object) -> ObservedPod:
    meta = {"name": "p", "namespace": "ns", "uid": "u1", **metadata}
    whole = {
        "metadata": meta,
        "spec": {"schedulerName": "leasehold", "containers": [GPU], **spec},
    }
    return PARSER.parse(msgspec.json.decode(msgspec.json.encode(whole), type=ApiPod))


@dataclass(frozen=True, slots=True)
class Case:
    """A spec that a node accepts, and one that differs in the field and is refused with a code."""

    right: Mapping[str, object]
    wrong: Mapping[str, object]
    code: str
    node: NodeFacts


def refused(spec: Mapping[str, object], node: NodeFacts) -> str:
    """Return the code with which a node is refused for a pod with this spec; empty: it is not."""
    request = observed(spec).request
    assert request is not None
    failure = check_all(request, node, free_resources(node, {}), frozenset(request.triggers))
    return failure.code if failure else ""


def affinity_case(kind: str, field: str, wrong: object) -> Case:
    key, value = ("zone", "a") if kind == "matchExpressions" else ("metadata.name", "n1")
    right: dict[str, object] = {"key": key, "operator": "In", "values": [value]}

    def spec(need: Mapping[str, object]) -> Mapping[str, object]:
        terms = {"nodeSelectorTerms": [{kind: [need]}]}
        return {"affinity": {"nodeAffinity": {REQUIRED: terms}}}

    return Case(spec(right), spec({**right, field: wrong}), "NodeAffinity", NODE)


def toleration_case(field: str, wrong: object) -> Case:
    right = {"key": "level", "operator": "Equal", "value": "5", "effect": "NoSchedule"}
    wrongs = {"tolerations": [{**right, field: wrong}]}
    return Case({"tolerations": [right]}, wrongs, "UntoleratedTaint", TAINTED)


def cpu_case(kind: str, container: str, **more: object) -> Case:
    """A container with little CPU, and one with more than the node has."""
    little, much = (
        {"containers": [GPU], container: [{"name": "c", "resources": {kind: {"cpu": cpu}}, **more}]}
        for cpu in ("1", "3")
    )
    return Case(little, much, "InsufficientCpu", NODE)


TAINT = Taint(key="level", value="5", effect="NoSchedule")
NODE = facts("n1", labels={"zone": "a"}, allocatable={"cpu": 2000, "pods": 10})
TAINTED = facts("n1", taints=(TAINT,))
SIDECARS = [
    {"name": name, "restartPolicy": "Always", "resources": {"requests": {"cpu": "1500m"}}}
    for name in ("one", "two")
]
INIT_CONTAINERS = [{**each, "restartPolicy": None} for each in SIDECARS]
PORT = {"containerPort": 1, "hostPort": 80, "protocol": "TCP", "hostIP": "10.0.0.1"}
OTHER_PORT = {"hostPort": 81, "protocol": "UDP", "hostIP": "10.0.0.2"}


def port_case(containers: str, field: str, value: object) -> Case:
    def spec(port: Mapping[str, object]) -> Mapping[str, object]:
        container = {"name": "port", "ports": [port]}
        if containers == "containers":
            return {containers: [GPU, container]}
        return {containers: [{**container, "restartPolicy": "Always"}]}

    used = observed({**spec(PORT), "nodeName": "n1"}).unleased_resources
    return Case(
        spec({**PORT, field: OTHER_PORT[field]}),
        spec({**PORT, field: value}),
        "NodePorts",
        replace(NODE, used_by_others=ports_in_use(used)),
    )


CASES = {
    "spec.nodeSelector": Case(
        {"nodeSelector": {"zone": "a"}}, {"nodeSelector": {"zone": "b"}}, "NodeAffinity", NODE
    ),
    **{
        f"spec.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[].{kind}[].{field}": (
            affinity_case(kind, field, wrong)
        )
        for kind in ("matchExpressions", "matchFields")
        for field, wrong in (("key", "other"), ("operator", "NotIn"), ("values", ["b"]))
    },
    "spec.tolerations[].key": toleration_case("key", "other"),
    "spec.tolerations[].operator": toleration_case("operator", "Gt"),
    "spec.tolerations[].value": toleration_case("value", "6"),
    "spec.tolerations[].effect": toleration_case("effect", "NoExecute"),
    **{
        f"spec.{container}[].resources.{kind}": cpu_case(kind, container)
        for container in ("containers", "initContainers")
        for kind in ("requests", "limits")
    },
    **{
        f"spec.{containers}[].ports[].{field}": port_case(containers, field, value)
        for containers in ("containers", "initContainers")
        for field, value in (("hostPort", 80), ("protocol", "TCP"), ("hostIP", "10.0.0.1"))
    },
    "spec.initContainers[].restartPolicy": Case(
        {"initContainers": INIT_CONTAINERS}, {"initContainers": SIDECARS}, "InsufficientCpu", NODE
    ),
    "spec.overhead": Case(
        {"overhead": {"cpu": "1"}}, {"overhead": {"cpu": "3"}}, "InsufficientCpu", NODE
    ),
    "spec.resources.requests": Case(
        {"resources": {"requests": {"cpu": "1"}}, "initContainers": SIDECARS},
        {"resources": {"requests": {"cpu": "3"}}},
        "InsufficientCpu",
        NODE,
    ),
}


@pytest.mark.parametrize("path", CASES)
def test_a_field_that_is_obeyed_decides_about_a_node(path: str) -> None:
    case = CASES[path]

    assert not refused(case.right, case.node)
    assert refused(case.wrong, case.node) == case.code


def preferred(**changes: object) -> int:
    """Return the preference for a node of a pod that prefers its zone, or its name."""
    field, changed = next(iter(changes.items()), ("", None))
    terms = []
    for kind, key, value in (
        ("matchExpressions", "zone", "a"),
        ("matchFields", "metadata.name", "n1"),
    ):
        need: dict[str, object] = {"key": key, "operator": "In", "values": [value]}
        if field.startswith(kind):
            need[field.partition("_")[2]] = changed
        weight = changed if field == "weight" else 10
        terms.append({"weight": weight, "preference": {kind: [need]}})
    request = observed({"affinity": {"nodeAffinity": {PREFERRED: terms}}}).request
    assert request is not None
    return preference(request.node_requirements, NODE)


PREFERENCES: dict[str, tuple[dict[str, object], int]] = {
    "weight": ({"weight": 4}, 8),
    **{
        f"preference.{kind}[].{field}": ({f"{kind}_{field}": wrong}, 10)
        for kind in ("matchExpressions", "matchFields")
        for field, wrong in (("key", "other"), ("operator", "NotIn"), ("values", ["b"]))
    },
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_a_preference_that_is_obeyed_changes_the_order_of_nodes(name: str) -> None:
    changes, weight = PREFERENCES[name]

    assert preferred() == 20
    assert preferred(**changes) == weight


OTHERS: dict[str, Callable[[], bool]] = {
    "metadata.annotations": lambda: _selection({"volcano.sh/vgpu-mode": "mig"}).mode == "mig",
    "metadata.deletionTimestamp": lambda: (
        not observed({}, deletionTimestamp="2030-01-01T00:00:00Z").is_pending
    ),
    "metadata.labels": lambda: observed({}, labels={"app": "x"}).labels == {"app": "x"},
    "metadata.namespace": lambda: observed({}, namespace="team-a").namespace == "team-a",
    "spec.nodeName": lambda: not observed({"nodeName": "n1"}).is_pending,
    "spec.priority": lambda: observed({"priority": 7}).priority == 7,
    "spec.schedulingGroup.podGroupName": lambda: (
        (group := observed({"schedulingGroup": {"podGroupName": "g"}}).group) is not None
        and group.kind is PodGroupKind.KUBERNETES
    ),
    "spec.schedulerName": lambda: not observed({"schedulerName": "other"}).is_pending,
    "spec.schedulingGates[].name": lambda: (
        not observed({"schedulingGates": [{"name": "g"}]}).is_pending
    ),
}
ELSEWHERE = {
    "spec.volumes[].persistentVolumeClaim.claimName": "tests/unit/watcher/test_claimed_storage.py",
    "spec.preemptionPolicy": "tests/unit/planner/",
}


@pytest.mark.parametrize("path", OTHERS)
def test_a_field_that_is_obeyed_decides_about_the_pod(path: str) -> None:
    assert observed({}).is_pending
    assert OTHERS[path]()


def _selection(annotations: Mapping[str, str]) -> DeviceSelection:
    request = observed({}, annotations=annotations).request
    assert request is not None
    return request.selection


def _selector(label: str) -> dict[str, object]:
    need = {"key": "tier", "operator": "In", "values": ["x"]}
    return {"matchLabels": {"app": label}, "matchExpressions": [need]}


TERM: dict[str, object] = {
    "labelSelector": _selector("db"),
    "matchLabelKeys": ["run"],
    "mismatchLabelKeys": ["tenant"],
    "namespaceSelector": _selector("red"),
    "namespaces": ["other"],
    "topologyKey": "zone",
}
CONSTRAINT: dict[str, object] = {
    "labelSelector": _selector("db"),
    "matchLabelKeys": ["run"],
    "maxSkew": 2,
    "minDomains": 3,
    "nodeAffinityPolicy": "Ignore",
    "nodeTaintsPolicy": "Honor",
    "topologyKey": "zone",
    "whenUnsatisfiable": "DoNotSchedule",
}
CHANGED: dict[str, object] = {
    "key": "other",
    "operator": "NotIn",
    "values": ["y"],
    "matchLabels": {"app": "other"},
    "matchLabelKeys": [],
    "mismatchLabelKeys": [],
    "namespaces": ["another"],
    "maxSkew": 3,
    "minDomains": 4,
    "nodeAffinityPolicy": "Honor",
    "nodeTaintsPolicy": "Ignore",
    "topologyKey": "rack",
    "whenUnsatisfiable": "ScheduleAnyway",
    "weight": 4,
}
"""Another value for each field."""
WEIGHTED = {"weight": 5, "podAffinityTerm": TERM}
RULES: dict[str, Any] = {
    f"spec.affinity.{kind}.{required}[]": {"affinity": {kind: {required: [term]}}}
    for kind in ("podAffinity", "podAntiAffinity")
    for required, term in ((REQUIRED, TERM), (PREFERRED, WEIGHTED))
} | {"spec.topologySpreadConstraints[]": {"topologySpreadConstraints": [CONSTRAINT]}}
"""Specs with a rule about other pods, by the path of the rule."""
OF_RULES = {
    row.path for row in FIELDS if row.effect is Effect.OBEYED and row.path.startswith(tuple(RULES))
}


def changed(value: object, segments: list[str]) -> object:
    """Return a value with the field at a path below it changed."""
    if not segments:
        return value
    name = segments[0].removesuffix("[]")
    assert isinstance(value, dict)
    if len(segments) == 1:
        return {**value, name: CHANGED[name]}
    below = value[name]
    inner = [changed(item, segments[1:]) for item in below] if isinstance(below, list) else None
    return {**value, name: changed(below, segments[1:]) if inner is None else inner}


@pytest.mark.parametrize("path", sorted(OF_RULES))
def test_a_field_of_a_rule_about_other_pods_changes_the_rule(path: str) -> None:
    spec = next(spec for above, spec in RULES.items() if path.startswith(above))
    labels = {"run": "1", "tenant": "x"}
    other_spec = changed(spec, path.split(".")[1:])
    assert isinstance(other_spec, dict)

    before, after = (observed(given, labels=labels).request for given in (spec, other_spec))

    assert before is not None
    assert after is not None
    assert before.pod_rules is not None
    assert before.pod_rules != after.pod_rules


def test_every_field_that_is_obeyed_has_a_case() -> None:
    above = f"spec.affinity.nodeAffinity.{PREFERRED}[]"
    cases = {*CASES, *OTHERS, *OF_RULES, *ELSEWHERE, *(f"{above}.{name}" for name in PREFERENCES)}

    assert {row.path for row in FIELDS if row.effect is Effect.OBEYED} == cases

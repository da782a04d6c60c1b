"""Pods that are too large are refused with the field, the limit and the size; by both readers."""

from typing import Any

import msgspec
import pytest

from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiPod
from shared.model.bounds import (
    LONGEST_ANNOTATION,
    LONGEST_FIELD,
    MOST_ANNOTATIONS,
    MOST_CONTAINERS,
    MOST_ENTRIES,
    MOST_SHARES,
    MOST_WITH_GPUS,
)
from shared.pods.pod_parser import PodParser
from tests.support.webhook import reviews

GROUP = "scheduling.k8s.io/group-name"
SPREAD = {"volcano.sh/group-policy": "spread"}
VGPU = {"volcano.sh/vgpu-number": "1"}
TERM = {
    "labelSelector": {"matchLabels": {"a": "b"}},
    "topologyKey": "kubernetes.io/hostname",
}
PARSER = PodParser(frozenset({"leasehold"}), Rules())


def pod(
    *more: dict[str, Any],
    annotations: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    limits: dict[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    asked = {"name": "c", "resources": {"limits": limits or VGPU}}
    made = reviews.pod(asked, *more, notes=annotations, labels=labels, **spec)
    made["spec"].setdefault("schedulerName", "leasehold")
    return made


def with_gpus(count: int) -> list[dict[str, Any]]:
    return [{"name": f"c-{number}", "resources": {"limits": VGPU}} for number in range(count)]


def affinity(names: int) -> dict[str, Any]:
    values = [f"node-{number:058}" for number in range(names)]
    expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": values}
    required = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


LABELS = {f"team.example.com/{number}": "x" * 63 for number in range(600)}
TOLERATIONS = [{"key": f"k{number}", "operator": "Exists"} for number in range(1500)]
LARGE = {
    "resources": (
        pod(limits={**VGPU, **{f"example.com/r{number}": "1" for number in range(300)}}),
        f"names 301 different resources; at most {MOST_ENTRIES}",
    ),
    "group": (
        pod(annotations={GROUP: "g" * 30_000, **SPREAD}),
        f"{GROUP} has 30000 characters; at most {LONGEST_ANNOTATION}",
    ),
    "choice": (
        pod(annotations={"volcano.sh/vgpu-mode": "m" * 5000}),
        f"volcano.sh/vgpu-mode has 5000 characters; at most {LONGEST_ANNOTATION}",
    ),
    "containers": (
        pod(*({"name": f"{number:063}"} for number in range(200))),
        f"201 containers; at most {MOST_CONTAINERS}",
    ),
    "containers with GPUs": (
        pod(*with_gpus(MOST_WITH_GPUS)),
        f"{MOST_WITH_GPUS + 1} containers of the pod request GPUs; at most {MOST_WITH_GPUS}",
    ),
    "shares": (
        pod(limits={"volcano.sh/vgpu-number": "1000"}),
        f"requests 1000 GPUs; at most {MOST_SHARES}",
    ),
    "labels": (pod(labels=LABELS), "metadata.labels has 53291 bytes as JSON"),
    "affinity": (pod(affinity=affinity(1000)), f"bytes as JSON; at most {LONGEST_FIELD}"),
    "tolerations": (pod(tolerations=TOLERATIONS), "spec.tolerations has "),
    "selector": (pod(nodeSelector=LABELS), "spec.nodeSelector has "),
}  # fmt: skip
ODD_NAMES = ("a0\nprod/train", "a|b", "a,b", "A", "..", "é", "a" * 254, "a\0b", " a")


def denial_of(obj: dict[str, Any]) -> str:
    return reviews.decided(obj).message


def refusal_of(obj: dict[str, Any]) -> str:
    parsed = msgspec.json.decode(msgspec.json.encode(obj), type=ApiPod)
    return PARSER.parse(parsed).request_error


@pytest.mark.parametrize(("obj", "text"), LARGE.values(), ids=LARGE)
def test_a_pod_beyond_a_bound_is_denied_and_where_no_webhook_was_refused_with_the_limit(
    obj: dict[str, Any], text: str
) -> None:
    assert text in denial_of(obj)
    assert text.partition(" has ")[0] in refusal_of(obj)
    assert len(refusal_of(obj)) <= 1024


@pytest.mark.parametrize("is_larger", [False, True])
def test_a_pod_whose_annotations_leave_no_room_for_its_lease_is_denied(is_larger: bool) -> None:
    note = "é" * ((MOST_ANNOTATIONS - len("note")) // 2) + "x" * is_larger

    denial = denial_of(pod(annotations={"note": note}))

    assert ("metadata.annotations has 131073 bytes; at most 131072" in denial) is is_larger


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_group_name_that_no_object_can_have_is_refused(name: str) -> None:
    obj = pod(annotations={GROUP: name, **SPREAD})

    assert GROUP in denial_of(obj)
    assert GROUP in refusal_of(obj)


@pytest.mark.parametrize(
    "obj",
    [
        pod(affinity=affinity(450)),
        pod(*({"name": f"{number:063}"} for number in range(MOST_CONTAINERS - 1))),
        pod(*with_gpus(MOST_WITH_GPUS - 1)),
        pod(limits={"volcano.sh/vgpu-number": str(MOST_SHARES)}),
        pod(annotations={GROUP: "g" * 253, **SPREAD}),
        pod(tolerations=[{"key": f"k{number}"} for number in range(1000)]),
    ],
)
def test_what_is_admitted_is_not_refused_later(obj: dict[str, Any]) -> None:
    assert denial_of(obj) == ""
    assert refusal_of(obj) == ""


def test_the_resources_of_a_pod_with_too_large_anti_affinity_are_counted() -> None:
    terms = [{**TERM, "namespaces": [f"{number:063}" for number in range(1000)]}]
    required = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    obj = pod(limits={"cpu": "2"}, affinity=required, schedulerName="default-scheduler")

    seen = PARSER.parse(msgspec.json.decode(msgspec.json.encode(obj), type=ApiPod))

    assert seen.resources == {"cpu": 2000, "pods": 1}
    assert seen.repels == ()

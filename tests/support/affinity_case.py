"""A pod, what runs beside it, and the nodes that it fits: what tables of affinity are made of.

Everything is a manifest of the Kubernetes API, so that a case can also be made on a cluster with
kube-scheduler: `nodes`, `namespaces` and `running` as they are, then `pod` without a node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Manifest = dict[str, Any]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
ZONE = "topology.kubernetes.io/zone"
RACK = "example.com/rack"
HOST = "kubernetes.io/hostname"

AFFINITY = "node(s) didn't match pod affinity rules"
ANTI_AFFINITY = "node(s) didn't match pod anti-affinity rules"
EXISTING = "node(s) didn't satisfy existing pods anti-affinity rules"
SPREAD = "node(s) didn't match pod topology spread constraints"
NO_LABEL = "node(s) didn't match pod topology spread constraints (missing required label)"
NODE_AFFINITY = "node(s) didn't match Pod's node affinity/selector"
TAINTED = "node(s) had untolerated taint {closed: }"
CORDONED = "node(s) were unschedulable"

EVERYWHERE = "a1 a2 b1 b2 c1 bare"
ZONED = "a1 a2 b1 b2 c1"
"""All nodes with the label of a zone."""
DELETED = "2026-01-01T00:00:00Z"


def node(name: str, labels: Mapping[str, str], **spec: Any) -> Manifest:
    return {
        "metadata": {"name": name, "labels": {HOST: name, **labels}},
        "spec": spec,
        "status": {"allocatable": {"cpu": "64", "memory": "256Gi", "pods": "110"}},
    }


NODES = (
    node("a1", {ZONE: "a", RACK: "r1"}),
    node("a2", {ZONE: "a", RACK: "r2"}),
    node("b1", {ZONE: "b", RACK: "r3"}),
    node("b2", {ZONE: "b", RACK: "r4"}),
    node("c1", {ZONE: "c", RACK: "r5"}),
    node("bare", {}),
)
"""Three zones, and a node in none."""


def with_node(name: str, labels: Mapping[str, str], **spec: Any) -> tuple[Manifest, ...]:
    """Return the nodes with another one in the place of that of this name."""
    rest = [listed for listed in NODES if listed["metadata"]["name"] != name]
    return (*rest, node(name, labels, **spec))


def selecting(labels: str) -> Manifest:
    """Return a selector of labels such as `app=db,tier=1`."""
    return {"matchLabels": labels_of(labels)}


def by(key: str, operator: str, *values: str) -> Manifest:
    listed = {"values": list(values)} if values else {}
    return {"matchExpressions": [{"key": key, "operator": operator, **listed}]}


def labels_of(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split(",") if pair)


def to(selector: Manifest | str | None, key: str = ZONE, **fields: Any) -> Manifest:
    """Return a term of affinity or anti-affinity."""
    if isinstance(selector, str):
        selector = selecting(selector)
    listed = {} if selector is None else {"labelSelector": selector}
    return {"topologyKey": key, **listed, **fields}


def weighted(weight: int, term: Manifest) -> Manifest:
    return {"weight": weight, "podAffinityTerm": term}


def spread(
    selector: Manifest | str | None = "app=train", key: str = ZONE, skew: int = 1, **fields: Any
) -> Manifest:
    constraint = to(selector, key, maxSkew=skew, whenUnsatisfiable="DoNotSchedule")
    return {**constraint, **fields}


def pod(
    name: str = "train",
    labels: str = "app=train",
    at: str = "",
    *,
    namespace: str = "default",
    phase: str = "",
    deleted: bool = False,
    near: Sequence[Manifest] = (),
    apart: Sequence[Manifest] = (),
    likes: Sequence[Manifest] = (),
    dislikes: Sequence[Manifest] = (),
    spreads: Sequence[Manifest] = (),
    nodes: Manifest | None = None,
    **spec: Any,
) -> Manifest:
    """Return a pod with required and preferred affinity and anti-affinity; on a node, if `at`."""
    affinity: Manifest = {}
    if near or likes:
        affinity["podAffinity"] = {REQUIRED: list(near), PREFERRED: list(likes)}
    if apart or dislikes:
        affinity["podAntiAffinity"] = {REQUIRED: list(apart), PREFERRED: list(dislikes)}
    if nodes is not None:
        terms = {"nodeSelectorTerms": [nodes]}
        affinity["nodeAffinity"] = {REQUIRED: terms}
    times = {"deletionTimestamp": DELETED, "deletionGracePeriodSeconds": 30} if deleted else {}
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{namespace}-{name}",
            "labels": labels_of(labels),
            **times,
        },
        "spec": {
            "containers": [{"name": "main", "image": "app"}],
            **({"affinity": affinity} if affinity else {}),
            **({"topologySpreadConstraints": list(spreads)} if spreads else {}),
            **({"nodeName": at} if at else {}),
            **spec,
        },
        "status": {"phase": phase or ("Running" if at else "Pending")},
    }


def db(at: str, name: str = "", **fields: Any) -> Manifest:
    return pod(name or f"db-{at}", "app=db", at, **fields)


def trains(*nodes: str, **fields: Any) -> list[Manifest]:
    """Return running pods with the labels of the pod that waits."""
    return [pod(f"train-{number}", at=at, **fields) for number, at in enumerate(nodes)]


NAMESPACES: Mapping[str, Mapping[str, str]] = {
    "default": {"team": "red"},
    "other": {"team": "blue"},
    "third": {},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    pod: Manifest
    running: Sequence[Manifest] = ()
    """Other pods, some of which may have ended or have no node yet."""
    fits: str = ""
    """The names of the nodes on which it may run."""
    reasons: tuple[str, ...] = ()
    """Why it may not run on others."""
    best: str = ""
    """Of preferences: the nodes that it prefers; empty if it has none."""
    nodes: Sequence[Manifest] = NODES
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: NAMESPACES)

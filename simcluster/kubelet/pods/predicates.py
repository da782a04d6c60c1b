"""The general predicates: whether a node can run a pod that has its devices; pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from simcluster.apimachinery.objects import Json
from simcluster.kubelet.containers.container_spec import PodSpec, pod_requests

_SELECTOR_TEXT = "node(s) didn't match Pod's node affinity/selector"
_PORTS_TEXT = "node(s) didn't have free ports for the requested pod ports"
_NATIVE = frozenset({"cpu", "memory", "ephemeral-storage"})


@dataclass(frozen=True, slots=True)
class PodRejection:
    """Why a pod is rejected: the reason in its status, and a message for its owner."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletNodeFacts:
    """The facts of a node that predicates use; cpu in thousandths, other resources in units."""

    name: str
    labels: Mapping[str, str]
    allocatable: Mapping[str, int]
    managed: frozenset[str]
    """Extended resources of device plugins: the device manager has checked them."""


def check_predicates(
    pod: PodSpec, others: Iterable[PodSpec], node: KubeletNodeFacts
) -> PodRejection | None:
    """Return why the node cannot run the pod beside the others; None if it can.

    Extended resources that the node does not list are ignored, as in a real kubelet: a pod on a
    node without the plugin starts without its devices.
    """
    other_pods = list(others)
    return _check_resources(pod, other_pods, node) or _check_placement(pod, other_pods, node)


def _check_resources(
    pod: PodSpec, others: list[PodSpec], node: KubeletNodeFacts
) -> PodRejection | None:
    room_for = node.allocatable.get("pods", 0)
    if len(others) + 1 > room_for:
        return _out_of_resource("pods", 1, len(others), room_for)
    used: dict[str, int] = {}
    for other in others:
        for name, amount in pod_requests(other).items():
            used[name] = used.get(name, 0) + amount
    for name, amount in pod_requests(pod).items():
        counted = name in _NATIVE or (name in node.allocatable and name not in node.managed)
        if not amount or not counted:
            continue
        capacity = node.allocatable.get(name, 0)
        if used.get(name, 0) + amount > capacity:
            return _out_of_resource(name, amount, used.get(name, 0), capacity)
    return None


def _out_of_resource(name: str, requested: int, used: int, capacity: int) -> PodRejection:
    return PodRejection(
        f"OutOf{name}",
        f"Node didn't have enough resource: {name}, requested: {requested}, "
        f"used: {used}, capacity: {capacity}",
    )


def _check_placement(
    pod: PodSpec, others: list[PodSpec], node: KubeletNodeFacts
) -> PodRejection | None:
    spec = pod.obj["spec"]
    if spec.get("nodeName") not in (None, node.name):
        return PodRejection("NodeName", "Predicate NodeName failed: node(s) didn't match the name")
    if not _node_selected(spec, node):
        return PodRejection("NodeAffinity", f"Predicate NodeAffinity failed: {_SELECTOR_TEXT}")
    wanted = {port for container in pod.containers for port in container.host_ports}
    taken = {p for other in others for container in other.containers for p in container.host_ports}
    if wanted & taken:
        return PodRejection("NodePorts", f"Predicate NodePorts failed: {_PORTS_TEXT}")
    return None


def _node_selected(spec: Json, node: KubeletNodeFacts) -> bool:
    selector = spec.get("nodeSelector") or {}
    if any(node.labels.get(key) != value for key, value in selector.items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(_term_matches(term, node) for term in required.get("nodeSelectorTerms") or ())


def _term_matches(term: Json, node: KubeletNodeFacts) -> bool:
    labels, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not labels and not fields:
        return False
    return all(_expression_matches(expression, node.labels) for expression in labels) and all(
        _expression_matches(expression, {"metadata.name": node.name}) for expression in fields
    )


def _expression_matches(expression: Json, labels: Mapping[str, str]) -> bool:
    found = labels.get(expression["key"])
    test = _OPERATORS.get(expression["operator"])
    return test is not None and test(found, expression.get("values") or [])


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _above(found: str | None, values: Sequence[str]) -> bool:
    number = _number(found)
    return number is not None and number > int(values[0])


def _below(found: str | None, values: Sequence[str]) -> bool:
    number = _number(found)
    return number is not None and number < int(values[0])


_OPERATORS: Mapping[str, Callable[[str | None, Sequence[str]], bool]] = {
    "In": lambda found, values: found in values,
    "NotIn": lambda found, values: found not in values,
    "Exists": lambda found, _values: found is not None,
    "DoesNotExist": lambda found, _values: found is None,
    "Gt": _above,
    "Lt": _below,
}

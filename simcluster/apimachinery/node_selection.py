"""Which nodes a pod selects and tolerates; pure.

https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from simcluster.apimachinery.objects import Json, at_path

_UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
_HARD_EFFECTS = frozenset({"NoSchedule", "NoExecute"})


def node_selected(spec: Json, name: str, labels: Mapping[str, str]) -> bool:
    """Return whether `nodeSelector` and required node affinity of a pod's spec select a node."""
    selector = spec.get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in selector.items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    terms = required.get("nodeSelectorTerms") or ()
    return any(_term_matches(term, name, labels) for term in terms)


def tolerates_node(tolerations: Iterable[Json], node: Json) -> bool:
    """Return whether tolerations match all taints of a node that keep pods away."""
    own = list(tolerations)
    taints = [*(at_path(node, "spec.taints") or ())]
    if at_path(node, "spec.unschedulable"):
        taints.append(_UNSCHEDULABLE)
    hard = (taint for taint in taints if taint.get("effect") in _HARD_EFFECTS)
    return all(any(_tolerates(toleration, taint) for toleration in own) for taint in hard)


def _tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    exists = toleration.get("operator") == "Exists"
    if not toleration.get("key"):
        return exists
    same_value = (toleration.get("value") or "") == (taint.get("value") or "")
    return bool(toleration["key"] == taint["key"] and (exists or same_value))


def _term_matches(term: Json, name: str, labels: Mapping[str, str]) -> bool:
    of_labels = term.get("matchExpressions") or ()
    of_fields = term.get("matchFields") or ()
    if not of_labels and not of_fields:
        return False
    return all(_expression_matches(requirement, labels) for requirement in of_labels) and all(
        _expression_matches(requirement, {"metadata.name": name}) for requirement in of_fields
    )


def _expression_matches(expression: Json, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    test = _OPERATORS.get(expression["operator"])
    return test is not None and test(value, expression.get("values") or [])


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _above(value: str | None, values: Sequence[str]) -> bool:
    number = _number(value)
    return number is not None and number > int(values[0])


def _below(value: str | None, values: Sequence[str]) -> bool:
    number = _number(value)
    return number is not None and number < int(values[0])


_OPERATORS: Mapping[str, Callable[[str | None, Sequence[str]], bool]] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, _values: value is not None,
    "DoesNotExist": lambda value, _values: value is None,
    "Gt": _above,
    "Lt": _below,
}

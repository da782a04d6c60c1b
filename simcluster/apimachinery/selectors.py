"""Selectors of lists and watches: namespace, label selector, field selector; pure."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simcluster.apimachinery.conversions import storage_path
from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, JsonValue
from simcluster.apimachinery.resources import Resource

_TERM = re.compile(
    r"\s*(?:"
    r"(?P<absent>!)\s*(?P<absent_key>[\w./-]+)"
    r"|(?P<set_key>[\w./-]+)\s+(?P<set_op>in|notin)\s*\((?P<values>[^()]*)\)"
    r"|(?P<key>[\w./-]+)\s*(?:(?P<op>==|!=|=|>|<)\s*(?P<value>[\w.-]*))?"
    r")\s*(?:,|$)"
)
_FIELD_TERM = re.compile(r"(?P<path>[\w.]+)(?P<op>==|!=|=)(?P<value>.*)", re.DOTALL)
LabelRequirement = Callable[[Mapping[str, str]], bool]
FieldRequirement = Callable[[Json], bool]
_BOOLEANS: Mapping[str, tuple[JsonValue, ...]] = {"true": (True,), "false": (False, None)}


def parse_label_selector(text: str) -> tuple[LabelRequirement, ...]:
    """Parse a label selector of equality-based and set-based terms; all of them must hold."""
    requirements: list[LabelRequirement] = []
    at = 0
    while text.strip() and at < len(text):
        match = _TERM.match(text, at)
        if match is None or match.end() == at:
            raise ApiError.bad_request(f"unable to parse label selector {text!r} at {at}")
        requirements.append(_requirement(match))
        at = match.end()
    return tuple(requirements)


def _requirement(match: re.Match[str]) -> LabelRequirement:
    if match["absent"]:
        absent = match["absent_key"]
        return lambda labels: absent not in labels
    if match["set_key"]:
        key = match["set_key"]
        values = frozenset(value.strip() for value in match["values"].split(","))
        if match["set_op"] == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    return _comparison(match["key"], match["op"], match["value"])


def _comparison(key: str, operator: str | None, value: str) -> LabelRequirement:
    if operator is None:
        return lambda labels: key in labels
    if operator == "!=":
        return lambda labels: labels.get(key) != value
    if operator in {"=", "=="}:
        return lambda labels: labels.get(key) == value
    if not value.lstrip("-").isdigit():
        raise ApiError.bad_request(
            f"the value for {operator!r} in a label selector must be an integer"
        )
    sign, bound = (1, int(value)) if operator == ">" else (-1, int(value))
    return lambda labels: (
        labels.get(key, "").lstrip("-").isdigit() and (int(labels[key]) - bound) * sign > 0
    )


def selector_requirements(selector: Json | None) -> tuple[LabelRequirement, ...]:
    """Parse a `LabelSelector` object, as in a PodDisruptionBudget; None selects nothing."""
    if selector is None:
        return (lambda _labels: False,)
    terms = [f"{key}={value}" for key, value in (selector.get("matchLabels") or {}).items()]
    for expression in selector.get("matchExpressions") or ():
        key = expression["key"]
        values = ",".join(expression.get("values") or ())
        terms.append(
            {
                "In": f"{key} in ({values})",
                "NotIn": f"{key} notin ({values})",
                "Exists": key,
                "DoesNotExist": f"!{key}",
            }[expression["operator"]]
        )
    return parse_label_selector(",".join(terms))


def _field_requirement(path: str, value: str, *, equal: bool) -> FieldRequirement:
    """Compare as text; a field that is not set equals the empty text and `false`.

    Every change is compared with the terms of every watch, so the path is split in advance.
    """
    first, *rest = ("source", "component") if path == "source" else path.split(".")
    wanted: tuple[JsonValue, ...] = (value,)
    if not value:
        wanted = ("", None)
    elif value in _BOOLEANS:
        wanted = (value, *_BOOLEANS[value])

    def holds(obj: Json) -> bool:
        value: JsonValue = obj.get(first)
        for part in rest:
            value = value.get(part) if isinstance(value, dict) else None
        return (value in wanted) is equal

    return holds


def parse_field_selector(text: str, resource: Resource) -> tuple[FieldRequirement, ...]:
    """Parse a field selector; 400 for a field that this kind does not support."""
    selectable = {"metadata.name", *resource.selectable}
    if resource.namespaced:
        selectable.add("metadata.namespace")
    terms = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = _FIELD_TERM.fullmatch(part)
        if match is None:
            raise ApiError.bad_request(f"invalid selector: {text!r}; can't understand {part!r}")
        if match["path"] not in selectable:
            raise ApiError.bad_request(
                f'Unable to find "{resource.api_version}, Resource={resource.plural}" that match '
                f'label selector "", field selector "{text}": field label not supported: '
                f"{match['path']}"
            )
        equal = match["op"] != "!="
        path = storage_path(resource, match["path"])
        terms.append(_field_requirement(path, match["value"], equal=equal))
    return tuple(terms)


def selected_name(fields: str) -> str:
    """Return the name without which a field selector selects nothing; empty: there is none."""
    for part in fields.split(","):
        match = _FIELD_TERM.fullmatch(part.strip())
        if match is not None and (match["path"], match["op"] != "!=") == ("metadata.name", True):
            return match["value"]
    return ""


@dataclass(frozen=True, slots=True)
class Selection:
    """The namespace, labels and fields that a list or a watch selects."""

    namespace: str = ""
    labels: tuple[LabelRequirement, ...] = ()
    fields: tuple[FieldRequirement, ...] = ()

    def matches(self, obj: Json) -> bool:
        """Return whether the object is selected."""
        for holds in self.fields:
            if not holds(obj):
                return False
        if self.namespace and obj["metadata"].get("namespace") != self.namespace:
            return False
        if self.labels:
            labels = obj["metadata"].get("labels") or {}
            return all(holds(labels) for holds in self.labels)
        return True


def parse_selection(
    resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
) -> Selection:
    """Parse the selectors of a request into a `Selection`."""
    return Selection(
        namespace or "", parse_label_selector(labels), parse_field_selector(fields, resource)
    )

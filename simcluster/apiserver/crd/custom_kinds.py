"""Custom kinds: the kinds that a CustomResourceDefinition adds, one per version; pure."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simcluster.apimachinery.objects import Json, JsonValue, at_path, encode, name_of
from simcluster.apimachinery.printer_columns import AGE, NAME, Column, format_age
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.crd import json_path
from simcluster.apiserver.crd.schema_shape import has_rules

_VERSION = re.compile(r"v(\d+)(?:(alpha|beta)(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomKind(Resource):
    """A custom kind in one version, with its schema and its printer columns."""

    schema: Json
    columns: tuple[Column, ...]
    rules: bool = False
    """Whether the schema contains CEL rules."""
    warning: str = ""
    """The warning that every response in this version carries; empty unless it is deprecated."""


def custom_kinds(definition: Json) -> tuple[CustomKind, list[CustomKind]]:
    """Return the kind in its storage version, and in all served versions, best first."""
    made = {
        str(version["name"]): (_kind(definition, version), version)
        for version in sorted(
            definition["spec"]["versions"], key=lambda version: version_priority(version["name"])
        )
    }
    stored = next(kind for kind, version in made.values() if version.get("storage"))
    return stored, [kind for kind, version in made.values() if version.get("served")]


def version_priority(version: str) -> tuple[int, int, int, str]:
    """Sort key of Kubernetes' version priority: v2, v1, v1beta1, v1alpha1, then all others."""
    match = _VERSION.fullmatch(version)
    if match is None:
        return (3, 0, 0, version)
    level = {None: 0, "beta": 1, "alpha": 2}[match[2]]
    return (level, -int(match[1]), -int(match[3] or 0), version)


def _kind(definition: Json, version: Json) -> CustomKind:
    spec = definition["spec"]
    names = definition["spec"]["names"]
    group = spec["group"]
    schema = at_path(version, "schema.openAPIV3Schema") or {}
    deprecation_warning = version.get("deprecationWarning") or (
        f"{group}/{version['name']} {names['kind']} is deprecated"
    )
    return CustomKind(
        plural=names["plural"],
        kind=names["kind"],
        group=group,
        version=version["name"],
        namespaced=spec["scope"] == "Namespaced",
        short_names=tuple(names.get("shortNames") or ()),
        categories=tuple(names.get("categories") or ()),
        has_status=at_path(version, "subresources.status") is not None,
        selectable=tuple(
            field["jsonPath"].removeprefix(".") for field in version.get("selectableFields") or ()
        ),
        singular_name=names["singular"],
        list_name=names["listKind"],
        stored_as=name_of(definition),
        status_only=True,
        schema=schema,
        rules=has_rules(schema),
        columns=_columns(version),
        warning=deprecation_warning if version.get("deprecated") else "",
    )


def _columns(version: Json) -> tuple[Column, ...]:
    described = version.get("additionalPrinterColumns") or ()
    if not described:
        return (NAME, AGE)
    return (NAME, *(_column(column) for column in described))


def _column(described: Json) -> Column:
    find = json_path.compile_path(described["jsonPath"])
    show = _CELLS[described["type"]]

    def cell(obj: Json, now: float) -> JsonValue:
        value = find(obj)
        return None if not value or value[0] is None else show(value[0], now)

    return Column(
        described["name"],
        cell,
        described.get("priority") or 0,
        described["type"],
        described.get("format") or "",
    )


def _text(value: JsonValue, _now: float) -> str:
    return value if isinstance(value, str) else encode(value).decode()


def _number(value: JsonValue, _now: float) -> JsonValue:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: JsonValue, now: float) -> int | None:
    number = _number(value, now)
    return None if number is None else int(number)


_CELLS: Mapping[str, Callable[[JsonValue, float], JsonValue]] = {
    "string": _text,
    "integer": _whole,
    "number": _number,
    "boolean": lambda value, _now: value if isinstance(value, bool) else None,
    "date": format_age,
}
COLUMN_TYPES = tuple(_CELLS)

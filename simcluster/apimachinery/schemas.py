"""The published schemas of Kubernetes' kinds: their fields, with texts and protobuf numbers.

`python -m tools.kubernetes_schemas` makes the file.
"""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from simcluster.apimachinery.objects import Json, JsonValue, decode
from simcluster.apimachinery.resources import Resource

FILE = Path(__file__).with_name("schemas.json")
REFERENCE = "#/components/schemas/"
_SERVED_ELSEWHERE = {
    "apiextensions.k8s.io": "apiextensions-apiserver",
    "apiregistration.k8s.io": "kube-aggregator",
}
"""Groups whose types are not in the module `api`, with theirs."""
OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


def schema_name(kind: Resource) -> str:
    """Return the name of a built-in kind's schema."""
    group = kind.group.split(".")[0] or "core"
    module = _SERVED_ELSEWHERE.get(kind.group)
    package = f"{module}.pkg.apis.{group}" if module else f"api.{group}"
    return f"io.k8s.{package}.{kind.version}.{kind.kind}"


@cache
def published() -> dict[str, Json]:
    """Return all schemas, which refer to each other by name."""
    schemas: dict[str, Json] = decode(FILE.read_bytes())
    return schemas


@cache
def resolved(name: str) -> Json:
    """Return a schema in which others stand in the place of references to them; share it."""
    schema: Json = _resolve(published()[name])
    return schema


def _resolve(schema: JsonValue) -> JsonValue:
    if isinstance(schema, list):
        return [_resolve(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return resolved(str(schema["$ref"]).removeprefix(REFERENCE))
    own = {key: _resolve(below) for key, below in schema.items()}
    return {**own.pop("allOf")[0], **own} if "allOf" in own else own


_SCALARS: dict[str, Any] = {"string": str, "integer": int, "number": float | int, "boolean": bool}
_LENIENT: dict[str, Any] = {"Quantity": str | int | float, "IntOrString": str | int}


@cache
def _checked(name: str, *, is_kind: bool = False) -> Any:
    """Return a type whose values have no other fields, and no values of other types."""
    schema = published()[name]
    if "properties" not in schema:
        return _checked_value(schema)
    rows = list(schema["properties"].items())
    if is_kind:
        rows += [("apiVersion", {"type": "string"}), ("kind", {"type": "string"})]
    fields = [
        (f"f{at}", _checked_value(row) | None | msgspec.UnsetType, msgspec.UNSET)
        for at, (_, row) in enumerate(rows)
    ]
    names = {f"f{at}": field for at, (field, _) in enumerate(rows)}
    title = name.rpartition(".")[2]
    return msgspec.defstruct(title, fields, rename=names, forbid_unknown_fields=True, gc=False)


def _checked_value(schema: Json) -> Any:
    references = [schema, *schema.get("allOf", ())]
    target = next((str(reference["$ref"]) for reference in references if "$ref" in reference), "")
    if target:
        return _checked(target.removeprefix(REFERENCE))
    if form := _LENIENT.get(schema.get("x-protobuf-form", "")):
        return form
    match schema.get("type"):
        case "array":
            return list[_checked_value(schema["items"])]  # type: ignore[misc]
        case "object" if "additionalProperties" in schema:
            return dict[str, _checked_value(schema["additionalProperties"])]  # type: ignore[misc]
        case kind:
            return _SCALARS.get(str(kind), Any)


def has_shape(name: str, obj: JsonValue) -> bool:
    """Return whether an object has fields of its schema only, all of the right type."""
    try:
        msgspec.convert(obj, _checked(name, is_kind=True))
    except msgspec.ValidationError:
        return False
    return True

"""Checks of request bodies: types, unknown fields, and what events.k8s.io/v1 requires."""

from collections.abc import Iterator, Mapping

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.merge_patches import field_schema
from simcluster.apimachinery.objects import Json, JsonValue, json_text
from simcluster.apimachinery.resources import Resource
from simcluster.apimachinery.schemas import OBJECT_META, has_shape, resolved, schema_name
from simcluster.apiserver.crd.custom_kinds import CustomKind
from simcluster.apiserver.crd.schema_shape import prune


def schema_of(kind: Resource) -> Json:
    """Return the schema of a kind, without references."""
    return kind.schema if isinstance(kind, CustomKind) else resolved(schema_name(kind))


_METADATA: Json = {"type": "object", "properties": {"metadata": resolved(OBJECT_META)}}


def drop_unknown_fields(kind: Resource, obj: Json, query: Mapping[str, str]) -> list[str]:
    """Drop unknown fields, in place, and return the warnings; 400 in mode `Strict`.

    A value of another type than its field has is refused in every mode.
    """
    mode = query.get("fieldValidation") or "Warn"
    if mode not in {"Strict", "Warn", "Ignore"}:
        raise ApiError.bad_request(
            f'fieldValidation: Unsupported value: "{mode}": supported values: '
            '"Ignore", "Strict", "Warn"'
        )
    is_custom = isinstance(kind, CustomKind)
    if not is_custom and has_shape(schema_name(kind), obj):
        return []
    schema = schema_of(kind)
    meta = {"metadata": obj.get("metadata")}
    wrong = next(_wrong_types(_METADATA, meta, ""), None)
    if wrong is None and not is_custom:  # others are validated by their schema
        wrong = next(_wrong_types(schema, obj, ""), None)
    if wrong is not None:
        raise ApiError.bad_request(
            f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: {wrong}'
        )
    paths = [*prune(_METADATA, meta, embedded=False), *prune(schema, obj)]
    dropped = [f'unknown field "{path}"' for path in paths]
    if dropped and mode == "Strict":
        raise ApiError.bad_request(
            f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: '
            f"strict decoding error: {', '.join(dropped)}"
        )
    return dropped if mode == "Warn" else []


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
_NUMBERS_TOO = frozenset({"Quantity", "IntOrString"})


def _wrong_types(schema: Json, value: JsonValue, path: str) -> Iterator[str]:
    """Yield a sentence for each value whose type is not that of its field."""
    wanted = schema.get("type", "")
    if value is None or wanted not in _TYPES:
        return
    types = (str, int, float) if schema.get("x-protobuf-form") in _NUMBERS_TOO else _TYPES[wanted]
    if not isinstance(value, types) or (isinstance(value, bool) and wanted != "boolean"):
        yield f"json: cannot unmarshal {_json_type(value)} into field {path} of type {wanted}"
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from _wrong_types(field_schema(schema, key), below, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and "items" in schema:
        for at, below in enumerate(value):
            yield from _wrong_types(schema["items"], below, f"{path}[{at}]")


def _json_type(value: JsonValue) -> str:
    names = {bool: "bool", int: "number", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


_REQUIRED = ("eventTime", "reportingController", "reportingInstance", "action", "reason")
_DEPRECATED = {
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
    "source": "deprecatedSource",
}


def new_event_causes(event: Json) -> Iterator[Cause]:
    """Validate a new event; causes have the field names of core/v1, as in Kubernetes."""
    for field in _REQUIRED:
        if not event.get(field):
            yield Cause("FieldValueRequired", "Required value", field)
    if event.get("type") not in {"Normal", "Warning"}:
        text = f'Invalid value: "": has invalid value: {event.get("type") or ""}'
        yield Cause("FieldValueInvalid", text, "type")
    for field, name in _DEPRECATED.items():
        if event.get(name):
            yield Cause("FieldValueInvalid", 'Invalid value: "": needs to be unset', field)
    series = event.get("series")
    if isinstance(series, dict) and int(series.get("count") or 0) < 2:
        text = f"Invalid value: {json_text(series.get('count'))}: should be at least 2"
        yield Cause("FieldValueInvalid", text, "series.count")

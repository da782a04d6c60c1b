"""Checks of request bodies: unknown fields, and the fields that events.k8s.io/v1 requires."""

from collections.abc import Iterator, Mapping

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.objects import Json, json_text
from simcluster.apimachinery.resources import Resource
from simcluster.apimachinery.schemas import OBJECT_META, resolved, schema_name
from simcluster.apiserver.crd.custom_kinds import CustomKind
from simcluster.apiserver.crd.schema_shape import prune


def schema_of(kind: Resource) -> Json:
    """Return the schema of a kind, without references."""
    return kind.schema if isinstance(kind, CustomKind) else resolved(schema_name(kind))


_METADATA: Json = {"properties": {"metadata": resolved(OBJECT_META)}}


def drop_unknown_fields(kind: Resource, obj: Json, query: Mapping[str, str]) -> list[str]:
    """Drop unknown fields, in place, and return the warnings; 400 in mode `Strict`."""
    mode = query.get("fieldValidation") or "Warn"
    if mode not in {"Strict", "Warn", "Ignore"}:
        raise ApiError.bad_request(
            f'fieldValidation: Unsupported value: "{mode}": supported values: '
            '"Ignore", "Strict", "Warn"'
        )
    meta = {"metadata": obj.get("metadata")}
    paths = [*prune(_METADATA, meta, embedded=False), *prune(schema_of(kind), obj)]
    dropped = [f'unknown field "{path}"' for path in paths]
    if dropped and mode == "Strict":
        raise ApiError.bad_request(
            f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: '
            f"strict decoding error: {', '.join(dropped)}"
        )
    return dropped if mode == "Warn" else []


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

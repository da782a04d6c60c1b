"""Pruning and defaulting by a structural schema; pure."""

from collections.abc import Iterator

from simcluster.apimachinery.objects import Json, JsonValue, deep_copy

RULES = "x-kubernetes-validations"
_TYPE_AND_METADATA = frozenset({"apiVersion", "kind", "metadata"})


def prune(schema: Json, obj: Json, *, embedded: bool = True) -> list[str]:
    """Drop the fields that the schema does not specify, in place, and return their paths.

    Type and metadata of an `embedded` object are not looked at.
    """
    return list(_prune(schema, obj, "", embedded=embedded))


def _prune(schema: Json, value: object, path: str, *, embedded: bool) -> Iterator[str]:
    if isinstance(value, list):
        for at, item in enumerate(value):
            yield from _below(schema.get("items"), item, f"{path}[{at}]")
    elif isinstance(value, dict):
        yield from _prune_map(schema, value, path, embedded=embedded)


def _prune_map(schema: Json, value: Json, path: str, *, embedded: bool) -> Iterator[str]:
    properties = schema.get("properties") or {}
    others = schema.get("additionalProperties")
    for key in list(value):
        below = f"{path}.{key}" if path else key
        if embedded and key in _TYPE_AND_METADATA:
            continue
        if key in properties:
            yield from _below(properties[key], value[key], below)
        elif isinstance(others, dict):
            yield from _below(others, value[key], below)
        elif not others and not schema.get("x-kubernetes-preserve-unknown-fields"):
            del value[key]
            yield below


def _below(schema: object, value: object, path: str) -> Iterator[str]:
    if isinstance(schema, dict):
        embedded = bool(schema.get("x-kubernetes-embedded-resource"))
        yield from _prune(schema, value, path, embedded=embedded)


def fill_defaults(schema: Json, value: object) -> None:
    """Set the schema's defaults, in place; a null that is not `nullable` counts as absent."""
    if isinstance(value, list):
        items = schema.get("items")
        for item in value:
            if isinstance(items, dict):
                fill_defaults(items, item)
    elif isinstance(value, dict):
        properties = schema.get("properties") or {}
        for key, below in properties.items():
            if _is_missing(below, key, value):
                value[key] = deep_copy({"": below["default"]})[""]
        others = schema.get("additionalProperties")
        for key, item in value.items():
            below = properties.get(key, others)
            if isinstance(below, dict):
                fill_defaults(below, item)


def _is_missing(schema: Json, key: str, value: Json) -> bool:
    if "default" not in schema:
        return False
    return key not in value or (value[key] is None and not schema.get("nullable"))


def has_rules(schema: JsonValue) -> bool:
    """Return whether a schema contains CEL rules."""
    if isinstance(schema, dict):
        return RULES in schema or any(has_rules(below) for below in schema.values())
    return isinstance(schema, list) and any(has_rules(below) for below in schema)

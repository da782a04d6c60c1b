"""Server-side apply: maps merge, lists merge by their schema; pure."""

from simcluster.apimachinery.merge_patches import field_schema
from simcluster.apimachinery.objects import Json, JsonValue


def apply_by_schema(schema: Json, old: JsonValue, new: JsonValue) -> JsonValue:
    """Apply a new value to the old one.

    Lists of type `map` merge by their keys, sets are united, and other lists are replaced. Fields
    that an earlier apply set and this one omits stay as they are: field owners are not recorded.
    """
    if isinstance(new, dict) and isinstance(old, dict):
        if schema.get("x-kubernetes-map-type") == "atomic":
            return new
        return {**old, **{key: _field(schema, key, old, value) for key, value in new.items()}}
    if isinstance(new, list) and isinstance(old, list):
        return _list(schema, old, new)
    return new


def _field(schema: Json, key: str, old: Json, value: JsonValue) -> JsonValue:
    return apply_by_schema(field_schema(schema, key), old[key], value) if key in old else value


def _list(schema: Json, old: list[JsonValue], new: list[JsonValue]) -> list[JsonValue]:
    match schema.get("x-kubernetes-list-type"):
        case "set":
            return [*old, *(value for value in new if value not in old)]
        case "map":
            return _merged_by_keys(schema, old, new)
        case _:
            return new


def _merged_by_keys(schema: Json, old: list[JsonValue], new: list[JsonValue]) -> list[JsonValue]:
    keys = schema.get("x-kubernetes-list-map-keys") or ()

    def identity(item: JsonValue) -> tuple[JsonValue, ...]:
        return tuple(item.get(key) for key in keys)

    result = list(old)
    for item in new:
        places = [
            at for at, candidate in enumerate(result) if identity(candidate) == identity(item)
        ]
        if places:
            result[places[0]] = apply_by_schema(schema.get("items") or {}, result[places[0]], item)
        else:
            result.append(item)
    return result

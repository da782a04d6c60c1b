"""JSON merge patches (RFC 7396) and Kubernetes strategic merge patches; pure."""

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, JsonValue


def apply_merge_patch(target: Json, patch: Json) -> Json:
    """Apply a JSON merge patch: maps merge, null removes, anything else replaces."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            below: JsonValue = result.get(key)
            result[key] = apply_merge_patch(below if isinstance(below, dict) else {}, value)
        else:
            result[key] = value
    return result


_KEY = "x-kubernetes-patch-merge-key"
_STRATEGY = "x-kubernetes-patch-strategy"
_DIRECTIVES = ("$patch", "$retainKeys")
_ORDER = "$setElementOrder/"
_DELETE_PRIMITIVES = "$deleteFromPrimitiveList/"


def apply_strategic_merge_patch(schema: Json, target: Json, patch: Json) -> Json:
    """Apply a strategic merge patch to an object of this schema."""
    match patch.get("$patch"):
        case "replace":
            return {key: value for key, value in patch.items() if key != "$patch"}
        case "delete":
            return {}
        case None | "merge":
            return _merged_map(schema, target, patch)
        case unknown:
            raise ApiError.bad_request(f"unknown patch type {unknown!r}")


def _merged_map(schema: Json, target: Json, patch: Json) -> Json:
    retained = patch.get("$retainKeys", target)
    result = {key: value for key, value in target.items() if key in retained}
    for key, value in patch.items():
        if key in _DIRECTIVES or key.startswith(_ORDER):
            continue
        if key.startswith(_DELETE_PRIMITIVES):
            _remove_primitives(result, key.removeprefix(_DELETE_PRIMITIVES), value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = _merged_field(field_schema(schema, key), result.get(key), value)
    for key, order in patch.items():
        field = key.removeprefix(_ORDER)
        if key.startswith(_ORDER) and isinstance(result.get(field), list):
            result[field] = _ordered(field_schema(schema, field), result[field], order)
    return result


def field_schema(schema: Json, key: str) -> Json:
    """Return the schema of a map's field, an empty one if it is not specified."""
    below = (schema.get("properties") or {}).get(key, schema.get("additionalProperties"))
    return below if isinstance(below, dict) else {}


def _merged_field(schema: Json, old: JsonValue, new: JsonValue) -> JsonValue:
    if isinstance(new, dict):
        return apply_strategic_merge_patch(schema, old if isinstance(old, dict) else {}, new)
    if not isinstance(new, list) or "merge" not in schema.get(_STRATEGY, ""):
        return new
    present = old if isinstance(old, list) else []
    if _KEY in schema:
        return _merged_list(schema, present, new)
    return [*present, *(value for value in new if value not in present)]


def _merged_list(schema: Json, old: list[JsonValue], new: list[JsonValue]) -> list[JsonValue]:
    if any(item.get("$patch") == "replace" for item in new):
        return [item for item in new if "$patch" not in item]
    key = schema[_KEY]
    result = list(old)
    for item in new:
        if key not in item:
            raise ApiError.bad_request(f"map: {item} does not contain declared merge key: {key}")
        result = _merged_item(schema, result, item)
    return result


def _merged_item(schema: Json, items: list[JsonValue], patch: Json) -> list[JsonValue]:
    """Merge a patch into the item of its key; append it if there is none."""
    key = schema[_KEY]
    below = schema["items"]
    places = [at for at, item in enumerate(items) if item.get(key) == patch[key]]
    if patch.get("$patch") == "delete":
        return [item for at, item in enumerate(items) if at not in places]
    if not places:
        return [*items, apply_strategic_merge_patch(below, {}, patch)]
    first = places[0]
    merged = apply_strategic_merge_patch(below, items[first], patch)
    return [*items[:first], merged, *items[first + 1 :]]


def _ordered(schema: Json, items: list[JsonValue], order: list[JsonValue]) -> list[JsonValue]:
    """Sort the items named in `order` into that order; others stay behind their predecessor."""

    def identity(item: JsonValue) -> JsonValue:
        return item.get(schema.get(_KEY)) if isinstance(item, dict) else item

    def rank(item: JsonValue) -> int:
        wanted = identity(item)
        for at, key in enumerate(order):
            if identity(key) == wanted:
                return at
        return -1

    ranks: list[tuple[int, int]] = []
    highest = -1
    for at, item in enumerate(items):
        own = rank(item)
        highest = own if own >= 0 else highest
        ranks.append((highest, at))
    return [items[at] for _, at in sorted(ranks)]


def _remove_primitives(target: Json, field: str, values: list[JsonValue]) -> None:
    if isinstance(target.get(field), list):
        target[field] = [value for value in target[field] if value not in values]

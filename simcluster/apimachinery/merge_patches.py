"""JSON merge patches (RFC 7396) and Kubernetes strategic merge patches; pure."""

from collections.abc import Mapping

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


_MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "conditions": "type",
    "addresses": "type",
    "ownerReferences": "uid",
    "taints": "key",
    "podIPs": "ip",
    "hostIPs": "ip",
    "secrets": "name",
    "webhooks": "name",
}
_PORT_KEYS = ("containerPort", "port")  # a container's, a service's
_CLAIM_DEVICE_KEYS = ("driver", "device", "pool", "shareID")  # `shareID` is optional
_PRIMITIVE_LISTS = ("finalizers",)
_DIRECTIVES = ("$patch", "$retainKeys")
_ORDER = "$setElementOrder/"
_DELETE_PRIMITIVES = "$deleteFromPrimitiveList/"


def apply_strategic_merge_patch(target: Json, patch: Json) -> Json:
    """Apply a strategic merge patch to an object."""
    match patch.get("$patch"):
        case "replace":
            return {key: value for key, value in patch.items() if key != "$patch"}
        case "delete":
            return {}
        case None | "merge":
            return _merged_map(target, patch)
        case unknown:
            raise ApiError.bad_request(f"unknown patch type {unknown!r}")


def _merged_map(target: Json, patch: Json) -> Json:
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
            result[key] = _merged_field(key, result.get(key), value)
    for key, order in patch.items():
        field = key.removeprefix(_ORDER)
        if key.startswith(_ORDER) and isinstance(result.get(field), list):
            result[field] = _ordered(field, result[field], order)
    return result


def _merged_field(key: str, old: JsonValue, new: JsonValue) -> JsonValue:
    if isinstance(new, dict):
        return apply_strategic_merge_patch(old if isinstance(old, dict) else {}, new)
    if not isinstance(new, list):
        return new
    merge_keys = _merge_keys(key, [*new, *(old if isinstance(old, list) else ())])
    if merge_keys:
        return _merged_list(merge_keys, old if isinstance(old, list) else [], new)
    if key in _PRIMITIVE_LISTS:
        return [*(old or ()), *(each for each in new if each not in (old or ()))]
    return new


def _merge_keys(field: str, items: list[JsonValue]) -> tuple[str, ...]:
    """Return the keys that identify an item, the first of which is required; none: no list."""
    if field == "ports":
        found = next((key for key in _PORT_KEYS if any(key in each for each in items)), None)
    elif field == "devices" and any("driver" in each for each in items):
        return _CLAIM_DEVICE_KEYS
    else:
        found = _MERGE_KEYS.get(field)
    return (found,) if found else ()


def _identity(keys: tuple[str, ...], item: Json) -> tuple[JsonValue, ...]:
    return tuple(item.get(key) for key in keys)


def _merged_list(
    merge_keys: tuple[str, ...], old: list[JsonValue], new: list[JsonValue]
) -> list[JsonValue]:
    if any(item.get("$patch") == "replace" for item in new):
        return [item for item in new if "$patch" not in item]
    result = list(old)
    for item in new:
        if merge_keys[0] not in item:
            raise ApiError.bad_request(
                f"map: {item} does not contain declared merge key: {merge_keys[0]}"
            )
        result = _merged_item(merge_keys, result, item)
    return result


def _merged_item(
    merge_keys: tuple[str, ...], items: list[JsonValue], patch: Json
) -> list[JsonValue]:
    """Merge a patch into the item of its keys; append it if there is none."""
    own = _identity(merge_keys, patch)
    places = [at for at, each in enumerate(items) if _identity(merge_keys, each) == own]
    if patch.get("$patch") == "delete":
        return [each for at, each in enumerate(items) if at not in places]
    if not places:
        return [*items, apply_strategic_merge_patch({}, patch)]
    first = places[0]
    merged = apply_strategic_merge_patch(items[first], patch)
    return [*items[:first], merged, *items[first + 1 :]]


def _ordered(field: str, items: list[JsonValue], order: list[JsonValue]) -> list[JsonValue]:
    """Sort the items named in `order` into that order; others stay behind their predecessor."""
    merge_keys = _merge_keys(field, [each for each in items if isinstance(each, dict)])

    def identity(item: JsonValue) -> JsonValue:
        return _identity(merge_keys, item) if merge_keys and isinstance(item, dict) else item

    def rank(item: JsonValue) -> int:
        wanted = identity(item)
        for at, each in enumerate(order):
            if identity(each) == wanted:
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
        target[field] = [each for each in target[field] if each not in values]

"""Which program wrote a field of a node last, as `metadata.managedFields` has it; pure.

Recorded are labels, annotations and the spec. A list counts as one field.
"""

from collections.abc import Iterator

from simcluster.apimachinery.objects import Json, JsonValue, metadata

FieldPath = tuple[str, ...]
_PREFIX = "f:"
_RECORDED = (("metadata", "labels"), ("metadata", "annotations"), ("spec",))


def recorded_managers(old: Json, new: Json, manager: str, now: str) -> list[Json]:
    """Return the entries of an object once `manager` has made it `new`."""
    before, after = _fields(old), _fields(new)
    written = [path for path, value in after.items() if before.get(path) != value]
    times = dict[str, str]()
    managers = dict[FieldPath, str]()
    for entry in metadata(old).get("managedFields") or ():
        times[entry["manager"]] = entry["time"]
        managers |= dict.fromkeys(_paths(entry["fieldsV1"]), entry["manager"])
    if written:
        times[manager] = now
        managers |= dict.fromkeys(written, manager)
    return [
        {
            "manager": name,
            "operation": "Update",
            "apiVersion": "v1",
            "time": time,
            "fieldsType": "FieldsV1",
            "fieldsV1": _fields_v1(paths),
        }
        for name, time in times.items()
        if (paths := [path for path in after if managers.get(path) == name])
    ]


def _fields(obj: Json) -> dict[FieldPath, JsonValue]:
    leaves: dict[FieldPath, JsonValue] = {}
    for root in _RECORDED:
        value: JsonValue = obj
        for part in root:
            value = value.get(part) or {}
        leaves |= dict(_leaves(root, value))
    return leaves


def _leaves(path: FieldPath, value: JsonValue) -> Iterator[tuple[FieldPath, JsonValue]]:
    if not isinstance(value, dict) or (not value and path not in _RECORDED):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves((*path, key), inner)


def _fields_v1(paths: list[FieldPath]) -> Json:
    fields: Json = {}
    for path in paths:
        inner = fields
        for part in path:
            inner = inner.setdefault(f"{_PREFIX}{part}", {})
    return fields


def _paths(fields: Json, path: FieldPath = ()) -> Iterator[FieldPath]:
    for key, inner in fields.items():
        longer = (*path, key.removeprefix(_PREFIX))
        if inner:
            yield from _paths(inner, longer)
        else:
            yield longer

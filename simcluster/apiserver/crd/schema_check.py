"""Validation of values by a structural OpenAPI v3 schema, with Kubernetes' texts; pure."""

import base64
import binascii
import ipaddress
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from simcluster.apimachinery.errors import Cause
from simcluster.apimachinery.names import is_subdomain
from simcluster.apimachinery.objects import Json, JsonValue, json_text

_DURATION = re.compile(
    r"[+-]?(\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)((\d+(\.\d*)?)(ns|us|µs|ms|s|m|h))*"
)
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")


def _reads(parse: Callable[[str], Any]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            parse(text)
        except (ValueError, binascii.Error):
            return False
        return True

    return check


_TEXT: Mapping[str, Callable[[str], bool]] = {
    "byte": _reads(lambda text: base64.b64decode(text, validate=True)),
    "cidr": _reads(lambda text: ipaddress.ip_network(text, strict=False)),
    "date": _reads(date.fromisoformat),
    "date-time": _reads(datetime.fromisoformat),
    "datetime": _reads(datetime.fromisoformat),
    "duration": lambda text: text == "0" or _DURATION.fullmatch(text) is not None,
    "email": lambda text: _EMAIL.fullmatch(text) is not None,
    "hostname": lambda text: is_subdomain(text.lower()),
    "ipv4": _reads(ipaddress.IPv4Address),
    "ipv6": _reads(ipaddress.IPv6Address),
    "uri": lambda text: bool(urlsplit(text).scheme),
    "uuid": _reads(uuid.UUID),
}
_WHOLE = {"int32": 1 << 31, "int64": 1 << 63}


def has_format(name: str, value: object) -> bool:
    """Return whether a value has a format; every value has an unknown format."""
    if name in _WHOLE and isinstance(value, int) and not isinstance(value, bool):
        return -_WHOLE[name] <= value < _WHOLE[name]
    if isinstance(value, str) and name in _TEXT:
        return _TEXT[name](value)
    return True


ABSENT: JsonValue = object()
"""The old value of a field that did not exist."""


def schema_violations(
    schema: Json, value: JsonValue, path: str = "", old: JsonValue = ABSENT
) -> Iterator[Cause]:
    """Validate a value; a value that equals `old` is not validated (ratcheting)."""
    if old is not ABSENT and old == value:
        return
    wanted = _types(schema)
    if value is None and (schema.get("nullable") or not wanted):
        return
    if wanted and not any(_has_type(value, type_name) for type_name in wanted):
        kind = _type_of(value)
        text = f'must be of type {",".join(wanted)}: "{kind}"'
        yield Cause(
            "FieldValueTypeInvalid", f'Invalid value: "{kind}": {_location(path)} {text}', path
        )
        return
    for keyword, check in _KEYWORDS.items():
        if keyword in schema:
            yield from check(schema, value, path)
    yield from _combined(schema, value, path)
    for child in children(schema, value, path, old):
        yield from schema_violations(*child)


def _types(schema: Json) -> list[str]:
    if schema.get("x-kubernetes-int-or-string"):
        return ["integer", "string"]
    return [schema["type"]] if schema.get("type") else []


def _type_of(value: JsonValue) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if float(value).is_integer() else "number"
    names: Mapping[type, str] = {str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _has_type(value: JsonValue, wanted: str) -> bool:
    actual = _type_of(value)
    return actual == wanted or (wanted == "number" and actual == "integer")


def _location(path: str) -> str:
    return f"{path} in body"


def _invalid(path: str, value: JsonValue, text: str) -> Cause:
    return Cause(
        "FieldValueInvalid", f"Invalid value: {json_text(value)}: {_location(path)} {text}", path
    )


def child_path(path: str, key: str) -> str:
    """Return the path of a field below another."""
    return f"{path}.{key}" if path else key


def _enum(schema: Json, value: JsonValue, path: str) -> Iterator[Cause]:
    if value not in schema["enum"]:
        allowed = ", ".join(f'"{e}"' if isinstance(e, str) else f'"{json_text(e)}"'
                            for e in schema["enum"])  # fmt: skip
        text = f"Unsupported value: {json_text(value)}: supported values: {allowed}"
        yield Cause("FieldValueNotSupported", text, path)


def _is_number(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _minimum(schema: Json, value: JsonValue, path: str) -> Iterator[Cause]:
    if _is_number(value):
        bound = schema["minimum"]
        if schema.get("exclusiveMinimum") and value <= bound:
            yield _invalid(path, value, f"should be greater than {bound}")
        elif value < bound:
            yield _invalid(path, value, f"should be greater than or equal to {bound}")


def _maximum(schema: Json, value: JsonValue, path: str) -> Iterator[Cause]:
    if _is_number(value):
        bound = schema["maximum"]
        if schema.get("exclusiveMaximum") and value >= bound:
            yield _invalid(path, value, f"should be less than {bound}")
        elif value > bound:
            yield _invalid(path, value, f"should be less than or equal to {bound}")


def _multiple_of(schema: Json, value: JsonValue, path: str) -> Iterator[Cause]:
    step = schema["multipleOf"]
    if _is_number(value) and not float(value / step).is_integer():
        yield _invalid(path, value, f"should be a multiple of {step}")


@lru_cache(maxsize=1024)
def pattern_of(text: str) -> re.Pattern[str]:
    """Compile a schema's pattern; raises `re.error`."""
    return re.compile(text)


def _pattern(schema: Json, value: JsonValue, path: str) -> Iterator[Cause]:
    if isinstance(value, str) and pattern_of(schema["pattern"]).search(value) is None:
        yield _invalid(path, value, f"should match '{schema['pattern']}'")


def _format(schema: Json, value: JsonValue, path: str) -> Iterator[Cause]:
    wanted = schema["format"]
    if has_format(wanted, value):
        return
    if isinstance(value, str):
        shown = json_text(value)
        text = f"Invalid value: {shown}: {_location(path)} must be of type {wanted}: {shown}"
        yield Cause("FieldValueTypeInvalid", text, path)
    else:
        kind = schema.get("type", "")
        text = f"Checked value must be of type {kind} with format {wanted} in {path}"
        yield _invalid_as_a_whole(text)


def _invalid_as_a_whole(text: str) -> Cause:
    """Return a cause as Kubernetes shows it where its validator has an error without a field."""
    return Cause("FieldValueInvalid", f'Invalid value: "": {text}', "<nil>")


def _min_length(schema: Json, value: JsonValue, path: str) -> Iterator[Cause]:
    least = schema["minLength"]
    if isinstance(value, str) and len(value) < least:
        yield _invalid(path, value, f"should be at least {least} chars long")


def _at_least(kind: type, keyword: str, unit: str) -> "_Check":
    def check(schema: Json, value: JsonValue, path: str) -> Iterator[Cause]:
        if isinstance(value, kind) and len(value) < schema[keyword]:  # type: ignore[arg-type]
            size = len(value)  # type: ignore[arg-type]
            yield _invalid(path, size, f"should have at least {schema[keyword]} {unit}")

    return check


def _max_length(schema: Json, value: JsonValue, path: str) -> Iterator[Cause]:
    most = schema["maxLength"]
    if isinstance(value, str) and len(value) > most:
        text = f"Too long: may not be more than {most} bytes"
        yield Cause("FieldValueTooLong", text, path)


def _at_most(kind: type, keyword: str) -> "_Check":
    def check(schema: Json, value: JsonValue, path: str) -> Iterator[Cause]:
        if isinstance(value, kind) and len(value) > schema[keyword]:  # type: ignore[arg-type]
            most = schema[keyword]
            size = len(value)  # type: ignore[arg-type]
            items = "item" if most == 1 else "items"
            text = f"Too many: {size}: must have at most {most} {items}"
            yield Cause("FieldValueTooMany", text, path)

    return check


def _required(schema: Json, value: JsonValue, path: str) -> Iterator[Cause]:
    if isinstance(value, dict):
        for key in schema["required"]:
            if key not in value:
                yield Cause("FieldValueRequired", "Required value", child_path(path, key))


def _list_type(schema: Json, value: JsonValue, path: str) -> Iterator[Cause]:
    if not isinstance(value, list) or schema["x-kubernetes-list-type"] == "atomic":
        return
    keys = schema.get("x-kubernetes-list-map-keys") or []
    seen: list[JsonValue] = []
    for at, item in enumerate(value):
        shown = {key: item.get(key) for key in keys} if keys and isinstance(item, dict) else item
        if shown in seen:
            yield Cause(
                "FieldValueDuplicate", f"Duplicate value: {json_text(shown)}", f"{path}[{at}]"
            )
        seen.append(shown)


_Check = Callable[[Json, JsonValue, str], Iterator[Cause]]
_KEYWORDS: Mapping[str, _Check] = {
    "required": _required,
    "enum": _enum,
    "minimum": _minimum,
    "maximum": _maximum,
    "multipleOf": _multiple_of,
    "pattern": _pattern,
    "format": _format,
    "minLength": _min_length,
    "maxLength": _max_length,
    "minItems": _at_least(list, "minItems", "items"),
    "maxItems": _at_most(list, "maxItems"),
    "minProperties": _at_least(dict, "minProperties", "properties"),
    "maxProperties": _at_most(dict, "maxProperties"),
    "x-kubernetes-list-type": _list_type,
}


def _combined(schema: Json, value: JsonValue, path: str) -> Iterator[Cause]:
    def fails(text: str) -> Cause:
        return _invalid_as_a_whole(f'"{path}" {text}')

    for below in schema.get("allOf") or ():
        yield from schema_violations(below, value, path)
    any_of = _count_valid(schema.get("anyOf") or (), value, path)
    if schema.get("anyOf") and not any_of:
        yield fails("must validate at least one schema (anyOf)")
    one_of = _count_valid(schema.get("oneOf") or (), value, path)
    if schema.get("oneOf") and one_of != 1:
        matched = f"{one_of} valid alternatives" if one_of else "none valid"
        yield fails(f"must validate one and only one schema (oneOf). Found {matched}")
    if isinstance(schema.get("not"), dict) and _count_valid([schema["not"]], value, path):
        yield fails("must not validate the schema (not)")


def _count_valid(schemas: Iterable[Json], value: JsonValue, path: str) -> int:
    return sum(next(schema_violations(option, value, path), None) is None for option in schemas)


def children(
    schema: Json, value: JsonValue, path: str, old: JsonValue
) -> Iterator[tuple[Json, JsonValue, str, JsonValue]]:
    """Iterate over the fields and items of a value: schema, value, path, old value or `ABSENT`."""
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        others = schema.get("additionalProperties")
        before = old if isinstance(old, dict) else {}
        for key, item in value.items():
            below = properties.get(key, others)
            if isinstance(below, dict):
                yield below, item, child_path(path, key), before.get(key, ABSENT)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        old_item = old_item_finder(schema, old)
        for at, item in enumerate(value):
            yield schema["items"], item, f"{path}[{at}]", old_item(item)


def old_item_finder(schema: Json, old: JsonValue) -> Callable[[JsonValue], JsonValue]:
    """Return a function from a list item to its old item, or `ABSENT`.

    Items correspond in lists of type `map` only.
    """
    keys = schema.get("x-kubernetes-list-map-keys")
    if not keys or not isinstance(old, list):
        return lambda _item: ABSENT

    def identity(item: JsonValue) -> list[JsonValue] | None:
        return [item.get(key) for key in keys] if isinstance(item, dict) else None

    return lambda item: next(
        (candidate for candidate in old if identity(candidate) == identity(item)), ABSENT
    )

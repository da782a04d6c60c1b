"""Decoding of Kubernetes protobuf bodies, which some kubectl commands and client-go send.

A body is the magic `k8s`, a zero byte, and an `Unknown` message: its type in field 1, the object in
field 2. The published schemas have the numbers of the fields.
"""

import base64
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, JsonValue, decode, rfc3339
from simcluster.apimachinery.schemas import published, resolved

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\0"
_META = "io.k8s.apimachinery.pkg.apis.meta.v1."
_FOREIGN = {"DeleteOptions": _META}
"""Kinds that are sent in the version of the group whose objects they delete."""


def decode_body(body: bytes) -> Json:
    """Decode a body; 415 for an unknown message, 400 for a malformed one."""
    if not body.startswith(_MAGIC):
        raise ApiError.bad_request("the protobuf body does not begin with its magic number")
    try:
        outer = dict(_fields(body.removeprefix(_MAGIC)))
        head = dict(_fields(outer[1]))
        api_version = head.get(1, b"").decode()
        kind = head[2].decode()
        name = _schema_name(api_version, kind)
        if name not in published():
            raise ApiError(
                415,
                "UnsupportedMediaType",
                f"protobuf bodies of kind {kind} are not supported; send JSON or YAML",
            )
        obj = _message(resolved(name), outer.get(2, b""))
    except (IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise ApiError.bad_request(f"the protobuf body is malformed: {error!r}") from error
    return {"apiVersion": api_version, "kind": kind, **obj}


def _schema_name(api_version: str, kind: str) -> str:
    group, _, version = api_version.rpartition("/")
    package = f"io.k8s.api.{group.split('.')[0] or 'core'}.{version}."
    return f"{_FOREIGN.get(kind, package)}{kind}"


def _message(schema: Json, data: bytes) -> JsonValue:
    form = _FORMS.get(schema.get("x-protobuf-form", ""))
    if form is not None:
        return form(data)
    named = {
        row["x-protobuf"]: (name, row)
        for name, row in schema["properties"].items()
        if "x-protobuf" in row
    }
    inlined = schema.get("x-protobuf-inlined") or {}
    result: Json = {}
    for number, value in _fields(data):
        if str(number) in inlined:
            result |= _message(inlined[str(number)], value)
        elif number in named:
            name, row = named[number]
            _add(result, name, row, value)
    return result


def _add(result: Json, name: str, schema: Json, value: Any) -> None:
    if "x-protobuf-form" not in schema:
        if schema.get("type") == "array":
            result.setdefault(name, []).append(_value(schema["items"], value))
            return
        if "additionalProperties" in schema:
            entry = dict(_fields(value))
            below = _value(schema["additionalProperties"], entry.get(2, b""))
            result.setdefault(name, {})[entry.get(1, b"").decode()] = below
            return
    read = _value(schema, value)
    if read or read == {} or not schema.get("x-omit-zero"):
        result[name] = read


def _value(schema: Json, value: Any) -> JsonValue:
    if schema.get("properties") is not None or "x-protobuf-form" in schema:
        return _message(schema, value)
    if schema["type"] == "boolean":
        return bool(value)
    if schema["type"] == "string":
        binary = schema.get("format") == "byte"
        return base64.b64encode(value).decode() if binary else value.decode()
    return value


def _time(data: bytes) -> JsonValue:
    parts = dict(_fields(data))
    return rfc3339(parts.get(1, 0)) if parts else None


def _micro_time(data: bytes) -> JsonValue:
    parts = dict(_fields(data))
    whole = rfc3339(parts.get(1, 0))[:-1]
    return f"{whole}.{parts.get(2, 0) // 1000:06}Z" if parts else None


def _int_or_string(data: bytes) -> JsonValue:
    parts = dict(_fields(data))
    return parts.get(3, b"").decode() if parts.get(1) else parts.get(2, 0)


def _json(data: bytes) -> JsonValue:
    try:
        return decode(dict(_fields(data)).get(1, b"null"))
    except msgspec.DecodeError as error:
        raise ApiError.bad_request(f"the protobuf body contains malformed JSON: {error}") from error


_FORMS: Mapping[str, Callable[[bytes], JsonValue]] = {
    "Quantity": lambda data: dict(_fields(data)).get(1, b"0").decode(),
    "IntOrString": _int_or_string,
    "Time": _time,
    "MicroTime": _micro_time,
    "Duration": lambda data: f"{dict(_fields(data)).get(1, 0) / 1e9}s",
    "Items": lambda data: [value.decode() for _, value in _fields(data)],
    "JSON": _json,
}


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Iterate over (number, value): whole numbers, fractions, or bytes for all other types."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
        elif tag & 7 == 1:
            yield tag >> 3, struct.unpack_from("<d", data, at)[0]
            at += 8
        elif tag & 7 == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise IndexError(f"{length} bytes wanted at {at} of {len(data)}")
            yield tag >> 3, data[at : at + length]
            at += length
        else:
            raise KeyError(f"wire type {tag & 7}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value - (1 << 64) if value >> 63 else value, at

"""Kubernetes protobuf bodies: what kubectl's own typed commands send (`create configmap`, `drain`).

Such a body is the magic `k8s`, a zero byte, and an `Unknown` message: its type in field 1, the
object in field 2.
Only the messages below are known; anything else is answered with 415, and `kubectl apply -f`
and `create -f`, which send JSON, take over.
"""

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\0"


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its JSON name, and how it is read.

    `form` is text, bytes, number, flag, map (of text), bytesmap, quantities (a map of them), or
    the name of a message.
    """

    name: str
    form: str = "text"
    repeated: bool = False


_MESSAGES: Mapping[str, Mapping[int, Field]] = {
    "Unknown": {1: Field("type", "TypeMeta"), 2: Field("raw", "bytes")},
    "TypeMeta": {1: Field("apiVersion"), 2: Field("kind")},
    "ObjectMeta": {
        1: Field("name"),
        2: Field("generateName"),
        3: Field("namespace"),
        5: Field("uid"),
        6: Field("resourceVersion"),
        11: Field("labels", "map"),
        12: Field("annotations", "map"),
        14: Field("finalizers", repeated=True),
    },
    "ConfigMap": {
        1: Field("metadata", "ObjectMeta"),
        2: Field("data", "map"),
        3: Field("binaryData", "bytesmap"),
        4: Field("immutable", "flag"),
    },
    "Secret": {
        1: Field("metadata", "ObjectMeta"),
        2: Field("data", "bytesmap"),
        3: Field("type"),
        4: Field("stringData", "map"),
        5: Field("immutable", "flag"),
    },
    "Namespace": {1: Field("metadata", "ObjectMeta")},
    "ServiceAccount": {1: Field("metadata", "ObjectMeta")},
    "PriorityClass": {
        1: Field("metadata", "ObjectMeta"),
        2: Field("value", "number"),
        3: Field("globalDefault", "flag"),
        4: Field("description"),
        5: Field("preemptionPolicy"),
    },
    "ResourceQuota": {1: Field("metadata", "ObjectMeta"), 2: Field("spec", "ResourceQuotaSpec")},
    "ResourceQuotaSpec": {
        1: Field("hard", "quantities"),
        2: Field("scopes", repeated=True),
        3: Field("scopeSelector", "ScopeSelector"),
    },
    "ScopeSelector": {1: Field("matchExpressions", "ScopeRequirement", repeated=True)},
    "ScopeRequirement": {
        1: Field("scopeName"),
        2: Field("operator"),
        3: Field("values", repeated=True),
    },
    "PodDisruptionBudget": {
        1: Field("metadata", "ObjectMeta"),
        2: Field("spec", "PodDisruptionBudgetSpec"),
    },
    "PodDisruptionBudgetSpec": {
        1: Field("minAvailable", "IntOrString"),
        2: Field("selector", "LabelSelector"),
        3: Field("maxUnavailable", "IntOrString"),
    },
    "IntOrString": {1: Field("type", "number"), 2: Field("number", "number"), 3: Field("text")},
    "LabelSelector": {
        1: Field("matchLabels", "map"),
        2: Field("matchExpressions", "LabelSelectorRequirement", repeated=True),
    },
    "LabelSelectorRequirement": {
        1: Field("key"),
        2: Field("operator"),
        3: Field("values", repeated=True),
    },
    "Eviction": {
        1: Field("metadata", "ObjectMeta"),
        2: Field("deleteOptions", "DeleteOptions"),
    },
    "DeleteOptions": {
        1: Field("gracePeriodSeconds", "number"),
        2: Field("preconditions", "Preconditions"),
        4: Field("propagationPolicy"),
        5: Field("dryRun", repeated=True),
    },
    "Preconditions": {1: Field("uid"), 2: Field("resourceVersion")},
    "TokenRequest": {1: Field("metadata", "ObjectMeta"), 2: Field("spec", "TokenRequestSpec")},
    "TokenRequestSpec": {
        1: Field("audiences", repeated=True),
        3: Field("boundObjectRef", "BoundObjectReference"),
        4: Field("expirationSeconds", "number"),
    },
    "BoundObjectReference": {
        1: Field("kind"),
        2: Field("apiVersion"),
        3: Field("name"),
        4: Field("uid"),
    },
}


def decoded(body: bytes) -> Json:
    """Decode a body; 415 when its message is not known, 400 when it is broken."""
    if not body.startswith(_MAGIC):
        raise ApiError.bad_request("the protobuf body does not begin with its magic number")
    try:
        outer = _message("Unknown", body.removeprefix(_MAGIC))
        kind = outer["type"]["kind"]
        if kind not in _MESSAGES:
            raise ApiError(
                415, "UnsupportedMediaType", f"this API server reads {kind} as JSON or YAML only"
            )
        return {**outer["type"], **_message(kind, outer.get("raw", b""))}
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ApiError.bad_request(f"the protobuf body is broken: {error!r}") from error


def _message(name: str, data: bytes) -> Json:
    result: Json = {}
    for number, value in _fields(data):
        field = _MESSAGES[name].get(number)
        if field is None:
            continue
        read = _value(field, value)
        if field.form in {"map", "bytesmap", "quantities"}:
            result.setdefault(field.name, {}).update(read)
        elif field.repeated:
            result.setdefault(field.name, []).append(read)
        elif read != "":
            result[field.name] = read
    if name == "IntOrString":
        return {"": result.get("text", "") if result.get("type") else result.get("number", 0)}
    return result


def _value(field: Field, value: Any) -> Any:
    match field.form:
        case "text":
            return value.decode()
        case "bytes" | "number":
            return value
        case "flag":
            return bool(value)
        case "map" | "bytesmap":
            return _entry(value, binary=field.form == "bytesmap")
        case "quantities":
            parts = dict(_fields(value))
            amount = dict(_fields(parts.get(2, b""))).get(1, b"0")
            return {parts.get(1, b"").decode(): amount.decode()}
        case message:
            read = _message(message, value)
            return read[""] if message == "IntOrString" else read


def _entry(data: bytes, *, binary: bool) -> Json:
    parts = dict(_fields(data))
    key, value = parts.get(1, b"").decode(), parts.get(2, b"")
    return {key: base64.b64encode(value).decode() if binary else value.decode()}


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Iterate over (number, value): whole numbers, or bytes for everything with a length."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
        elif tag & 7 == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise IndexError(f"{length} bytes wanted at {at} of {len(data)}")
            yield tag >> 3, data[at : at + length]
            at += length
        else:
            raise KeyError(f"wire type {tag & 7}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at

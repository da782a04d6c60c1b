"""Decoding of Kubernetes protobuf bodies, which some kubectl commands send; pure.

`kubectl create configmap`, `drain` and others send them. A body is the magic `k8s`, a zero byte,
and an `Unknown` message: its type in field 1, the object in field 2. Messages that are not listed
here get 415; `kubectl apply -f` and `create -f` send JSON.
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
class ProtobufField:
    """One field: its JSON name and its form.

    `form` is text, bytes, number, flag, map (of text), bytesmap, quantities (a map of them), or the
    name of a message.
    """

    name: str
    form: str = "text"
    repeated: bool = False


_MESSAGES: Mapping[str, Mapping[int, ProtobufField]] = {
    "Unknown": {1: ProtobufField("type", "TypeMeta"), 2: ProtobufField("raw", "bytes")},
    "TypeMeta": {1: ProtobufField("apiVersion"), 2: ProtobufField("kind")},
    "ObjectMeta": {
        1: ProtobufField("name"),
        2: ProtobufField("generateName"),
        3: ProtobufField("namespace"),
        5: ProtobufField("uid"),
        6: ProtobufField("resourceVersion"),
        11: ProtobufField("labels", "map"),
        12: ProtobufField("annotations", "map"),
        14: ProtobufField("finalizers", repeated=True),
    },
    "ConfigMap": {
        1: ProtobufField("metadata", "ObjectMeta"),
        2: ProtobufField("data", "map"),
        3: ProtobufField("binaryData", "bytesmap"),
        4: ProtobufField("immutable", "flag"),
    },
    "Secret": {
        1: ProtobufField("metadata", "ObjectMeta"),
        2: ProtobufField("data", "bytesmap"),
        3: ProtobufField("type"),
        4: ProtobufField("stringData", "map"),
        5: ProtobufField("immutable", "flag"),
    },
    "Namespace": {1: ProtobufField("metadata", "ObjectMeta")},
    "ServiceAccount": {1: ProtobufField("metadata", "ObjectMeta")},
    "PriorityClass": {
        1: ProtobufField("metadata", "ObjectMeta"),
        2: ProtobufField("value", "number"),
        3: ProtobufField("globalDefault", "flag"),
        4: ProtobufField("description"),
        5: ProtobufField("preemptionPolicy"),
    },
    "ResourceQuota": {
        1: ProtobufField("metadata", "ObjectMeta"),
        2: ProtobufField("spec", "ResourceQuotaSpec"),
    },
    "ResourceQuotaSpec": {
        1: ProtobufField("hard", "quantities"),
        2: ProtobufField("scopes", repeated=True),
        3: ProtobufField("scopeSelector", "ScopeSelector"),
    },
    "ScopeSelector": {1: ProtobufField("matchExpressions", "ScopeRequirement", repeated=True)},
    "ScopeRequirement": {
        1: ProtobufField("scopeName"),
        2: ProtobufField("operator"),
        3: ProtobufField("values", repeated=True),
    },
    "PodDisruptionBudget": {
        1: ProtobufField("metadata", "ObjectMeta"),
        2: ProtobufField("spec", "PodDisruptionBudgetSpec"),
    },
    "PodDisruptionBudgetSpec": {
        1: ProtobufField("minAvailable", "IntOrString"),
        2: ProtobufField("selector", "LabelSelector"),
        3: ProtobufField("maxUnavailable", "IntOrString"),
    },
    "IntOrString": {
        1: ProtobufField("type", "number"),
        2: ProtobufField("number", "number"),
        3: ProtobufField("text"),
    },
    "LabelSelector": {
        1: ProtobufField("matchLabels", "map"),
        2: ProtobufField("matchExpressions", "LabelSelectorRequirement", repeated=True),
    },
    "LabelSelectorRequirement": {
        1: ProtobufField("key"),
        2: ProtobufField("operator"),
        3: ProtobufField("values", repeated=True),
    },
    "Eviction": {
        1: ProtobufField("metadata", "ObjectMeta"),
        2: ProtobufField("deleteOptions", "DeleteOptions"),
    },
    "DeleteOptions": {
        1: ProtobufField("gracePeriodSeconds", "number"),
        2: ProtobufField("preconditions", "Preconditions"),
        4: ProtobufField("propagationPolicy"),
        5: ProtobufField("dryRun", repeated=True),
    },
    "Preconditions": {1: ProtobufField("uid"), 2: ProtobufField("resourceVersion")},
    "TokenRequest": {
        1: ProtobufField("metadata", "ObjectMeta"),
        2: ProtobufField("spec", "TokenRequestSpec"),
    },
    "TokenRequestSpec": {
        1: ProtobufField("audiences", repeated=True),
        3: ProtobufField("boundObjectRef", "BoundObjectReference"),
        4: ProtobufField("expirationSeconds", "number"),
    },
    "BoundObjectReference": {
        1: ProtobufField("kind"),
        2: ProtobufField("apiVersion"),
        3: ProtobufField("name"),
        4: ProtobufField("uid"),
    },
}


def decode_body(body: bytes) -> Json:
    """Decode a body; 415 for an unknown message, 400 for a malformed one."""
    if not body.startswith(_MAGIC):
        raise ApiError.bad_request("the protobuf body does not begin with its magic number")
    try:
        outer = _message("Unknown", body.removeprefix(_MAGIC))
        kind = outer["type"]["kind"]
        if kind not in _MESSAGES:
            raise ApiError(
                415,
                "UnsupportedMediaType",
                f"protobuf bodies of kind {kind} are not supported; send JSON or YAML",
            )
        return {**outer["type"], **_message(kind, outer.get("raw", b""))}
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ApiError.bad_request(f"the protobuf body is malformed: {error!r}") from error


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


def _value(field: ProtobufField, value: Any) -> Any:
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
    """Iterate over (number, value): whole numbers, or bytes for all other types."""
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

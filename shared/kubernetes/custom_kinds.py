"""Objects of our own kinds: their specs as Structs, and the OpenAPI schemas of these; pure.

The bounds of a Struct's fields are those of the CustomResourceDefinition, which is generated from
it, so that a file is held to what an API server accepts.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from shared.kubernetes.types import NamedReference
from shared.model.errors import RequestError
from shared.model.names import Namespace

T = TypeVar("T")
API_VERSION = "leasehold.dev/v1alpha1"
LONGEST_FAULT = 100
"""Characters of a fault in a message: an unknown field may have any length."""


class NamespaceObject(msgspec.Struct, frozen=True, rename="camel"):
    """An object that is for the namespace of its name."""

    api_version: str
    kind: str
    metadata: NamedReference
    spec: object = None


def by_namespace(
    items: Iterable[object], kind: str, parse_spec: Callable[[Namespace, object], T]
) -> dict[Namespace, T]:
    """Parse objects of one kind. Raises RequestError for any other, and for two of one name."""
    found: dict[Namespace, T] = {}
    for item in items:
        name, spec = _named_spec(item, kind)
        if name in found:
            raise RequestError(f"{kind} {name} is defined twice")
        found[name] = parse_spec(name, spec)
    return found


def _named_spec(item: object, kind: str) -> tuple[Namespace, object]:
    wanted = f"an object must be a {kind} of {API_VERSION}"
    try:
        read = msgspec.convert(item, NamespaceObject)
    except msgspec.ValidationError as error:
        raise RequestError(f"{wanted}: {error}") from error
    if (read.api_version, read.kind) != (API_VERSION, kind):
        raise RequestError(f"{wanted}, not {read.kind} of {read.api_version}")
    if not read.metadata.name:
        raise RequestError(f"metadata.name of a {kind} must be a namespace's name")
    return Namespace(read.metadata.name), read.spec


def convert_spec(spec: object, kind: type[T], place: str) -> T:
    """Convert the spec of an object. Raises RequestError with the field and its valid values."""
    try:
        return msgspec.convert({} if spec is None else spec, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        path, valid = path.removesuffix("`"), _valid(kind, path.removesuffix("`"), text)
        fault = text if len(text) <= LONGEST_FAULT else f"{text[:LONGEST_FAULT]}…"
        raise RequestError(f"{place}: spec{path}: {fault}{valid}") from error


def _valid(kind: object, path: str, fault: str) -> str:
    """Return what is valid at a path where that is a list of words."""
    schema = structural_schema(kind)
    for name in re.findall(r"\w+", path):
        schema = schema["items"] if name.isdecimal() else schema["properties"][name]
    if "unknown field" in fault:
        return f"; known fields are {', '.join(schema['properties'])}"
    return f"; valid are {', '.join(schema['enum'])}" if "enum" in schema else ""


def structural_schema(kind: object) -> dict[str, Any]:
    """Return the schema of a Struct as a CustomResourceDefinition has it.

    https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
    """
    (schema,), components = msgspec.json.schema_components((kind,))
    return _structural(schema, components)


def _structural(schema: Mapping[str, Any], components: Mapping[str, Any]) -> dict[str, Any]:
    """Replace references, and unions with null, by what they stand for."""
    found = _resolved(schema, components)
    if "properties" in found:
        fields = found["properties"].items()
        found["properties"] = {name: _structural(each, components) for name, each in fields}
    if "items" in found:
        found["items"] = _structural(found["items"], components)
    default = found.pop("default", None)
    if default not in (None, "", ()) and not isinstance(default, dict):
        found["default"] = list(default) if isinstance(default, tuple) else default
    unused = {"additionalProperties", "description", "title"}
    return {key: each for key, each in found.items() if key not in unused and each != []}


def _resolved(schema: Mapping[str, Any], components: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(schema)
    if reference := found.pop("$ref", "").rpartition("/")[2]:
        found = {**components[reference], **found}
    options = [each for each in found.pop("anyOf", ()) if each != {"type": "null"}]
    if len(options) == 1:
        return {**_resolved(options[0], components), **found}
    return {**found, "anyOf": options} if options and "type" not in found else found

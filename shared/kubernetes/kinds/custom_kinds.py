"""Objects of our own kinds: their specs as Structs, and their OpenAPI schemas; pure.

CustomResourceDefinitions are generated from a Struct's bounds and rules, so files obey what an API
server accepts.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import Meta

from shared.kubernetes.types import NamedReference, RawObject
from shared.model.bounds import cut
from shared.model.errors import RequestError
from shared.model.names import Namespace

T = TypeVar("T")
API_VERSION = "leasehold.dev/v1beta1"
LONGEST_FAULT = 160
_NAMESPACE = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


@dataclass(frozen=True, slots=True)
class Rule:
    """For the API server in CEL, for files in Python."""

    cel: str
    holds: Callable[[Any], bool]
    message: str
    field: str = ""
    """The attribute that the rule is about, if it has a value; empty for the whole Struct."""


class BrokenRuleError(ValueError):
    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field
        """As the object has it."""


class RuledStruct(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    rules: ClassVar[tuple[Rule, ...]] = ()

    def __post_init__(self) -> None:
        """Decoders report a ValueError with the path."""
        encoded = dict(zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True))
        for rule in self.rules:
            value = getattr(self, rule.field) if rule.field else self
            if value is not None and not rule.holds(value):
                raise BrokenRuleError(rule.message, encoded.get(rule.field, ""))


class NamespaceObject(RuledStruct, frozen=True):
    """Named after its namespace; `*` in a file is for all others."""

    rules = (
        Rule(
            f"self.metadata.name.matches('^{_NAMESPACE}$')",
            lambda item: bool(re.fullmatch(rf"\*|{_NAMESPACE}", item.metadata.name)),
            "metadata.name must be the name of a namespace",
        ),
    )

    api_version: str
    kind: str
    metadata: NamedReference
    spec: object = None


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    type: str
    status: str
    reason: str
    message: str
    observed_generation: int
    last_transition_time: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


AnySpec = Annotated[
    Any, Meta(extra_json_schema={"type": "object", "x-kubernetes-preserve-unknown-fields": True})
]


class ObjectStatus(msgspec.Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True):
    observed_generation: int | None = None
    conditions: list[Condition] = []
    spec_in_force: AnySpec = None


def _status_of(item: RawObject) -> ObjectStatus:
    try:
        return msgspec.convert(item.status, ObjectStatus)
    except msgspec.ValidationError:
        return ObjectStatus()


def conditions_of(item: RawObject, fault: str, *, reason: str, at: str) -> list[Condition]:
    """`Ready` is what Helm, Flux and others wait for.

    Conditions that the object has already keep their time; others have `at`.
    """
    status = "False" if fault else "True"
    before = _status_of(item).conditions
    since = {
        (condition.type, condition.status): condition.last_transition_time for condition in before
    }
    return [
        Condition(
            type=name,
            status=status,
            reason=reason,
            message=fault or "the spec is in force",
            observed_generation=item.metadata.generation,
            last_transition_time=since.get((name, status), at),
        )
        for name in ("Applied", "Ready")
    ]


@dataclass(slots=True)
class LatestSpecs(Generic[T]):
    """Each object's last valid spec counts."""

    parse: Callable[[Namespace, object], T]
    items: dict[Namespace, RawObject] = field(default_factory=dict)
    valid: dict[Namespace, T] = field(default_factory=dict)
    specs: dict[Namespace, object] = field(default_factory=dict)
    problems: dict[Namespace, str] = field(default_factory=dict)

    def apply(self, item: RawObject) -> str:
        """Return why the version is invalid, or "".

        Before there is a valid version, the spec in its status counts, as of before a restart.
        """
        name = Namespace(item.metadata.name)
        in_force = _status_of(item).spec_in_force
        self.items[name] = item
        self.problems.pop(name, None)
        try:
            self.valid[name] = self.parse(name, item.spec)
            self.specs[name] = item.spec
        except RequestError as error:
            self.problems[name] = cut(str(error))
            with suppress(RequestError):
                if name not in self.valid and in_force is not None:
                    self.valid[name] = self.parse(name, in_force)
                    self.specs[name] = in_force
        return self.problems.get(name, "")

    def remove(self, name: Namespace) -> None:
        for values in (self.items, self.valid, self.specs, self.problems):
            values.pop(name, None)


def by_namespace(
    items: Iterable[object], kind: str, parse_spec: Callable[[Namespace, object], T]
) -> dict[Namespace, T]:
    """Raises RequestError for another kind or a repeated name."""
    specs: dict[Namespace, T] = {}
    for item in items:
        name, spec = _named_spec(item, kind)
        if name in specs:
            raise RequestError(f"{kind} {name} is defined twice")
        specs[name] = parse_spec(name, spec)
    return specs


def _named_spec(item: object, kind: str) -> tuple[Namespace, object]:
    wanted = f"an object must be a {kind} of {API_VERSION}"
    try:
        read = msgspec.convert(item, NamespaceObject)
    except msgspec.ValidationError as error:
        raise RequestError(f"{wanted}: {error}") from error
    if (read.api_version, read.kind) != (API_VERSION, kind):
        raise RequestError(f"{wanted}, not {read.kind} of {read.api_version}")
    return Namespace(read.metadata.name), read.spec


def convert_spec(spec: object, kind: type[T], place: str) -> T:
    """Raises RequestError with the field and its valid values."""
    try:
        return msgspec.convert({} if spec is None else spec, kind)
    except UnicodeEncodeError as error:
        raise RequestError(f"{place}: the spec has text that is not Unicode") from error
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        path = path.removesuffix("`")
        if isinstance(error.__cause__, BrokenRuleError) and error.__cause__.field:
            path += f".{error.__cause__.field}"
        valid = _valid(kind, path, text)
        fault = text if len(text) <= LONGEST_FAULT else f"{text[:LONGEST_FAULT]}…"
        raise RequestError(f"{place}: spec{path}: {fault}{valid}") from error


def _valid(kind: object, path: str, fault: str) -> str:
    schema = structural_schema(kind)
    for name in re.findall(r"\w+", path):
        schema = schema["items"] if name.isdecimal() else schema["properties"][name]
    if "unknown field" in fault:
        return f"; known fields are {', '.join(schema['properties'])}"
    return f"; valid are {', '.join(schema['enum'])}" if "enum" in schema else ""


def structural_schema(kind: object) -> dict[str, Any]:
    """Return the schema for a CustomResourceDefinition.

    https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
    """
    (schema,), components = msgspec.json.schema_components((kind,))
    return _structural(schema, components)


def _structural(schema: Mapping[str, Any], components: Mapping[str, Any]) -> dict[str, Any]:
    resolved = _resolved(schema, components)
    if "properties" in resolved:
        fields = resolved["properties"].items()
        resolved["properties"] = {name: _structural(field, components) for name, field in fields}
    if "items" in resolved:
        resolved["items"] = _structural(resolved["items"], components)
    default = resolved.pop("default", None)
    if default not in (None, "", ()) and not isinstance(default, dict):
        resolved["default"] = list(default) if isinstance(default, tuple) else default
    unused = {"additionalProperties", "description", "title"}
    return {key: value for key, value in resolved.items() if key not in unused and value != []}


def _resolved(schema: Mapping[str, Any], components: Mapping[str, Any]) -> dict[str, Any]:
    resolved = dict(schema)
    if reference := resolved.pop("$ref", "").rpartition("/")[2]:
        resolved = {**components[reference], **resolved}
    options = [option for option in resolved.pop("anyOf", ()) if option != {"type": "null"}]
    if len(options) == 1:
        return {**_resolved(options[0], components), **resolved}
    return {**resolved, "anyOf": options} if options and "type" not in resolved else resolved

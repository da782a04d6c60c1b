"""Validation of CustomResourceDefinitions: names, versions, columns, schemas."""

import re
from collections.abc import Iterator

from simcluster.apimachinery.errors import Cause
from simcluster.apimachinery.names import is_label, is_subdomain
from simcluster.apimachinery.objects import Json, JsonValue, at_path, json_text, metadata, name_of
from simcluster.apiserver.cel import expression_causes
from simcluster.apiserver.crd import json_path
from simcluster.apiserver.crd.custom_kinds import COLUMN_TYPES
from simcluster.apiserver.crd.schema_check import pattern_of, schema_violations
from simcluster.apiserver.crd.schema_shape import RULES

_APPROVED = "api-approved.kubernetes.io"
_TYPES = ("array", "boolean", "integer", "number", "object", "string")
_COMBINED = ("allOf", "anyOf", "oneOf")
_ROOT_FIELDS = frozenset({"apiVersion", "kind", "metadata"})


def _missing(field: str, text: str = "") -> Cause:
    return Cause("FieldValueRequired", f"Required value: {text}".removesuffix(": "), field)


def _wrong(field: str, value: JsonValue, text: str) -> Cause:
    return Cause("FieldValueInvalid", f"Invalid value: {json_text(value)}: {text}", field)


def _forbidden(field: str, text: str) -> Cause:
    return Cause("FieldValueForbidden", f"Forbidden: {text}", field)


def definition_causes(definition: Json) -> Iterator[Cause]:
    """Validate a definition whose defaults are set."""
    spec = definition["spec"]
    yield from _group_causes(definition)
    for name in ("plural", "singular", "kind", "listKind"):
        text = spec["names"].get(name)
        if not text:
            yield _missing(f"spec.names.{name}")
        elif not is_label(text.lower()):
            yield _wrong(f"spec.names.{name}", text, "must be a DNS-1035 label")
    wanted = f"{spec['names'].get('plural')}.{spec.get('group')}"
    if name_of(definition) != wanted:
        text = 'must be spec.names.plural+"."+spec.group'
        yield _wrong("metadata.name", name_of(definition), text)
    if spec.get("scope") not in {"Namespaced", "Cluster"}:
        text = f'Unsupported value: "{spec.get("scope") or ""}": supported values: "Cluster", '
        yield Cause("FieldValueNotSupported", text + '"Namespaced"', "spec.scope")
    if spec.get("preserveUnknownFields"):
        text = "must be false; set x-kubernetes-preserve-unknown-fields in the schema instead"
        yield _wrong("spec.preserveUnknownFields", True, text)
    if at_path(spec, "conversion.strategy") != "None":
        text = 'supported values: "None" (conversion webhooks are not simulated)'
        yield Cause("FieldValueNotSupported",
                    f"Unsupported value: {json_text(at_path(spec, 'conversion.strategy'))}: {text}",
                    "spec.conversion.strategy")  # fmt: skip
    yield from _version_causes(spec)


def _group_causes(definition: Json) -> Iterator[Cause]:
    group = definition["spec"].get("group")
    if not group:
        yield _missing("spec.group")
    elif not is_subdomain(group) or "." not in group:
        yield _wrong("spec.group", group, "should be a domain with at least one dot")
    elif group.endswith((".k8s.io", ".kubernetes.io")) and not (
        metadata(definition).get("annotations") or {}
    ).get(_APPROVED):
        text = f'protected groups must have approval annotation "{_APPROVED}"'
        yield _missing(f"metadata.annotations[{_APPROVED}]", text)


def _version_causes(spec: Json) -> Iterator[Cause]:
    versions = spec["versions"]
    names = [version.get("name") for version in versions]
    if len(set(names)) != len(names):
        yield _wrong("spec.versions", names, "must contain unique version names")
    if sum(bool(version.get("storage")) for version in versions) != 1:
        text = "must have exactly one version marked as storage version"
        yield _wrong("spec.versions", names, text)
    for at, version in enumerate(versions):
        path = f"spec.versions[{at}]"
        if not is_label(str(version.get("name") or "")):
            yield _wrong(f"{path}.name", version.get("name"), "must be a DNS-1035 label")
        for column, described in enumerate(version.get("additionalPrinterColumns") or ()):
            yield from _column_causes(described, f"{path}.additionalPrinterColumns[{column}]")
        schema = at_path(version, "schema.openAPIV3Schema")
        if not isinstance(schema, dict):
            yield _missing(f"{path}.schema.openAPIV3Schema", "schemas are required")
            continue
        where = f"{path}.schema.openAPIV3Schema"
        if schema.get("type") != "object":
            yield _wrong(f"{where}.type", schema.get("type"), "must be object at the root")
        yield from _schema_causes(schema, where)


def _column_causes(described: Json, path: str) -> Iterator[Cause]:
    if not described.get("name"):
        yield _missing(f"{path}.name")
    if described.get("type") not in COLUMN_TYPES:
        text = f"must be one of {','.join(sorted(COLUMN_TYPES))}"
        yield _wrong(f"{path}.type", described.get("type"), text)
    try:
        json_path.compile_path(str(described.get("jsonPath") or "?"))
    except ValueError as error:
        yield _wrong(f"{path}.jsonPath", described.get("jsonPath"), f"is an invalid path: {error}")


def _schema_causes(schema: Json, path: str, *, combined: bool = False) -> Iterator[Cause]:
    """Require a structural schema: each node has a type and specifies what is below it."""
    if not combined:
        yield from _type_causes(schema, path)
    if schema.get("uniqueItems"):
        text = "uniqueItems cannot be set to true since the runtime complexity becomes quadratic"
        yield _forbidden(f"{path}.uniqueItems", text)
    if schema.get("properties") and schema.get("additionalProperties"):
        text = "additionalProperties and properties are mutual exclusive"
        yield _forbidden(f"{path}.additionalProperties", text)
    if "pattern" in schema:
        try:
            pattern_of(schema["pattern"])
        except re.error as error:
            yield _wrong(f"{path}.pattern", schema["pattern"], f"must be a valid regular "
                         f"expression, but isn't: {error}")  # fmt: skip
    if not combined and "default" in schema:
        for cause in schema_violations(schema, schema["default"], "default"):
            yield Cause(cause.reason, cause.message, f"{path}.{cause.field}")
    for at, rule in enumerate(schema.get(RULES) or ()):
        yield from expression_causes(rule.get("rule"), f"{path}.{RULES}[{at}].rule")
    yield from _below(schema, path, combined=combined)


def _type_causes(schema: Json, path: str) -> Iterator[Cause]:
    free = schema.get("x-kubernetes-int-or-string") or schema.get(
        "x-kubernetes-preserve-unknown-fields"
    )
    if not schema.get("type") and not free:
        yield _missing(f"{path}.type", "must not be empty for specified object fields")
    elif schema.get("type") and schema["type"] not in _TYPES:
        text = f"must be one of {', '.join(_TYPES)}"
        yield _wrong(f"{path}.type", schema["type"], text)
    if schema.get("type") == "array" and not isinstance(schema.get("items"), dict):
        yield _missing(f"{path}.items", "must be specified")


def _below(schema: Json, path: str, *, combined: bool) -> Iterator[Cause]:
    for key, below in (schema.get("properties") or {}).items():
        where = f"{path}.properties[{key}]"
        if not (path.endswith("openAPIV3Schema") and key in _ROOT_FIELDS):
            yield from _schema_causes(below, where, combined=combined)
    for key in ("items", "additionalProperties", "not"):
        if isinstance(schema.get(key), dict):
            inner = combined or key == "not"
            yield from _schema_causes(schema[key], f"{path}.{key}", combined=inner)
    for key in _COMBINED:
        for at, below in enumerate(schema.get(key) or ()):
            yield from _schema_causes(below, f"{path}.{key}[{at}]", combined=True)

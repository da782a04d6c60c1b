"""Structural schemas and JSON paths, by example and by property."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcluster.apimachinery.objects import Json, deep_copy
from simcluster.apiserver.crd import json_path
from simcluster.apiserver.crd.custom_kinds import custom_kinds
from simcluster.apiserver.crd.custom_object_strategy import CustomObjectStrategy
from simcluster.apiserver.crd.schema_check import has_format, schema_violations
from simcluster.apiserver.crd.schema_merge import apply_by_schema
from simcluster.apiserver.crd.schema_shape import fill_defaults, prune
from simcluster.apiserver.kinds.quantities import Quantity, quantity
from tests.support.simcluster.definitions import definition

DEVICE = {
    "status": {
        "conditions": [{"type": "Ready", "status": "True"}, {"type": "Old", "status": "No"}]
    },
    "spec": {"devices": [{"id": "a"}, {"id": "b"}], "min.member": 3},
    "metadata": {"annotations": {"leasehold.dev/x": "y"}},
}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (".spec.devices[0].id", ["a"]),
        (".spec.devices[-1].id", ["b"]),
        (".spec.devices[9].id", []),
        (".spec.devices[*].id", ["a", "b"]),
        ('.status.conditions[?(@.type=="Ready")].status', ["True"]),
        (".status.conditions[?(@.type!='Ready')].status", ["No"]),
        (r".metadata.annotations.leasehold\.dev/x", ["y"]),
        (".metadata.annotations['leasehold.dev/x']", ["y"]),
        (r".spec.min\.member", [3]),
        (".spec.nothing.here", []),
    ],
)
def test_paths_find_what_kubectl_finds(path: str, found: list[Any]) -> None:
    assert json_path.compile_path(path)(DEVICE) == found


def test_unsupported_paths_are_refused() -> None:
    with pytest.raises(ValueError, match="unrecognized path"):
        json_path.compile_path(".spec.devices[0:2]")


@pytest.mark.parametrize(
    ("schema", "value", "expected_text"),
    [
        ({"type": "integer"}, 1.5, 'Invalid value: "number"'),
        ({"type": "integer"}, 2.0, ""),
        ({"type": "number"}, 2, ""),
        ({"type": "string"}, None, 'Invalid value: "null"'),
        ({"type": "string", "nullable": True}, None, ""),
        ({"type": "boolean"}, 1, 'must be of type boolean: "integer"'),
        ({"x-kubernetes-int-or-string": True}, "1Gi", ""),
        ({"type": "number", "exclusiveMinimum": True, "minimum": 1}, 1, "greater than 1"),
        ({"type": "number", "exclusiveMaximum": True, "maximum": 1}, 1, "less than 1"),
        ({"type": "integer", "multipleOf": 5}, 7, "should be a multiple of 5"),
        ({"type": "string", "minLength": 2}, "a", "should be at least 2 chars long"),
        ({"type": "array", "items": {}, "minItems": 1}, [], "should have at least 1 items"),
        ({"type": "object", "minProperties": 1}, {}, "should have at least 1 properties"),
        ({"type": "object", "maxProperties": 0}, {"a": 1}, "Too many: 1: must have at most 0"),
        ({"type": "array", "items": {}, "x-kubernetes-list-type": "set"}, [1, 1], "Duplicate"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, {}, "Found none valid"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1, "b": 1}, "Found 2 valid"),
        ({"anyOf": [{"minimum": 3}, {"maximum": 1}]}, 2, "at least one schema (anyOf)"),
        ({"allOf": [{"minimum": 3}]}, 2, "greater than or equal to 3"),
        ({"not": {"enum": [2]}}, 2, "must not validate the schema (not)"),
        ({"type": "string", "format": "ipv4"}, "1.2.3", "must be of type ipv4"),
    ],
)
def test_every_keyword_is_enforced(schema: Json, value: Any, expected_text: str) -> None:
    messages = [cause.message for cause in schema_violations(schema, value, "spec.x")]

    assert [expected_text in message for message in messages] == ([True] if expected_text else [])


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date-time", "2026-01-01T00:00:00Z", "yesterday"),
        ("date", "2026-01-01", "2026-13-01"),
        ("byte", "aGk=", "no base64!"),
        ("cidr", "10.0.0.0/8", "10.0.0.0/40"),
        ("ipv6", "::1", "1.2.3.4"),
        ("uuid", "6f1c1a0e-7b1c-4c47-9d4f-0d3f0a3e9c55", "x"),
        ("duration", "1h30m", "soon"),
        ("uri", "https://x", "x"),
        ("email", "a@b", "ab"),
        ("hostname", "a.b", "-a"),
        ("int32", 5, 1 << 31),
        ("something", "x", None),
    ],
)
def test_string_formats_are_validated(name: str, good: Any, bad: Any) -> None:
    assert has_format(name, good)
    assert bad is None or not has_format(name, bad)


TEXT = {"type": "string"}
RULED = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": TEXT | {"maxLength": 3, "pattern": "^x"},
        "low": {"type": "integer", "maximum": 10},
        "size": {"type": "integer", "format": "int32"},
        "high": {"type": "integer"},
        "mode": TEXT | {"enum": ["x", "y"]},
        "day": TEXT | {"format": "date"},
        "items": {
            "type": "array",
            "items": TEXT,
            "minItems": 2,
            "maxItems": 2,
            "x-kubernetes-list-type": "set",
        },
        "odd": {"type": "integer", "oneOf": [{"minimum": 5}, {"minimum": 6}]},
    },
    "x-kubernetes-validations": [{"rule": "self.low <= self.high", "message": "low above high"}],
}
BROKEN = "spec: Invalid value: low above high"
UNCHECKED = (
    "<nil>: Invalid value: null: some validation rules were not checked because the object was "
    "invalid; correct the existing errors to complete validation"
)


@pytest.mark.parametrize(
    ("spec", "last"),
    [
        ({}, BROKEN),
        ({"low": 20}, BROKEN),
        ({"size": 1 << 40}, BROKEN),
        ({"name": "y"}, BROKEN),
        ({"items": ["a"]}, BROKEN),
        ({"items": ["a", "a"]}, BROKEN),
        ({"odd": 7}, BROKEN),
        ({"name": 5}, UNCHECKED),
        ({"name": "xxxx"}, UNCHECKED),
        ({"mode": "z"}, UNCHECKED),
        ({"day": "none"}, UNCHECKED),
        ({"items": ["a", "b", "c"]}, UNCHECKED),
        ({"name": ...}, UNCHECKED),
    ],
)
def test_rules_are_evaluated_after_the_errors_after_which_kubernetes_does_so(
    spec: Json, last: str
) -> None:
    """As kube-apiserver 1.36 responded."""
    names = {"singular": "box", "listKind": "BoxList"}
    boxes = definition("Box", "boxes", "example.com", {"spec": RULED}, names=names)
    stored, _ = custom_kinds(boxes)
    values = {"name": "x", "low": 2, "high": 1} | spec
    given_values = {key: value for key, value in values.items() if value is not ...}
    box = {"metadata": {"name": "b", "namespace": "default"}, "spec": given_values}

    *of_schema, at_last = CustomObjectStrategy(stored).validate(box)

    assert len(of_schema) == len(spec)
    assert f"{at_last.field}: {at_last.message}" == last


def test_defaults_reach_into_lists_and_maps_and_replace_nulls() -> None:
    item = {"type": "object", "properties": {"on": {"type": "boolean", "default": True}}}
    schema = {"properties": {"list": {"items": item}, "map": {"additionalProperties": item},
                             "mode": {"type": "string", "default": "soft"}}}  # fmt: skip
    value: Json = {"list": [{}, {"on": False}], "map": {"a": {}}, "mode": None}

    fill_defaults(schema, value)

    assert value == {"list": [{"on": True}, {"on": False}], "map": {"a": {"on": True}},
                     "mode": "soft"}  # fmt: skip


def test_unknown_fields_are_pruned_unless_preserved() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"properties": {"spec": inner, "free": free, "list": {"items": inner}}}
    value = {"kind": "K", "metadata": {"x": 1}, "spec": {"a": 1, "b": 2}, "free": {"c": 3},
             "list": [{"d": 4}], "e": 5}  # fmt: skip

    dropped = prune(schema, value)

    assert sorted(dropped) == ["e", "list[0].d", "spec.b"]
    assert value == {"kind": "K", "metadata": {"x": 1}, "spec": {"a": 1}, "free": {"c": 3},
                     "list": [{}]}  # fmt: skip


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.sampled_from("abcd"), below, max_size=3)
    ),
    max_leaves=8,
)
schemas = st.recursive(
    st.sampled_from([{"type": t} for t in ("integer", "string", "boolean")]),
    lambda below: st.one_of(
        st.builds(
            lambda p: {"type": "object", "properties": p},
            st.dictionaries(st.sampled_from("abcd"), below, max_size=3),
        ),
        st.builds(lambda i: {"type": "array", "items": i}, below),
        st.builds(lambda i: {"type": "object", "additionalProperties": i}, below),
    ),
    max_leaves=6,
)


@given(schemas, st.dictionaries(st.sampled_from("abcd"), json_values, max_size=4))
def test_pruning_twice_drops_nothing_more(schema: Json, value: Json) -> None:
    prune(schema, value)
    once = deep_copy(value)

    assert prune(schema, value) == []
    assert value == once


@given(schemas, json_values)
def test_unchanged_values_are_never_refused(schema: Json, value: Any) -> None:
    assert list(schema_violations(schema, value, "x", value)) == []


@given(schemas, json_values)
def test_applying_a_value_to_itself_changes_nothing(schema: Json, value: Any) -> None:
    assert apply_by_schema(schema, value, value) == value


@given(st.fractions(min_value=0, max_value=10**18, max_denominator=10**9), st.booleans())
def test_a_written_quantity_parses_as_the_same_amount_or_the_next_nano(
    value: Any, binary: bool
) -> None:
    written = Quantity(value, binary)

    read = quantity(str(written)).value

    assert 0 <= read - value < quantity("1n").value

"""Patches of the simulated API server, by content type."""

import pytest

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.merge_patches import apply_merge_patch, apply_strategic_merge_patch
from simcluster.apiserver.kinds.builtin_resources import RESOURCES
from simcluster.apiserver.requests.body_checks import schema_of
from simcluster.apiserver.requests.patches import (
    CONTENT_TYPES,
    JSON_PATCH,
    MERGE_PATCH,
    patch_function,
)

POD = schema_of(RESOURCES["pods"])


@pytest.mark.parametrize(
    ("target", "patch", "expected"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patch_follows_the_cases_of_rfc_7396(
    target: dict[str, object], patch: dict[str, object], expected: dict[str, object]
) -> None:
    assert apply_merge_patch(target, patch) == expected


def containers(*items: dict[str, object]) -> dict[str, object]:
    return {"spec": {"containers": list(items)}}


@pytest.mark.parametrize(
    ("target", "patch", "expected"),
    [
        pytest.param(
            containers({"name": "a", "image": "x"}, {"name": "b", "image": "y"}),
            containers({"name": "b", "image": "z"}),
            containers({"name": "a", "image": "x"}, {"name": "b", "image": "z"}),
            id="items are found by their key",
        ),
        pytest.param(
            containers({"name": "a", "env": [{"name": "E", "value": "1"}]}),
            containers({"name": "a", "env": [{"name": "F", "value": "2"}]}),
            containers(
                {"name": "a", "env": [{"name": "E", "value": "1"}, {"name": "F", "value": "2"}]}
            ),
            id="lists within items merge as well",
        ),
        pytest.param(
            containers({"name": "a"}, {"name": "b"}),
            containers({"name": "a", "$patch": "delete"}),
            containers({"name": "b"}),
            id="an item is deleted",
        ),
        pytest.param(
            containers({"name": "a"}, {"name": "b"}),
            containers({"$patch": "replace"}, {"name": "c"}),
            containers({"name": "c"}),
            id="a list is replaced",
        ),
        pytest.param(
            {"metadata": {"labels": {"a": "1", "b": "2"}}},
            {"metadata": {"labels": {"$patch": "replace", "c": "3"}}},
            {"metadata": {"labels": {"c": "3"}}},
            id="a map is replaced",
        ),
        pytest.param(
            {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
            {"status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "New"}]}},
            {"status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "New"}]}},
            id="conditions merge by type",
        ),
        pytest.param(
            {"metadata": {"finalizers": ["a", "b"]}},
            {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a"], "finalizers": ["c"]}},
            {"metadata": {"finalizers": ["b", "c"]}},
            id="plain lists that merge lose and gain items",
        ),
        pytest.param(
            {"spec": {"containers": [{"name": "a"}, {"name": "b"}, {"name": "c"}]}},
            {
                "spec": {
                    "$setElementOrder/containers": [{"name": "c"}, {"name": "a"}, {"name": "b"}]
                }
            },
            {"spec": {"containers": [{"name": "c"}, {"name": "a"}, {"name": "b"}]}},
            id="items take the requested order",
        ),
        pytest.param(
            {"spec": {"strategy": {"type": "Rolling", "rolling": {"max": 1}}}},
            {"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}},
            {"spec": {"strategy": {"type": "Recreate"}}},
            id="only retained keys stay",
        ),
        pytest.param(
            {"spec": {"tolerations": [{"key": "a"}]}},
            {"spec": {"tolerations": [{"key": "b"}]}},
            {"spec": {"tolerations": [{"key": "b"}]}},
            id="tolerations have no key and are replaced",
        ),
        pytest.param(
            containers({"name": "a", "ports": [{"containerPort": 80, "protocol": "TCP"}]}),
            containers({"name": "a", "ports": [{"containerPort": 80, "name": "web"}]}),
            containers(
                {"name": "a", "ports": [{"containerPort": 80, "protocol": "TCP", "name": "web"}]}
            ),
            id="ports merge by their number",
        ),
    ],
)
def test_a_strategic_merge_patch_merges_as_in_kubernetes(
    target: dict[str, object], patch: dict[str, object], expected: dict[str, object]
) -> None:
    assert apply_strategic_merge_patch(POD, target, patch) == expected


def test_a_patch_does_not_change_the_object_it_is_applied_to() -> None:
    target = containers({"name": "a", "image": "x"})

    apply_strategic_merge_patch(POD, target, containers({"name": "a", "image": "y"}))

    assert target == containers({"name": "a", "image": "x"})


def test_an_item_without_its_key_is_refused() -> None:
    with pytest.raises(ApiError, match="merge key"):
        apply_strategic_merge_patch(POD, containers({"name": "a"}), containers({"image": "y"}))


def test_json_patch_is_applied_or_refused_as_unprocessable() -> None:
    add = patch_function(RESOURCES["pods"], JSON_PATCH, [{"op": "add", "path": "/a/b", "value": 1}])

    assert add({"a": {}}) == {"a": {"b": 1}}
    with pytest.raises(ApiError) as refused:
        add({})
    assert refused.value.code == 422


def test_unknown_content_types_get_415() -> None:
    with pytest.raises(ApiError) as refused:
        patch_function(RESOURCES["pods"], "text/plain", {})

    assert refused.value.code == 415
    assert all(content_type in refused.value.message for content_type in CONTENT_TYPES)


def test_a_merge_patch_must_be_a_map() -> None:
    with pytest.raises(ApiError):
        patch_function(RESOURCES["pods"], MERGE_PATCH, [])

"""Patches by content type, each as a function from the old object to the new one."""

from collections.abc import Callable

import jsonpatch
import jsonpointer
import yaml

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.merge_patches import apply_merge_patch, apply_strategic_merge_patch
from simcluster.apimachinery.objects import Json, JsonValue
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.crd.custom_kinds import CustomKind
from simcluster.apiserver.crd.schema_merge import apply_by_schema
from simcluster.apiserver.requests.body_checks import schema_of

Patcher = Callable[[Json], Json]
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
CONTENT_TYPES = (JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, APPLY_PATCH)


def patch_function(kind: Resource, content_type: str, body: JsonValue) -> Patcher:
    """Return the patch as a function; 415 for a content type that the kind does not support."""
    supported: tuple[str, ...] = CONTENT_TYPES
    if isinstance(kind, CustomKind):
        supported = tuple(
            content_type for content_type in CONTENT_TYPES if content_type != STRATEGIC_PATCH
        )
    if content_type not in supported:
        raise ApiError(
            415,
            "UnsupportedMediaType",
            "the body of the request was in an unknown format - accepted media types include: "
            + ", ".join(supported),
        )
    if content_type == JSON_PATCH:
        return lambda old: _json_patched(old, body)
    if not isinstance(body, dict):
        raise ApiError.bad_request("a patch of this type must be a map")
    if content_type == MERGE_PATCH:
        return lambda old: apply_merge_patch(old, body)
    schema = schema_of(kind)
    if content_type == APPLY_PATCH:
        return lambda old: apply_by_schema(schema, old, body)
    return lambda old: apply_strategic_merge_patch(schema, old, body)


def parse_yaml(body: bytes) -> JsonValue:
    """Parse a YAML body; 400 if it is malformed."""
    try:
        return yaml.safe_load(body)
    except yaml.YAMLError as error:
        raise ApiError.bad_request(f"error decoding YAML: {error}") from error


def _json_patched(old: Json, operations: JsonValue) -> Json:
    try:
        result: Json = jsonpatch.JsonPatch(operations).apply(old)
    except (
        jsonpatch.JsonPatchException,
        jsonpointer.JsonPointerException,
        TypeError,
        KeyError,
    ) as error:
        raise ApiError(
            422,
            "Invalid",
            f"the server rejected our request due to an error in our request: {error}",
        ) from error
    return result

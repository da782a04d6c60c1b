"""The published schemas of Kubernetes' kinds: their fields, with texts and protobuf numbers.

`python -m tools.kubernetes_schemas` makes the file.
"""

from functools import cache
from pathlib import Path

from simcluster.apimachinery.objects import Json, JsonValue, decode
from simcluster.apimachinery.resources import Resource

FILE = Path(__file__).with_name("schemas.json")
REFERENCE = "#/components/schemas/"
_DEFINITIONS = "apiextensions.k8s.io"
OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


def schema_name(kind: Resource) -> str:
    """Return the name of a built-in kind's schema."""
    if kind.group == _DEFINITIONS:
        return f"io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.{kind.version}.{kind.kind}"
    return f"io.k8s.api.{kind.group.split('.')[0] or 'core'}.{kind.version}.{kind.kind}"


@cache
def published() -> dict[str, Json]:
    """Return all schemas, which refer to each other by name."""
    schemas: dict[str, Json] = decode(FILE.read_bytes())
    return schemas


@cache
def resolved(name: str) -> Json:
    """Return a schema in which others stand in the place of references to them; share it."""
    schema: Json = _resolve(published()[name])
    return schema


def _resolve(schema: JsonValue) -> JsonValue:
    if isinstance(schema, list):
        return [_resolve(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return resolved(str(schema["$ref"]).removeprefix(REFERENCE))
    own = {key: _resolve(below) for key, below in schema.items()}
    return {**own.pop("allOf")[0], **own} if "allOf" in own else own

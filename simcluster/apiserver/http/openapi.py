"""OpenAPI documents, as far as kubectl reads them.

kubectl 1.20 reads version 2 as a protobuf `Document`, and skips its own validation of kinds that
are not in it. Later versions read version 3 to learn whether the server supports `fieldValidation`,
and `kubectl explain` shows its schemas.
"""

import hashlib
from collections.abc import Iterator
from functools import cache

from simcluster.apimachinery.objects import Json, JsonValue, encode
from simcluster.apimachinery.resources import Kinds, Resource
from simcluster.apimachinery.schemas import OBJECT_META, REFERENCE, published, schema_name
from simcluster.apiserver.crd.custom_kinds import CustomKind
from simcluster.apiserver.http.discovery import VERSION, group_versions

PROTOBUF_V2 = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
_TITLE = "Kubernetes"
_CONVENTIONS = "https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md"
_API_VERSION = f"The version of this object's schema. More info: {_CONVENTIONS}#resources"
_KIND = f"The kind of this object, in CamelCase. More info: {_CONVENTIONS}#types-kinds"
_METADATA = f"Standard object's metadata. More info: {_CONVENTIONS}#metadata"
_PARAMETERS = ("dryRun", "fieldManager", "fieldValidation", "pretty")


def document_v2() -> Json:
    """Return version 2 as JSON, without kinds."""
    return {
        "swagger": "2.0",
        "info": {"title": _TITLE, "version": VERSION},
        "paths": {},
        "definitions": {},
    }


def document_v2_protobuf() -> bytes:
    """Return version 2 as protobuf: fields swagger, info, paths and definitions of `Document`."""
    info = _field(1, _TITLE.encode()) + _field(2, VERSION.encode())
    return _field(1, b"2.0") + _field(2, info) + _field(8, b"") + _field(9, b"")


def _field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited protobuf field shorter than 128 bytes."""
    return bytes((number << 3 | 2, len(content))) + content


def index_v3(kinds: Kinds) -> Json:
    """Return the list of version 3 documents, one per group and version."""
    paths = {}
    for path in group_versions(kinds):
        chosen = [(kind.plural, _custom_schema(kind)) for kind in _kinds_at(kinds, path)]
        digest = hashlib.sha256(encode(chosen)).hexdigest()[:32].upper()
        paths[path] = {"serverRelativeURL": f"/openapi/v3/{path}?hash={digest}"}
    return {"paths": paths}


def document_v3(kinds: Kinds, path: str) -> Json:
    """Return the document of one group and version, `api/v1` or `apis/{group}/{version}`."""
    chosen = _kinds_at(kinds, path)
    schemas = {_schema_name(kind): _schema(kind) for kind in chosen}
    names = [OBJECT_META, *(name for schema in schemas.values() for name in _references(schema))]
    while names:
        name = names.pop()
        if name not in schemas:
            schemas[name] = published()[name]
            names += _references_of_published(name)
    return {
        "openapi": "3.0.0",
        "info": {"title": _TITLE, "version": VERSION},
        "paths": {url: item for kind in chosen for url, item in _paths(f"/{path}", kind)},
        "components": {"schemas": schemas},
    }


def _kinds_at(kinds: Kinds, path: str) -> list[Resource]:
    api_version = path.removeprefix("apis/").removeprefix("api/")
    return [kind for kind in kinds if kind.api_version == api_version]


def _references(schema: JsonValue) -> Iterator[str]:
    """Yield the names of the published schemas to which a schema refers."""
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
    elif isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].removeprefix(REFERENCE)
        for below in schema.values():
            yield from _references(below)


@cache
def _references_of_published(name: str) -> frozenset[str]:
    return frozenset(_references(published()[name]))


def _type(kind: Resource) -> Json:
    return {"group": kind.group, "version": kind.version, "kind": kind.kind}


def _schema_name(kind: Resource) -> str:
    if isinstance(kind, CustomKind):
        return ".".join((*reversed(kind.group.split(".")), kind.version, kind.kind))
    return schema_name(kind)


def _custom_schema(kind: Resource) -> Json:
    return kind.schema if isinstance(kind, CustomKind) else {}


def _schema(kind: Resource) -> Json:
    own = _custom_schema(kind) or published().get(schema_name(kind), {})
    return {
        **own,
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string", "description": _API_VERSION},
            "kind": {"type": "string", "description": _KIND},
            "metadata": {"$ref": f"{REFERENCE}{OBJECT_META}", "description": _METADATA},
            **{
                key: row
                for key, row in (own.get("properties") or {}).items()
                if key not in {"apiVersion", "kind", "metadata"}
            },
        },
        "x-kubernetes-group-version-kind": [_type(kind)],
    }


def _paths(root: str, kind: Resource) -> Iterator[tuple[str, Json]]:
    base = f"{root}/namespaces/{{namespace}}" if kind.namespaced else root
    yield f"{base}/{kind.plural}", {"post": _operation(kind, "post")}
    yield (
        f"{base}/{kind.plural}/{{name}}",
        {verb: _operation(kind, verb) for verb in ("get", "put", "patch", "delete")},
    )


def _operation(kind: Resource, verb: str) -> Json:
    schema = {"$ref": f"{REFERENCE}{_schema_name(kind)}"}
    body = {"description": "OK", "content": {"application/json": {"schema": schema}}}
    operation: Json = {
        "responses": {"200": body},
        "x-kubernetes-action": verb,
        "x-kubernetes-group-version-kind": _type(kind),
    }
    if verb in {"post", "put", "patch"}:
        operation["parameters"] = [
            {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
            for name in _PARAMETERS
        ]
    return operation

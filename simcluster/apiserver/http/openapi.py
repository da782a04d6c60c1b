"""The smallest OpenAPI documents with which kubectl works; pure.

kubectl 1.20 reads version 2 as a protobuf `Document`, and skips its own validation of kinds that
are not in it. Later versions read version 3 to learn whether the server supports `fieldValidation`.
"""

import hashlib
from collections.abc import Iterator

from simcluster.apimachinery.objects import Json, encode
from simcluster.apimachinery.resources import Kinds, Resource
from simcluster.apiserver.crd.custom_kinds import CustomKind
from simcluster.apiserver.http.discovery import VERSION, group_versions

PROTOBUF_V2 = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
_TITLE = "Kubernetes"
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
        digest = hashlib.sha256(encode(document_v3(kinds, path))).hexdigest()[:32].upper()
        paths[path] = {"serverRelativeURL": f"/openapi/v3/{path}?hash={digest}"}
    return {"paths": paths}


def document_v3(kinds: Kinds, path: str) -> Json:
    """Return the document of one group and version, `api/v1` or `apis/{group}/{version}`."""
    api_version = path.removeprefix("apis/").removeprefix("api/")
    chosen = [kind for kind in kinds if kind.api_version == api_version]
    return {
        "openapi": "3.0.0",
        "info": {"title": _TITLE, "version": VERSION},
        "paths": {url: item for kind in chosen for url, item in _paths(f"/{path}", kind)},
        "components": {"schemas": {_schema_name(kind): _schema(kind) for kind in chosen}},
    }


def _type(kind: Resource) -> Json:
    return {"group": kind.group, "version": kind.version, "kind": kind.kind}


def _schema_name(kind: Resource) -> str:
    if isinstance(kind, CustomKind):
        return ".".join((*reversed(kind.group.split(".")), kind.version, kind.kind))
    group = kind.group.split(".")[0] or "core"
    return f"io.k8s.api.{group}.{kind.version}.{kind.kind}"


def _schema(kind: Resource) -> Json:
    own = kind.schema if isinstance(kind, CustomKind) else {}
    return {
        **own,
        "type": "object",
        "properties": {
            **(own.get("properties") or {}),
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
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
    schema = {"$ref": f"#/components/schemas/{_schema_name(kind)}"}
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

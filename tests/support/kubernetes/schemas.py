"""Faults of objects, by the schemas of Kubernetes and of our own kinds, without unknown fields."""

import json
import re
from collections.abc import Collection, Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from tools.generate.pages import DOCS, ROOT

_ROW = re.compile(
    r"^\| Kubernetes \| 1\.(\d+) or newer; .* 1\.(\d+) for \[ResourceClaims\]", re.MULTILINE
)
_KINDS = ROOT / "shared" / "kubernetes" / "kinds"
_METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"

Json = dict[str, Any]


def faults(objects: Collection[Json]) -> list[str]:
    """Return the faults of objects in the oldest and in the newest version of Kubernetes.

    Objects of other projects have none.
    """
    row = _ROW.search((DOCS / "versions.md").read_text())
    assert row, "the page names the oldest version"
    return [
        f"{it['kind']} {it['metadata']['name']}, Kubernetes 1.{minor}: {fault}"
        for it in objects
        for minor in (
            int(row[1 + _has_claims(it)]),
            max(versions()),
        )
        for fault in _faults(json.dumps(it), minor)
    ]


def _has_claims(it: Json) -> bool:
    """Return whether it is a claim, or a pod with claims: both came with a later version."""
    return it["apiVersion"].startswith("resource.k8s.io/") or '"resourceClaims"' in json.dumps(it)


@cache
def versions() -> dict[int, Traversable]:
    """Return the schemas without unknown fields, by the minor versions of Kubernetes."""
    folders = (files("kubernetes_validate") / "kubernetes-json-schema").iterdir()
    strict = [folder for folder in folders if folder.name.endswith("-strict")]
    return {int(folder.name.split(".")[1]): folder / "_definitions.json" for folder in strict}


@cache
def _faults(text: str, minor: int) -> list[str]:
    it = json.loads(text)
    schema = _kinds(minor).get((it["apiVersion"], it["kind"]))
    if schema:
        return [f"{error.json_path}: {error.message}" for error in schema.iter_errors(it)]
    group, _, _ = it["apiVersion"].rpartition("/")
    is_builtin = "." not in group or group.endswith((".k8s.io", "leasehold.dev"))
    return [f"no kind {it['kind']} in {it['apiVersion']}"] if is_builtin else []


@cache
def _kinds(minor: int) -> dict[tuple[str, str], Draft202012Validator]:
    definitions = json.loads(versions()[minor].read_text())["$defs"]
    built_in = {
        (f"{of['group']}/{of['version']}".removeprefix("/"), of["kind"]): {
            "$ref": f"#/$defs/{name}"
        }
        for name, definition in definitions.items()
        for of in definition.get("x-kubernetes-group-version-kind", ())
    }
    return {
        kind: Draft202012Validator({"$defs": definitions, **schema})
        for kind, schema in (built_in | dict(_custom_kinds())).items()
    }


def _custom_kinds() -> Iterator[tuple[tuple[str, str], Json]]:
    for path in _KINDS.glob("gpu*.yaml"):
        spec = yaml.safe_load(path.read_text())["spec"]
        for version in spec["versions"]:
            schema = _without_unknown(version["schema"]["openAPIV3Schema"])
            schema["properties"] |= {
                "apiVersion": {},
                "kind": {},
                "metadata": {"$ref": f"#/$defs/{_METADATA}"},
            }
            yield (f"{spec['group']}/{version['name']}", spec["names"]["kind"]), schema


def _without_unknown(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_unknown(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {key: _without_unknown(item) for key, item in schema.items()} | closed

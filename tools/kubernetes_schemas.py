"""Write the schemas of Kubernetes' kinds: `python -m tools.kubernetes_schemas v0.36.1`.

They come from Kubernetes' published Go modules, which `go mod download` fetches: the fields, their
texts and their protobuf numbers from the .proto files, and from the Go types which fields JSON
leaves out when they are empty, and which are inlined. Run it when `discovery.VERSION` rises.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simcluster.apimachinery.schemas import FILE, schema_name
from simcluster.apiserver.kinds.builtin_resources import BUILTIN, METRICS

_MODULES = ("api", "apimachinery", "apiextensions-apiserver", "kube-aggregator")
_BODIES = (
    "api.policy.v1.Eviction", "api.autoscaling.v1.Scale", "api.core.v1.Binding",
    "api.authentication.v1.TokenRequest", "api.authentication.v1.TokenReview",
    "api.authentication.v1.SelfSubjectReview", "api.authorization.v1.SubjectAccessReview",
    "api.authorization.v1.SelfSubjectAccessReview", "api.authorization.v1.SelfSubjectRulesReview",
    "api.authorization.v1.LocalSubjectAccessReview",
    "apimachinery.pkg.apis.meta.v1.DeleteOptions", "apimachinery.pkg.runtime.Unknown",
)  # fmt: skip
_PREFIX = "io.k8s."
_META = f"{_PREFIX}apimachinery.pkg."
_CRD = f"{_PREFIX}apiextensions-apiserver.pkg.apis.apiextensions.v1."
_ANY = {"x-kubernetes-preserve-unknown-fields": True, "x-protobuf-form": "JSON"}
_TEXTS = {"type": "array", "items": {"type": "string"}, "x-protobuf-form": "Items"}
_SPECIAL: dict[str, dict[str, Any]] = {
    f"{_META}api.resource.Quantity": {"type": "string", "x-protobuf-form": "Quantity"},
    f"{_META}util.intstr.IntOrString": {
        "type": "string", "format": "int-or-string", "x-protobuf-form": "IntOrString",
    },
    f"{_META}apis.meta.v1.Time": {
        "type": "string", "format": "date-time", "x-protobuf-form": "Time",
    },
    f"{_META}apis.meta.v1.MicroTime": {
        "type": "string", "format": "date-time", "x-protobuf-form": "MicroTime",
    },
    f"{_META}apis.meta.v1.Duration": {"type": "string", "x-protobuf-form": "Duration"},
    f"{_META}apis.meta.v1.Verbs": _TEXTS,
    f"{_PREFIX}api.authentication.v1.ExtraValue": _TEXTS,
    f"{_PREFIX}api.authorization.v1.ExtraValue": _TEXTS,
    f"{_META}apis.meta.v1.FieldsV1": {"type": "object", **_ANY},
    f"{_META}runtime.RawExtension": {"type": "object", **_ANY},
    f"{_CRD}JSON": _ANY,
    f"{_CRD}JSONSchemaProps": {"type": "object", **_ANY},
}  # fmt: skip
_SCALARS: dict[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "bool": {"type": "boolean"},
    "bytes": {"type": "string", "format": "byte"},
    "int32": {"type": "integer", "format": "int32"},
    "int64": {"type": "integer", "format": "int64"},
    "double": {"type": "number", "format": "double"},
}
_FIELD = re.compile(r"(optional|repeated|map<string, ([\w.]+)>)(?: ([.\w]+))? (\w+) = (\d+);")
_GO_FIELD = re.compile(
    r'^\t(\S+)(?:\s+(\S+))?\s+`json:"([^"]*)"(?:[^`]*protobuf:"[^"]*name=(\w+))?'
)
_MARKER = re.compile(r"\+(\w+)(?:=(.*))?")


@dataclass
class _Source:
    """The Go types of a package: the tags of each field, by struct and protobuf name."""

    package: str
    proto: str
    json_names: dict[tuple[str, str], str] = field(default_factory=dict)
    inlined: set[tuple[str, str]] = field(default_factory=set)
    omitted: set[tuple[str, str]] = field(default_factory=set)
    omits_zero: set[tuple[str, str]] = field(default_factory=set)

    def read_types(self, text: str) -> None:
        struct = ""
        for line in text.splitlines():
            if line.startswith("type ") and line.endswith("struct {"):
                struct = line.split()[1]
            elif tag := _GO_FIELD.match(line):
                go_name = tag[1]
                kind = tag[2]
                (name, *options) = tag[3].split(",")
                proto_name = tag[4]
                place = (struct, proto_name or name or go_name[0].lower() + go_name[1:])
                self.json_names[place] = name
                if "inline" in options:
                    self.inlined.add(place)
                if {"omitempty", "omitzero"} & set(options):
                    self.omitted.add(place)
                    if not (kind or "").startswith("*"):
                        self.omits_zero.add(place)

    def schemas(self) -> Iterator[tuple[str, dict[str, Any]]]:
        comments: list[str] = []
        name = ""
        schema = {}
        for line in map(str.strip, self.proto.splitlines()):
            if line.startswith("//"):
                comments.append(line.removeprefix("//").strip())
                continue
            if line.startswith("message "):
                name = line.split()[1]
                schema = {"description": _text(comments), "type": "object", "properties": {}}
                schema |= dict(_markers(comments))
                yield _schema_name(self.package, name), schema
            elif match := _FIELD.fullmatch(line):
                self._add_field(schema, name, match, comments)
            comments = []

    def _add_field(
        self, schema: dict[str, Any], message: str, match: re.Match[str], comments: list[str]
    ) -> None:
        label, mapped, single, name, number = match.groups()
        own = self._type(mapped or single)
        row_type = own if label != "optional" or "$ref" not in own else {"allOf": [own]}
        if label == "repeated":
            row_type = {"type": "array", "items": own}
        elif mapped:
            row_type = {"type": "object", "additionalProperties": own}
        place = (message, name)
        name = self.json_names.get(place) or name
        markers = dict(_markers(comments))
        row = {"description": _text(comments), **row_type, **markers, "x-protobuf": int(number)}
        if place in self.omits_zero:
            row["x-omit-zero"] = True
        if place in self.inlined:
            schema.setdefault("x-protobuf-inlined", {})[number] = own
            return
        optional = place in self.omitted or "+optional" in comments
        if "+required" in comments or not optional:
            schema.setdefault("required", []).append(name)
        schema["properties"][name] = row

    def _type(self, name: str) -> dict[str, Any]:
        if name in _SCALARS:
            return _SCALARS[name]
        package, _, short = name.lstrip(".").rpartition(".")
        return {"$ref": f"#/components/schemas/{_schema_name(package or self.package, short)}"}


def _schema_name(package: str, message: str) -> str:
    named = package.replace("k8s.io.", _PREFIX, 1).replace("_", "-")
    return f"{named}.{message}"


def _text(comments: list[str]) -> str:
    """Return a comment's text: its lines, without markers, as the published schemas join them."""
    kept = []
    for line in comments:
        if line == "---":
            break
        if not line.startswith(("+", "TODO")):
            kept.append(line)
    paragraphs = "\n".join(kept).strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)


def _markers(comments: list[str]) -> Iterator[tuple[str, Any]]:
    keys = []
    for line in comments:
        match = _MARKER.match(line)
        if match is None:
            continue
        match match[1]:
            case "listType":
                yield "x-kubernetes-list-type", match[2]
            case "mapType" | "structType":
                yield "x-kubernetes-map-type", match[2]
            case "listMapKey":
                keys.append(match[2])
            case "patchMergeKey":
                yield "x-kubernetes-patch-merge-key", match[2]
            case "patchStrategy":
                yield "x-kubernetes-patch-strategy", match[2]
    if keys:
        yield "x-kubernetes-list-map-keys", keys


def _sources(version: str) -> Iterator[_Source]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "go.mod").write_text("module schemas\n")
        for module in _MODULES:
            fetched = subprocess.run(
                ["go", "mod", "download", "-json", f"k8s.io/{module}@{version}"],
                cwd=folder, check=True, capture_output=True,
            )  # fmt: skip
            for path in sorted(Path(json.loads(fetched.stdout)["Dir"]).rglob("generated.proto")):
                text = path.read_text()
                package = re.search(r"^package ([\w.]+);", text, re.MULTILINE)
                assert package
                source = _Source(package[1], text)
                for go in sorted(path.parent.glob("*.go")):
                    source.read_types(go.read_text())
                yield source


def _with_inlined(schemas: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return a schema that has the fields of its inlined messages, too; those have no number."""
    schema = dict(schemas[name])
    for reference in schema.get("x-protobuf-inlined", {}).values():
        below = _with_inlined(schemas, reference["$ref"].rpartition("/")[2])
        fields = {
            key: {word: value for word, value in row.items() if word != "x-protobuf"}
            for key, row in below["properties"].items()
        }
        schema["properties"] = fields | schema["properties"]
        if "required" in below:
            schema["required"] = [*below["required"], *schema.get("required", ())]
    return schema


def _reachable(schemas: dict[str, dict[str, Any]], roots: list[str]) -> dict[str, dict[str, Any]]:
    definitions: dict[str, dict[str, Any]] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in definitions:
            definitions[name] = _SPECIAL.get(name) or _with_inlined(schemas, name)
            waiting += re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(definitions[name]))
    return dict(sorted(definitions.items()))


def main() -> None:
    schemas = {name: row for source in _sources(sys.argv[1]) for name, row in source.schemas()}
    roots = [schema_name(kind) for kind in BUILTIN if kind.group != METRICS] + [
        _PREFIX + name for name in _BODIES
    ]
    rows = _reachable(schemas, roots)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")
    print(f"{FILE}: {len(rows)} schemas, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()

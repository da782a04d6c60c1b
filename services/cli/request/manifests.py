"""Pods in a manifest: those written out, and those that its controllers would make."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec
import yaml

from shared.kubernetes.types import ApiPod
from shared.model.errors import RequestError

TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "Deployment": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "ReplicationController": ("spec", "template"),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
    "PodTemplate": ("template",),
}
"""Kinds that make pods, and where they keep the template. Kubernetes API reference, workloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One pod as a manifest has it."""

    origin: str
    """What in the manifest it comes from, such as `Deployment web`."""
    pod: ApiPod


def load(path: str, standard_input: TextIO) -> tuple[str, str]:
    """Return a manifest's name and text; `-` is standard input. Raises RequestError without one."""
    if path == "-":
        return "standard input", standard_input.read()
    try:
        return path, Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{path} cannot be read: {reason}") from error


def pods_in(text: str, source: str) -> list[Written]:
    """Return the pods of a manifest of any number of YAML or JSON documents.

    Raises RequestError, naming the document, for text that is no manifest and for one without pods.
    """
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise RequestError(f"{source} is not YAML: {error}") from error
    found = [
        written
        for number, document in enumerate(documents, start=1)
        for written in _in_object(document, f"{source}, document {number}")
    ]
    if not found:
        kinds = ", ".join(("Pod", *TEMPLATES, "Volcano Job", "List"))
        raise RequestError(f"{source} has no pod in it; pods are found in {kinds}")
    return found


def _in_object(document: Any, where: str) -> Iterator[Written]:
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise RequestError(f"{where} is no Kubernetes object: it has no kind")
    kind, name = document["kind"], _name(document, where)
    if kind.endswith("List") and isinstance(document.get("items"), list):
        for item in document["items"]:
            yield from _in_object(item, where)
    elif kind == "Pod":
        yield _written(f"Pod {name}", document, document, where)
    elif kind == "Job" and "tasks" in (document.get("spec") or {}):
        for task in document["spec"]["tasks"]:
            origin = f"Job {name}, task {task.get('name', '?')}"
            yield _written(origin, task.get("template"), document, where)
    elif kind in TEMPLATES:
        template: Any = document
        for key in TEMPLATES[kind]:
            template = template.get(key) if isinstance(template, dict) else None
        yield _written(f"{kind} {name}", template, document, where)


def _written(origin: str, template: Any, owner: Any, where: str) -> Written:
    if not isinstance(template, dict) or not isinstance(template.get("spec"), dict):
        raise RequestError(f"{where}: {origin} has no pod spec")
    metadata = {
        "namespace": _metadata(owner, where).get("namespace") or "default",
        "name": _name(owner, where),
        **{key: value for key, value in _metadata(template, where).items() if value},
    }
    pod = {"metadata": metadata, "spec": template["spec"]}
    try:
        return Written(
            origin=origin, pod=msgspec.json.decode(json.dumps(pod, default=str), type=ApiPod)
        )
    except (ValueError, TypeError) as error:
        raise RequestError(f"{where}: {origin} is no pod: {error}") from error


def _metadata(document: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    metadata = document.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise RequestError(f"{where}: metadata must be a mapping, got {metadata!r}")
    return metadata


def _name(document: Mapping[str, Any], where: str) -> str:
    metadata = _metadata(document, where)
    return str(metadata.get("name") or f"{metadata.get('generateName', 'unnamed-')}…")

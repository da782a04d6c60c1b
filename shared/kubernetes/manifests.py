"""The pods of a manifest: its own, and those that its controllers would create; pure."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from shared.kubernetes.strict_yaml import load_documents
from shared.kubernetes.types import ApiPod
from shared.model.errors import RequestError

MOST_CHARACTERS = 2**22
OF_HELM = "it looks like a template of Helm, so fill it in first (`helm template`)"
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
_SMALL = {kind.lower(): kind for kind in ("Pod", *TEMPLATES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestPod:
    origin: str
    """Such as `Deployment web`."""
    pod: ApiPod
    template: Mapping[str, Any] = field(default_factory=dict)
    document: Mapping[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    """Empty of a pod and of kinds that are not Kubernetes' own."""
    replicas: int = 1


def pods_in(text: str, source: str, *, needs_some: bool = True) -> list[ManifestPod]:
    """Return the pods of a manifest of any number of YAML or JSON documents.

    Raises RequestError for text that is not a manifest, or has no pods where it needs some.

    >>> text = "{apiVersion: v1, kind: Pod, metadata: {name: a}, spec: {containers: [{name: c}]}}"
    >>> [pod.origin for pod in pods_in(text, "pod.yaml")]
    ['Pod a']
    """
    pods = [
        pod
        for number, document in enumerate(documents_of(text, source), start=1)
        for pod in _pods_of(document, f"{source}, document {number}")
    ]
    if needs_some and not pods:
        kinds = ", ".join(("Pod", *TEMPLATES, "Volcano Job", "List"))
        raise RequestError(
            f"{source} has no pod in it; pods are found in {kinds}, and wherever another kind has "
            "containers"
        )
    return pods


def documents_of(text: str, source: str) -> list[Any]:
    """Raises RequestError for text that is not YAML, or that aliases make too large."""
    try:
        documents = load_documents(text)
    except ValueError as error:
        remedy = f": {OF_HELM}" if "{{" in text else ""
        raise RequestError(f"{source} is not YAML: {error}{remedy}") from error
    _check_size(documents, source)
    return documents


def _check_size(documents: Any, source: str) -> None:
    """Refuse documents that aliases make large, or that contain themselves."""
    left = [documents]
    size = 0
    while left:
        value = left.pop()
        children = [*value, *value.values()] if isinstance(value, dict) else value
        if isinstance(children, list):
            left += children
        size += 1 + (len(value) if isinstance(value, str) else 0)
        if size + len(left) > MOST_CHARACTERS:
            raise RequestError(f"{source} is too large once its aliases are filled in")


def _pods_of(document: Any, where: str) -> Iterator[ManifestPod]:
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise RequestError(f"{where} is not a Kubernetes object: it has no kind")
    kind = document["kind"]
    items = document.get("items") if kind.endswith("List") else None
    if isinstance(items, list):
        for item in items:
            yield from _pods_of(item, where)
        return
    for origin, template, scale in _templates(kind, _name(document, where), document):
        yield replace(
            _manifest_pod(origin, template, document, where),
            replicas=_replicas(scale, where),
            document=document,
            path=TEMPLATES.get(kind, ()),
        )


def _templates(kind: str, name: str, document: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    if kind == "Pod":
        yield f"Pod {name}", document, None
    elif kind == "Job" and (tasks := _volcano_tasks(document)):
        for task in tasks:
            yield f"Job {name}, task {task.get('name', '?')}", task.get("template"), task
    elif (right := _SMALL.get(kind.lower(), kind)) != kind:
        raise RequestError(f"{kind} {name}: Kubernetes knows no kind {kind}: write {right}")
    elif kind in TEMPLATES:
        template: Any = document
        scale: Any = None
        for key in TEMPLATES[kind]:
            scale, template = template, template.get(key) if isinstance(template, dict) else None
        yield f"{kind} {name}", template, scale
    else:
        for path, template, count in _nested(document):
            yield f"{kind} {name}, {path}", template, {"replicas": count}


def _volcano_tasks(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    spec = job.get("spec")
    return _dicts(spec.get("tasks")) if isinstance(spec, dict) else []


def _nested(document: Mapping[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Find templates in kinds of other projects.

    There are as many pods as the `replicas` and `parallelism` on the path multiply to.
    """
    left: list[tuple[str, Any, Any, int]] = [("", document, None, 1)]
    while left:
        path, value, parent, count = left.pop()
        if isinstance(value, dict):
            if _has_containers(value):
                is_of_template = isinstance(parent, dict) and parent.get("spec") is value
                yield (
                    path.removesuffix(".spec"),
                    parent if is_of_template else {"spec": value},
                    count,
                )
                continue
            for field_name in ("replicas", "parallelism"):
                number = value.get(field_name)
                count *= number if isinstance(number, int) and number >= 0 else 1
            left += [
                (f"{path}.{key}" if path else str(key), child, value, count)
                for key, child in reversed(value.items())
            ]
        elif isinstance(value, list):
            left += [
                (f"{path}[{number}]", child, value, count)
                for number, child in reversed([*enumerate(value)])
            ]


def _has_containers(value: Mapping[str, Any]) -> bool:
    containers = value.get("containers")
    return isinstance(containers, list) and any(
        isinstance(container, dict) and "name" in container for container in containers
    )


def _replicas(scale: Any, where: str) -> int:
    values = scale if isinstance(scale, dict) else {}
    count = values.get("replicas", values.get("parallelism", 1))
    if not isinstance(count, int) or count < 0:
        raise RequestError(f"{where}: replicas must be a number from 0 on, got {count!r}")
    return count


def _manifest_pod(origin: str, template: Any, owner: Any, where: str) -> ManifestPod:
    if not isinstance(template, dict) or not isinstance(template.get("spec"), dict):
        path = ".".join((*TEMPLATES.get(origin.partition(" ")[0], ()), "spec"))
        raise RequestError(
            f"{where}: {origin} has no pod spec: its containers belong into {path}.containers"
        )
    metadata = {
        "namespace": _metadata(owner, where).get("namespace") or "default",
        "name": _name(owner, where),
        **{key: value for key, value in _metadata(template, where).items() if value},
    }
    pod = {"metadata": metadata, "spec": template["spec"]}
    _check_texts(pod, f"{where}: {origin}")
    try:
        return ManifestPod(
            origin=origin,
            pod=msgspec.json.decode(json.dumps(pod, default=str), type=ApiPod),
            template={"metadata": _metadata(template, where), "spec": template["spec"]},
        )
    except (ValueError, TypeError) as error:
        raise RequestError(f"{where}: {origin} is not a pod: {_plain(str(error))}") from error


_KIND_FAULT = re.compile(r"Expected `([^`]+)`, got `([^`]+)`(?: - at `\$\.([^`]+)`)?")
_KINDS = {
    "object": "a mapping (`key: value`)",
    "array": "a list (`- item`)",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "int | float | str": "an amount",
    "bool": "true or false",
    "null": "nothing",
}


def _plain(error: str) -> str:
    """Translate an error into the words of YAML."""
    fault = _KIND_FAULT.fullmatch(error)
    if fault is None:
        return error
    wanted, given, path = fault.groups()
    field_path = path or "it"
    if field_path.endswith("[...]"):
        field_path = f"each value of {field_path.removesuffix('[...]')}"
    wanted = wanted.removesuffix(" | null")
    return f"{field_path} must be {_KINDS.get(wanted, wanted)}, and is {_KINDS.get(given, given)}"


def _check_texts(pod: Mapping[str, Any], where: str) -> None:
    """Raise RequestError for what must be text, and YAML reads as something else."""
    for place, texts in (
        ("annotation", pod["metadata"].get("annotations")),
        ("label", pod["metadata"].get("labels")),
        ("node selector", pod["spec"].get("nodeSelector")),
        *(("variable", variables) for variables in _variables(pod["spec"])),
    ):
        for name, value in texts.items() if isinstance(texts, dict) else ():
            if isinstance(value, bool | int | float):
                written = json.dumps(value)
                raise RequestError(
                    f"{where}: {place} {name} must be text, and YAML reads {written} as a "
                    f'{"boolean" if isinstance(value, bool) else "number"}: write "{written}"'
                )


def _variables(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for kind in ("initContainers", "containers"):
        for container in _dicts(spec.get(kind)):
            yield {
                str(variable.get("name")): variable.get("value")
                for variable in _dicts(container.get("env"))
            }


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _metadata(document: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    metadata = document.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise RequestError(f"{where}: metadata must be a mapping, got {metadata!r}")
    return metadata


def _name(document: Mapping[str, Any], where: str) -> str:
    metadata = _metadata(document, where)
    return str(metadata.get("name") or f"{metadata.get('generateName', 'unnamed-')}…")

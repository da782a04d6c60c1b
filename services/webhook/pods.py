"""A pod of an AdmissionReview as the decision wants it: raw JSON in, frozen values out.

Only what is looked at is read, and nothing of it is trusted: the API server validates a pod after
its mutating webhooks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.model.errors import RequestError
from shared.model.quantity import parse_resources

KINDS = ("initContainers", "containers", "ephemeralContainers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a container's variables come from in bulk: `envFrom`."""

    kind: str
    """`config map` or `secret`."""
    name: str
    prefix: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSeen:
    """One container of any kind."""

    path: str
    """JSON pointer to it, such as `/spec/containers/0`."""
    name: str
    init: bool
    limits: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()
    """Which of `resources`, `limits`, `requests`, `env` are there to be added to."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """By name, in their order; a value that comes from elsewhere is empty."""
    elsewhere: frozenset[str] = frozenset()
    """Variables whose values come from elsewhere (`valueFrom`)."""
    sources: tuple[Source, ...] = ()
    privileged: bool = False
    image: str = ""
    mounts: tuple[str, ...] = ()
    """Paths inside the container at which volumes are mounted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSeen:
    """One pod that somebody creates."""

    namespace: str
    name: str
    containers: tuple[ContainerSeen, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    has_annotations: bool = False
    scheduler: str = ""
    node: str = ""
    priority_class: str = ""
    has: frozenset[str] = frozenset()
    """Which of `priority`, `preemptionPolicy`, `runtimeClassName` its spec has."""
    gates: tuple[str, ...] = ()
    """Scheduling gates that it has already."""
    host_paths: Mapping[str, str] = field(default_factory=dict)
    """Path by volume name."""


def read_pod(obj: Mapping[str, Any], namespace: str) -> PodSeen:
    """Read a pod. Raises RequestError for what is no pod, or has a quantity that is none."""
    try:
        meta, spec = obj.get("metadata") or {}, obj["spec"]
        return PodSeen(
            namespace=namespace,
            name=str(meta.get("name") or f"{meta.get('generateName', '')}…"),
            containers=tuple(_containers(spec)),
            annotations=_texts(meta, "annotations"),
            labels=_texts(meta, "labels"),
            has_annotations=bool(meta.get("annotations")),
            scheduler=spec.get("schedulerName") or "",
            node=spec.get("nodeName") or "",
            priority_class=spec.get("priorityClassName") or "",
            has=frozenset(
                key
                for key in ("priority", "preemptionPolicy", "runtimeClassName")
                if spec.get(key) is not None
            ),
            gates=tuple(str(gate["name"]) for gate in spec.get("schedulingGates") or ()),
            host_paths={
                volume["name"]: volume["hostPath"]["path"]
                for volume in spec.get("volumes") or ()
                if volume.get("hostPath")
            },
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"the object under review is no pod: {error!r}") from error


def _texts(meta: Mapping[str, Any], key: str) -> Mapping[str, str]:
    found = meta.get(key) or {}
    if not all(isinstance(value, str) for value in found.values()):
        raise RequestError(f"metadata.{key} of the pod must be texts by name")
    return dict(found)


def _containers(spec: Mapping[str, Any]) -> Iterator[ContainerSeen]:
    for kind in KINDS:
        for number, container in enumerate(spec.get(kind) or ()):
            resources = container.get("resources") or {}
            env = container.get("env") or ()
            parts = {
                "resources": "resources" in container,
                "limits": bool(resources.get("limits")),
                "requests": bool(resources.get("requests")),
                "env": bool(env),
            }
            yield ContainerSeen(
                path=f"/spec/{kind}/{number}",
                name=container["name"],
                init=kind == "initContainers",
                limits=parse_resources(resources.get("limits") or {}),
                requests=parse_resources(resources.get("requests") or {}),
                parts=frozenset(part for part, there in parts.items() if there),
                variables={one["name"]: one.get("value") or "" for one in env},
                elsewhere=frozenset(one["name"] for one in env if one.get("valueFrom")),
                sources=tuple(_sources(container)),
                image=str(container.get("image") or ""),
                mounts=tuple(str(one["mountPath"]) for one in container.get("volumeMounts") or ()),
                privileged=bool((container.get("securityContext") or {}).get("privileged")),
            )


def _sources(container: Mapping[str, Any]) -> Iterator[Source]:
    for one in container.get("envFrom") or ():
        for key, kind in (("configMapRef", "config map"), ("secretRef", "secret")):
            if one.get(key):
                yield Source(
                    kind=kind,
                    name=one[key].get("name", ""),
                    prefix=one.get("prefix") or "",
                    optional=bool(one[key].get("optional")),
                )

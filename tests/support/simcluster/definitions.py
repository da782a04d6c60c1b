"""CustomResourceDefinitions for tests: the shapes that schedulers' own kinds have."""

from typing import Any

from simcluster.apimachinery.objects import Json


def definition(
    kind: str, plural: str, group: str, schema: Json, *, version: str = "v1", **more: Any
) -> Json:
    """Describe a kind of one version; `more` goes into that version."""
    scope = more.pop("scope", "Namespaced")
    names = {"kind": kind, "plural": plural, **more.pop("names", {})}
    root = {"type": "object", "properties": schema}
    version_spec = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": root},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": scope,
            "names": names,
            "versions": [{**version_spec, **more}],
        },
    }


POD_GROUPS = definition(
    "PodGroup",
    "podgroups",
    "scheduling.volcano.sh",
    {
        "spec": {
            "type": "object",
            "required": ["minMember"],
            "properties": {
                "minMember": {"type": "integer", "format": "int32", "minimum": 1},
                "queue": {"type": "string", "default": "default", "pattern": "^[a-z-]+$"},
                "mode": {"type": "string", "enum": ["Soft", "Hard"]},
                "minResources": {
                    "type": "object",
                    "additionalProperties": {
                        "x-kubernetes-int-or-string": True,
                        "anyOf": [{"type": "integer"}, {"type": "string"}],
                    },
                },
                "tasks": {
                    "type": "array",
                    "maxItems": 2,
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["name"],
                    "items": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
                    },
                },
            },
        },
        "status": {"type": "object", "properties": {"phase": {"type": "string"}}},
    },
    version="v1beta1",
    names={"shortNames": ["pg"], "categories": ["gangs"]},
    subresources={"status": {}},
    selectableFields=[{"jsonPath": ".spec.queue"}],
    additionalPrinterColumns=[
        {"name": "Status", "type": "string", "jsonPath": ".status.phase"},
        {"name": "minMember", "type": "integer", "jsonPath": ".spec.minMember"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        {"name": "Queue", "type": "string", "jsonPath": ".spec.queue", "priority": 1},
    ],
)

DEVICES = definition(
    "Device",
    "devices",
    "scheduling.koordinator.sh",
    {
        "spec": {
            "type": "object",
            "properties": {
                "devices": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "id": {"type": "string"},
                            "minor": {"type": "integer"},
                            "health": {"type": "boolean", "default": False},
                            "resources": {
                                "type": "object",
                                "additionalProperties": {"x-kubernetes-int-or-string": True},
                            },
                        },
                    },
                }
            },
        },
        "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    },
    version="v1alpha1",
    scope="Cluster",
)


def pod_group(name: str, **spec: Any) -> Json:
    """Describe a Volcano PodGroup."""
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"minMember": 2, **spec},
    }


def device(name: str, *devices: Json, **more: Any) -> Json:
    """Describe a Koordinator Device, the GPUs of one node."""
    return {
        "apiVersion": "scheduling.koordinator.sh/v1alpha1",
        "kind": "Device",
        "metadata": {"name": name},
        "spec": {"devices": list(devices)},
        **more,
    }

"""Which parts of the manifests are values of the Helm chart.

Each rule names its place in an object and what Helm is to write there. What `k8s/chart/values.yaml`
has by default gives back what stood there, which `tests.integration.manifests.test_chart` checks.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

VALUES = Path(__file__).parents[2] / "k8s" / "chart" / "values.yaml"
STORES = ("nats", "redis")


@dataclass(frozen=True)
class Expression:
    """A scalar as it stands in the template."""

    text: str


@dataclass(frozen=True)
class Optional:
    """A key that is there where the value at `path` is."""

    path: str
    text: str


@dataclass(frozen=True)
class Members:
    """All members of the map at `path`, among the keys of the map that this stands in."""

    path: str


def defaults() -> dict[str, Any]:
    """What `values.yaml` says."""
    found: dict[str, Any] = yaml.safe_load(VALUES.read_text())
    return found


def with_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """Put values in where rules want them; the object itself stays as it is."""
    made = copy.deepcopy(dict(found))
    match made["kind"]:
        case "Deployment" | "StatefulSet" | "DaemonSet" | "Job" | "CronJob":
            _workload(made)
        case "HorizontalPodAutoscaler":
            limits = made["spec"]
            limits["minReplicas"] = _number("placers.min", limits["minReplicas"])
            limits["maxReplicas"] = _number("placers.max", limits["maxReplicas"])
        case "ScaledObject":
            limits = made["spec"]
            limits["minReplicaCount"] = _number("placers.min", limits["minReplicaCount"])
            limits["maxReplicaCount"] = _number("placers.max", limits["maxReplicaCount"])
        case "ConfigMap" if made["metadata"]["name"] == "leasehold":
            _settings(made["data"])
        case "CustomResourceDefinition":
            # What is defined goes with its definition: budgets outlive the release.
            made["metadata"].setdefault("annotations", {})["helm.sh/resource-policy"] = "keep"
    return made


def _workload(made: dict[str, Any]) -> None:
    name, spec = made["metadata"]["name"], made["spec"]
    if name not in STORES and "replicas" in spec:
        spec["replicas"] = _number(f"replicas.{name}", spec["replicas"])
    for claim in spec.get("volumeClaimTemplates", ()):
        claim["spec"]["resources"]["requests"]["storage"] = _value(f"{name}.storage")
        path = f".Values.{name}.storageClass"
        claim["spec"]["storageClassName"] = Optional(path, f"{{{{ {path} | quote }}}}")
    pod = (spec["jobTemplate"]["spec"] if "jobTemplate" in spec else spec)["template"]["spec"]
    path = ".Values.imagePullSecrets"
    pod["imagePullSecrets"] = Optional(path, f"{{{{ {path} | toJson }}}}")
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        image = container["image"].partition(":")[0]
        if image == "leasehold":
            container["image"] = Expression(
                '"{{ .Values.image.repository }}:{{ .Values.image.tag }}"'
            )
        elif image in STORES:
            container["image"] = _value(f"{image}.image")


def _settings(data: dict[str, Any]) -> None:
    """Those of values.yaml by its map, the others (an overlay's) as they are."""
    for name in defaults()["settings"]:
        data.pop(name, None)
    data["settings"] = Members(".Values.settings")


def _number(path: str, otherwise: int) -> Expression:
    return Expression(f"{{{{ .Values.{path} | default {otherwise} }}}}")


def _value(path: str) -> Expression:
    return Expression(f"{{{{ .Values.{path} | quote }}}}")

"""The parts of the manifests that are values of the Helm chart.

Each rule names a path in an object and the expression that replaces it. With the defaults of
`k8s/chart/values.yaml` the result equals the manifest; `tests.integration.manifests.test_chart`
checks this.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tools.generate.manifests import KUBE_SCHEDULER

VALUES = Path(__file__).parents[2] / "k8s" / "chart" / "values.yaml"
STORES = ("nats", "redis")
SETTINGS = {"leasehold-settings": "settings", "node-agent-settings": "agentSettings"}
"""The ConfigMaps of settings, and the values that replace them."""


@dataclass(frozen=True)
class Expression:
    """A scalar of the template, with Helm expressions."""

    text: str


@dataclass(frozen=True)
class Optional:
    """A key that the template has only if the value at `path` is set."""

    path: str
    text: str


@dataclass(frozen=True)
class Members:
    """All entries of the map at `path`, in place of this key."""

    path: str


def defaults() -> dict[str, Any]:
    """Return the content of `values.yaml`."""
    found: dict[str, Any] = yaml.safe_load(VALUES.read_text())
    return found


@cache
def replicated() -> frozenset[str]:
    """Return the names of Deployments whose number of replicas is a value, by the schema."""
    schema = json.loads(VALUES.with_name("values.schema.json").read_text())
    return frozenset(schema["properties"]["replicas"]["properties"])


def with_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the object with the values that the rules require."""
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
        case "ConfigMap" if made["metadata"]["name"] in SETTINGS:
            _settings(made["data"], SETTINGS[made["metadata"]["name"]])
        case "CustomResourceDefinition":
            # Deleting a definition deletes its objects: budgets must outlive the release.
            made["metadata"].setdefault("annotations", {})["helm.sh/resource-policy"] = "keep"
    return made


def _workload(made: dict[str, Any]) -> None:
    name, spec = made["metadata"]["name"], made["spec"]
    if name in replicated() and "replicas" in spec:
        spec["replicas"] = _number(f"replicas.{name}", spec["replicas"])
    for claim in spec.get("volumeClaimTemplates", ()):
        claim["spec"]["resources"]["requests"]["storage"] = _value(f"{name}.storage")
        path = f".Values.{name}.storageClass"
        claim["spec"]["storageClassName"] = Optional(path, f"{{{{ {path} | quote }}}}")
    template = (spec["jobTemplate"]["spec"] if "jobTemplate" in spec else spec)["template"]
    pod = template["spec"]
    if checksums := _checksums(pod):
        template["metadata"].setdefault("annotations", {}).update(checksums)
    path = ".Values.imagePullSecrets"
    pod["imagePullSecrets"] = Optional(path, f"{{{{ {path} | toJson }}}}")
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        image = container["image"].partition(":")[0]
        if image == "leasehold":
            container["image"] = Expression(
                '"{{ .Values.image.repository }}:{{ .Values.image.tag }}"'
            )
        elif container["name"] in STORES:
            container["image"] = _value(f"{container['name']}.image")
        elif container["name"] == "kube-scheduler":
            container["image"] = _value("kubeSchedulerImage")
        elif container["name"] == "hami-core":
            container["image"] = _value("hamiCoreImage")


def _checksums(pod: Mapping[str, Any]) -> dict[str, Expression]:
    """Return annotations that change, and so replace the pods, when their settings do."""
    sources = [it for one in pod["containers"] for it in one.get("envFrom", ())]
    for name in (it["configMapRef"]["name"] for it in sources):
        value = f".Values.{SETTINGS[name]} | toJson | sha256sum | quote"
        return {"checksum/config": Expression(f"{{{{ {value} }}}}")}
    mounted = {it.get("configMap", {}).get("name") for it in pod.get("volumes", ())}
    if "kube-scheduler" in mounted:
        content = hashlib.sha256(KUBE_SCHEDULER.read_bytes()).hexdigest()
        return {"checksum/config": Expression(json.dumps(content))}
    return {}


def _settings(data: dict[str, Any], value: str) -> None:
    """Replace the settings of values.yaml by its map; those of an overlay stay."""
    for name in defaults()[value]:
        data.pop(name, None)
    data[value] = Members(f".Values.{value}")


def _number(path: str, otherwise: int) -> Expression:
    return Expression(f"{{{{ .Values.{path} | default {otherwise} }}}}")


def _value(path: str) -> Expression:
    return Expression(f"{{{{ .Values.{path} | quote }}}}")

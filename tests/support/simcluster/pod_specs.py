"""Pods as the kubelet parses them, for tests."""

from typing import Any

from simcluster.apimachinery.objects import Json
from simcluster.kubelet.containers.container_spec import PodSpec, parse_pod


def pod_spec(*containers: Json, **spec: Any) -> PodSpec:
    meta = {
        "uid": "u",
        "namespace": "default",
        "name": "one",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "annotations": spec.pop("annotations", {}),
    }
    return parse_pod({"metadata": meta, "spec": {"containers": list(containers), **spec}})


def container(name: str = "main", *command: str, **requests: str) -> Json:
    return {"name": name, "command": list(command), "resources": {"requests": requests}}

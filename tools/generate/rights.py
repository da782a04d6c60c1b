"""What `leasehold up` installs of the manifests, by component: accounts, roles, DeviceClasses."""

import json
from typing import Any

from shared.model.names import SYSTEM_NAMESPACE
from tools.generate.pages import ROOT
from tools.generate.security import manifests

FILE = ROOT / "services" / "cli" / "up" / "rights.json"
COMPONENTS = ("combined-scheduler", "dra", "kube-scheduler")
"""Those that `up` can start; a component's objects are added to those of the base."""
_NAMESPACED = {"ServiceAccount", "Role", "RoleBinding"}
_KINDS = _NAMESPACED | {"ClusterRole", "ClusterRoleBinding", "DeviceClass"}


def rights() -> str:
    """Return the content of the file."""
    folders = {"base": "base"} | {name: f"components/{name}" for name in COMPONENTS}
    parts = []
    for name, folder in folders.items():
        lines = (json.dumps(_placed(obj)) for obj in _objects(folder))
        parts.append(f"{json.dumps(name)}: [\n" + ",\n".join(lines) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _objects(folder: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests(folder) if manifest["kind"] in _KINDS]


def _placed(obj: dict[str, Any]) -> dict[str, Any]:
    """Return an object with the namespace that kustomize gives it."""
    metadata = obj["metadata"]
    if obj["kind"] in _NAMESPACED:
        metadata = {**metadata, "namespace": metadata.get("namespace", SYSTEM_NAMESPACE)}
    return {**obj, "metadata": metadata}

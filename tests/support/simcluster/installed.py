"""The accounts, roles and policies of `k8s/base` in a simulated API server, and their tokens."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import aiohttp

from services.cli.up.installation import AGENT
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from tests.support.packaging import objects
from tests.support.simcluster.apiserver import ApiUnderTest

ROOT = Path(__file__).parents[3]
BASE = ROOT / "k8s" / "base"
KINDS = sorted((ROOT / "shared" / "kubernetes" / "kinds").glob("*.yaml"))
POLICIES = sorted((ROOT / "services" / "webhook" / "manifests").glob("*-*.yaml"))
NAMESPACED = {"ServiceAccount", "Role", "RoleBinding"}
RIGHTS = NAMESPACED | {"ClusterRole", "ClusterRoleBinding"}
INSTALLED = RIGHTS | {
    "CustomResourceDefinition",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}


def manifests(kinds: Collection[str], *components: Path) -> list[dict[str, Any]]:
    """Return the objects of these kinds in `k8s/base` and in files of components."""
    documents = [
        document
        for path in (*sorted(BASE.rglob("*.yaml")), *KINDS, *POLICIES, *components)
        for document in objects(path.read_text())
        if document["kind"] in kinds
    ]
    for document in documents:
        if document["kind"] in NAMESPACED:
            document["metadata"].setdefault("namespace", SYSTEM_NAMESPACE)
    return documents


async def install_rights(api: ApiUnderTest, *components: Path) -> None:
    """Create what decides about the services' writes, as `kubectl apply -k` does."""
    installed = manifests(INSTALLED, *components)
    async with api.client() as client:
        for name in (SYSTEM_NAMESPACE, AGENTS_NAMESPACE, "team-a"):
            await created(client, "/api/v1/namespaces", {"metadata": {"name": name}})
        for obj in sorted(installed, key=lambda manifest: "Policy" in manifest["kind"]):
            group = obj["apiVersion"]
            namespace = obj["metadata"].get("namespace")
            inside = f"/namespaces/{namespace}" if namespace else ""
            plural = obj["kind"].lower().removesuffix("y") + (
                "ies" if obj["kind"].endswith("y") else "s"
            )
            root = "/api/v1" if group == "v1" else f"/apis/{group}"
            await created(client, f"{root}{inside}/{plural}", obj)


async def created(client: aiohttp.ClientSession, path: str, obj: dict[str, Any]) -> Any:
    """Create an object, and return it."""
    async with client.post(path, json=obj) as response:
        assert response.status == 201, (path, await response.text())
        return await response.json()


def namespace_of(account: str) -> str:
    """Return the namespace of a service account."""
    return AGENTS_NAMESPACE if account == AGENT else SYSTEM_NAMESPACE


async def token_of(client: aiohttp.ClientSession, account: str, node: str) -> str:
    """Return the token that the kubelet of a node mounts into the account's pod there."""
    pod = {
        "metadata": {"name": f"{account}-{node}"},
        "spec": {
            "nodeName": node,
            "serviceAccountName": account,
            "containers": [{"name": "main", "image": "leasehold"}],
        },
    }
    namespace = namespace_of(account)
    await created(client, f"/api/v1/namespaces/{namespace}/pods", pod)
    bound = {"apiVersion": "v1", "kind": "Pod", "name": f"{account}-{node}"}
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    issued = await created(client, path, {"spec": {"boundObjectRef": bound}})
    return str(issued["status"]["token"])

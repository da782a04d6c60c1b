"""What `up` installs in the simulated cluster, as in a real one.

Each service has its account with the roles of the manifests: admission policies compare its token
with what it writes.
"""

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from services.cli.api_client import APISERVICE
from services.webhook.registration import admission_policies
from shared.kubernetes.kinds import custom_kinds
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE

AGENT = "node-agent"
BINDER = "binder"
API = "api"
OPERATOR = "operator"
ACCOUNTS = ("watcher", "planner", BINDER, "timekeeper", "webhook", API)
"""Of the services that always run, other than node agents."""
COMBINED = "combined-scheduler"
CLAIMS = "dra"
KUBE_SCHEDULER = "kube-scheduler"
_ACCOUNTS_OF = {KUBE_SCHEDULER: ("extender",)}
WEBHOOK_CLIENT_CA = "webhook-client-ca.crt"
_RIGHTS = Path(__file__).with_name("rights.json")
"""Of `k8s/base` and of each component."""
KINDS = Path(custom_kinds.__file__).parent
Manifest = dict[str, Any]
_RBAC = "rbac.authorization.k8s.io"
_REGISTERS = "leasehold-webhook-outside"
OUTSIDE_WEBHOOK: tuple[Manifest, ...] = (
    {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": _REGISTERS},
        "rules": [
            {
                "apiGroups": ["admissionregistration.k8s.io"],
                "resources": ["mutatingwebhookconfigurations"],
                "verbs": ["create"],
            }
        ],
    },
    {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": _REGISTERS},
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": _REGISTERS},
        "subjects": [{"kind": "ServiceAccount", "name": "webhook", "namespace": SYSTEM_NAMESPACE}],
    },
)
"""In a cluster, the manifests have the webhook's configuration."""


def installation(
    directory: str,
    nodes: Iterable[str],
    *,
    policies: bool,
    aggregated: str,
    components: Collection[str] = (),
    accounts: Collection[str] = ACCOUNTS,
) -> Manifest:
    """`directory` gets kubeconfigs of accounts; `aggregated` is HOST:PORT of the API."""
    names = [
        *accounts,
        *(name for component in components for name in _ACCOUNTS_OF.get(component, ())),
    ]
    installed = [
        {
            "namespace": SYSTEM_NAMESPACE,
            "name": name,
            "kubeconfig": f"{directory}/{name}",
        }
        for name in names
    ]
    installed += [
        {
            "namespace": AGENTS_NAMESPACE,
            "name": AGENT,
            "kubeconfig": f"{directory}/{agent_account(node)}",
            "node": node,
        }
        for node in nodes
    ]
    return {
        "objects": [*_objects(components, policies=policies), *_api_service(aggregated)],
        "accounts": installed,
        "webhook_client_ca": f"{directory}/{WEBHOOK_CLIENT_CA}",
    }


def agent_account(node: str) -> str:
    return f"{AGENT}-{node}"


def _objects(components: Collection[str], *, policies: bool) -> Iterator[Manifest]:
    for namespace in (SYSTEM_NAMESPACE, AGENTS_NAMESPACE):
        yield _object("v1", "Namespace", namespace)
    rights = json.loads(_RIGHTS.read_text())
    for part in ("base", *components):
        yield from rights[part]
    yield from OUTSIDE_WEBHOOK
    for kind in ("gpubudgets.yaml", "gpuquotas.yaml"):
        yield yaml.safe_load(KINDS.joinpath(kind).read_text())
    if policies:
        yield from admission_policies()


def _api_service(address: str) -> Iterator[Manifest]:
    host, _, text = address.rpartition(":")
    port = int(text)
    spec: Manifest = {"type": "ExternalName", "externalName": host, "ports": [{"port": port}]}
    yield _object("v1", "Service", API, SYSTEM_NAMESPACE) | {"spec": spec}
    version, _, group = APISERVICE.partition(".")
    service = {"name": API, "namespace": SYSTEM_NAMESPACE, "port": port}
    yield _object("apiregistration.k8s.io/v1", "APIService", APISERVICE) | {
        "spec": {"group": group, "version": version, "service": service}
    }


def _object(version: str, kind: str, name: str, namespace: str = "") -> Manifest:
    meta = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": meta}

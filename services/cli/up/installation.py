"""What `up` installs in the simulated cluster, as in a real one.

Each service has its account, whose token the admission policies compare with what it writes. The
accounts may do everything else: the roles of a cluster are not installed.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from services.cli.api_client import APISERVICE
from services.webhook.registration import admission_policies
from shared.kubernetes import custom_kinds
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE

AGENT, BINDER, API = "node-agent", "binder", "api"
ACCOUNTS = ("watcher", BINDER, "timekeeper", "webhook", "extender", API)
"""Accounts of the services other than node agents."""
ADMINISTRATORS = "leasehold-up"
KINDS = Path(custom_kinds.__file__).with_name("kinds")
"""The definitions of our kinds."""
Manifest = dict[str, Any]


def installation(
    directory: str, nodes: Iterable[str], *, policies: bool, aggregated_port: int
) -> Manifest:
    """Return what simcluster installs, with the kubeconfigs of accounts in `directory`."""
    accounts = [
        {
            "namespace": SYSTEM_NAMESPACE,
            "name": name,
            "kubeconfig": f"{directory}/{name}",
        }
        for name in ACCOUNTS
    ]
    accounts += [
        {
            "namespace": AGENTS_NAMESPACE,
            "name": AGENT,
            "kubeconfig": f"{directory}/{agent_account(node)}",
            "node": node,
        }
        for node in nodes
    ]
    return {
        "objects": [*_objects(policies=policies), *_api_service(aggregated_port)],
        "accounts": accounts,
    }


def agent_account(node: str) -> str:
    """Return the name of the file for the agent of a node."""
    return f"{AGENT}-{node}"


def _objects(*, policies: bool) -> Iterator[Manifest]:
    for namespace in (SYSTEM_NAMESPACE, AGENTS_NAMESPACE):
        yield _object("v1", "Namespace", namespace)
    for name in ACCOUNTS:
        yield _object("v1", "ServiceAccount", name, SYSTEM_NAMESPACE)
    yield _object("v1", "ServiceAccount", AGENT, AGENTS_NAMESPACE)
    everything = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
    rbac = "rbac.authorization.k8s.io"
    yield _object(f"{rbac}/v1", "ClusterRole", ADMINISTRATORS) | {"rules": [everything]}
    yield _object(f"{rbac}/v1", "ClusterRoleBinding", ADMINISTRATORS) | {
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": ADMINISTRATORS},
        "subjects": [
            {"apiGroup": rbac, "kind": "Group", "name": f"system:serviceaccounts:{namespace}"}
            for namespace in (SYSTEM_NAMESPACE, AGENTS_NAMESPACE)
        ],
    }
    for kind in ("gpubudgets.yaml", "gpuquotas.yaml"):
        yield yaml.safe_load(KINDS.joinpath(kind).read_text())
    if policies:
        yield from admission_policies()


def _api_service(port: int) -> Iterator[Manifest]:
    """Yield what the API server passes requests for our objects on to."""
    ports = {"ports": [{"port": port}]}
    yield _object("v1", "Service", API, SYSTEM_NAMESPACE) | {"spec": ports}
    subsets = [{"addresses": [{"ip": "127.0.0.1"}], **ports}]
    yield _object("v1", "Endpoints", API, SYSTEM_NAMESPACE) | {"subsets": subsets}
    version, _, group = APISERVICE.partition(".")
    service = {"name": API, "namespace": SYSTEM_NAMESPACE, "port": port}
    yield _object("apiregistration.k8s.io/v1", "APIService", APISERVICE) | {
        "spec": {"group": group, "version": version, "service": service}
    }


def _object(version: str, kind: str, name: str, namespace: str = "") -> Manifest:
    meta = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": meta}

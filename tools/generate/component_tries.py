"""Requests with stolen tokens that components add, and all tries as a table; pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from shared.model.names import AGENTS_NAMESPACE
from shared.model.requests.claim import DRIVER, LEASED
from tools.generate.tries import (
    ALLOWED,
    BINDING,
    CLAIMS,
    EVERYWHERE,
    LABEL,
    NODE,
    NODE_2,
    OTHER,
    OWN,
    PODS,
    POLICY,
    RBAC,
    SLICES,
    SYSTEM,
    TRIES,
    Try,
)


def _slice(name: str, *, node: str, pool: str, driver: str = DRIVER) -> Mapping[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1},
        },
    }


CONDITIONS = {
    "status": {
        "devices": [
            {
                "driver": DRIVER,
                "pool": OTHER,
                "device": "gpu",
                "conditions": [
                    {
                        "type": LEASED,
                        "status": "True",
                        "reason": "Stolen",
                        "message": "",
                        "lastTransitionTime": "2026-11-23T02:42:03Z",
                    }
                ],
            }
        ]
    }
}
TOKEN = f"/api/v1/namespaces/{AGENTS_NAMESPACE}/serviceaccounts/node-agent/token"


def _token(node: str) -> Mapping[str, Any]:
    bound = {"apiVersion": "v1", "kind": "Node", "name": node}
    return {"spec": {"boundObjectRef": bound, "expirationSeconds": 3600}}


COMPONENT_TRIES: Mapping[str, Mapping[str, tuple[Try, ...]]] = {
    "combined-scheduler": {
        "binder": (
            Try(ALLOWED, "read every namespace", "GET", "/api/v1/namespaces"),
            Try(ALLOWED, "read every ResourceClaim", "GET", CLAIMS),
            Try(RBAC, "change a Node", "PATCH", NODE, LABEL),
            Try(RBAC, "read the Secret `auth`", "GET", f"{SYSTEM}/secrets/auth"),
        ),
    },
    "dra": {
        "node-agent": (
            Try(
                ALLOWED,
                "create a ResourceSlice of its own node",
                "POST",
                SLICES,
                _slice(f"{OWN}-{DRIVER}", node=OWN, pool=OWN),
            ),
            Try(ALLOWED, "read a ResourceClaim of a tenant", "GET", f"{CLAIMS}/own"),
            Try(
                POLICY,
                "create a ResourceSlice of another node",
                "POST",
                SLICES,
                _slice(f"{OTHER}-{DRIVER}", node=OTHER, pool=OTHER),
            ),
            Try(
                POLICY,
                "create a ResourceSlice of its own node in the pool of another",
                "POST",
                SLICES,
                _slice(f"{OWN}-{DRIVER}-1", node=OWN, pool=OTHER),
            ),
            Try(
                POLICY,
                "create a ResourceSlice of another driver",
                "POST",
                SLICES,
                _slice(f"{OWN}-{DRIVER}-2", node=OWN, pool=OWN, driver="gpu.example.org"),
            ),
            Try(
                POLICY,
                "create a ResourceSlice of its own node with the name of another's",
                "POST",
                SLICES,
                _slice(f"{OTHER}-{DRIVER}", node=OWN, pool=OWN),
            ),
            Try(POLICY, "delete the ResourceSlice of another node", "DELETE", f"{SLICES}/other"),
            Try(RBAC, "write a claim's conditions", "PATCH", f"{CLAIMS}/own/status", CONDITIONS),
            Try(RBAC, "create a ResourceClaim", "POST", CLAIMS, {"metadata": {"name": "new"}}),
        ),
        "binder": (
            Try(ALLOWED, "read a ResourceClaim of a tenant", "GET", f"{CLAIMS}/own"),
            Try(
                ALLOWED,
                "write the conditions of a claim's devices",
                "PATCH",
                f"{CLAIMS}/own/status",
                CONDITIONS,
            ),
            Try(RBAC, "change a ResourceClaim", "PATCH", f"{CLAIMS}/own", LABEL),
            Try(RBAC, "delete a ResourceSlice", "DELETE", f"{SLICES}/other"),
        ),
    },
    "kube-scheduler": {
        "extender": (
            Try(ALLOWED, "read a pod by its name", "GET", f"{PODS}/own"),
            Try(RBAC, "list pods", "GET", PODS),
            Try(RBAC, "bind a pod", "POST", f"{PODS}/waiting/binding", BINDING),
            Try(RBAC, "change a pod", "PATCH", f"{PODS}/own", LABEL),
            Try(RBAC, "read the Secret `auth`", "GET", f"{SYSTEM}/secrets/auth"),
        ),
        "kube-scheduler": (
            Try(ALLOWED, "read every pod", "GET", PODS),
            Try(ALLOWED, "read every Node", "GET", "/api/v1/nodes"),
            Try(
                ALLOWED,
                "bind a waiting pod to any node",
                "POST",
                f"{PODS}/waiting/binding",
                BINDING,
            ),
            Try(
                ALLOWED,
                "report a pod as failed",
                "PATCH",
                f"{PODS}/other/status",
                {"status": {"phase": "Failed"}},
            ),
            Try(ALLOWED, "delete a pod", "DELETE", f"{PODS}/other"),
            Try(
                ALLOWED,
                "write the conditions of a claim's devices",
                "PATCH",
                f"{CLAIMS}/own/status",
                CONDITIONS,
            ),
            Try(RBAC, "change a pod", "PATCH", f"{PODS}/own", LABEL),
            Try(RBAC, "change a Node", "PATCH", NODE, LABEL),
            Try(RBAC, "read the Secret `auth`", "GET", f"{SYSTEM}/secrets/auth"),
        ),
    },
    "node-unit": {
        "node-agent": (
            Try(
                ALLOWED,
                "request a token of agents that is bound to its own node",
                "POST",
                TOKEN,
                _token(OWN),
            ),
            Try(POLICY, "request one that is bound to another node", "POST", TOKEN, _token(OTHER)),
            Try(
                POLICY,
                "request one that is bound to no node",
                "POST",
                TOKEN,
                {"spec": {"expirationSeconds": 3600}},
            ),
        ),
    },
    "nodes-proxy": {
        "node-agent": (
            Try(
                ALLOWED, "use a kubelet's whole API (`nodes/proxy`)", "GET", f"{NODE_2}/proxy/pods"
            ),
        ),
    },
}
"""What components add, by component and service account."""


def tries_of(account: str, component: str = "") -> tuple[Try, ...]:
    """Return what is tried with the token of an account, in one row of the table.

    A component may allow what is denied without it.
    """
    own = COMPONENT_TRIES[component][account] if component else TRIES[account]
    words = {attempt.words for attempt in own}
    return (*own, *(attempt for attempt in EVERYWHERE if attempt.words not in words))


def table() -> str:
    """Return the tries as a Markdown table: what is allowed, and how much else is denied."""
    rows = ["| with the token of | allowed | other requests, denied |", "|---|---|---|"]
    rows += [_row(account, tries) for account, tries in TRIES.items()]
    rows += [
        _row(f"{account}, with the component {component}", tries)
        for component, accounts in COMPONENT_TRIES.items()
        for account, tries in accounts.items()
    ]
    everywhere = "; ".join(attempt.words for attempt in EVERYWHERE)
    return "\n".join([*rows, f"| every service, unless allowed above | nothing | {everywhere} |"])


def _row(account: str, tries: Sequence[Try]) -> str:
    allowed = "; ".join(attempt.words for attempt in tries if attempt.outcome is ALLOWED)
    policy = sum(attempt.outcome is POLICY for attempt in tries)
    denied = sum(attempt.outcome is not ALLOWED for attempt in tries)
    by = f", {policy} of them by policies" if policy else ""
    return f"| {account} | {allowed or 'nothing'} | {denied}{by} |"

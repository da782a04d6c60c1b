"""Requests with the stolen token of each service, and how the API server responds; pure.

The tests send each of these requests, and `docs/reference.md` shows them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shared.model.devices.node import SHARING_CONDITION
from shared.model.names import SYSTEM_NAMESPACE

OWN = "gpu-1"
OTHER = "gpu-2"
"""The node that the token is bound to, and another one."""
PODS = "/api/v1/namespaces/team-a/pods"
SYSTEM = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}"
VGPU_MEMORY = "volcano.sh/vgpu-memory"


class TryOutcome(StrEnum):
    """The response of the API server."""

    ALLOWED = "**allowed**"
    RBAC = "denied: no permission"
    POLICY = "denied: admission policy"


@dataclass(frozen=True, slots=True)
class Try:
    """One request with a stolen token."""

    outcome: TryOutcome
    words: str
    """What it would do."""
    method: str
    path: str
    body: Mapping[str, Any] | None = None
    """For PATCH, a merge patch."""


ALLOWED = TryOutcome.ALLOWED
POLICY = TryOutcome.POLICY
RBAC = TryOutcome.RBAC
POD = {"metadata": {"name": "new"}, "spec": {"containers": [{"name": "a", "image": "evil"}]}}
IMAGE = {"spec": {"containers": [{"name": "main", "image": "evil"}]}}
TAINT = {"spec": {"taints": [{"key": "stolen", "effect": "NoExecute"}]}}
LABEL = {"metadata": {"labels": {"pool": "secure"}}}
FINALIZER = {"metadata": {"finalizers": ["example.org/held"]}}
AMOUNTS = {
    "status": {"capacity": {VGPU_MEMORY: "1"}, "allocatable": {VGPU_MEMORY: "1"}},
}
ADDRESSES = {"status": {"addresses": [{"type": "InternalIP", "address": "10.9.9.9"}]}}
ROLE = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
BINDING = {
    "apiVersion": "v1",
    "kind": "Binding",
    "metadata": {"name": "waiting"},
    "target": {"kind": "Node", "name": OTHER},
}
DEVICE = {
    "apiVersion": "scheduling.koordinator.sh/v1alpha1",
    "kind": "Device",
    "metadata": {"name": OTHER},
}
WEBHOOK = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims"
GROUPS = "/apis/scheduling.k8s.io/v1alpha2/namespaces/team-a/podgroups"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
DEVICES = "/apis/scheduling.koordinator.sh/v1alpha1/devices"
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
NODE = f"/api/v1/nodes/{OWN}"
NODE_2 = f"/api/v1/nodes/{OTHER}"


def _condition(kind: str) -> Mapping[str, Any]:
    return {"status": {"conditions": [{"type": kind, "status": "False"}]}}


def _annotate(outcome: TryOutcome, words: str, path: str, key: str) -> Try:
    return Try(outcome, words, "PATCH", path, {"metadata": {"annotations": {key: "forged"}}})


EVERYWHERE = (
    Try(RBAC, "create a pod", "POST", PODS, POD),
    Try(RBAC, "delete a pod", "DELETE", f"{PODS}/other"),
    Try(RBAC, "run a command in a pod", "POST", f"{PODS}/other/exec?command=id"),
    Try(RBAC, "read a Secret of a tenant", "GET", "/api/v1/namespaces/team-a/secrets/own"),
    Try(RBAC, "read the log of a pod", "GET", f"{PODS}/other/log"),
    Try(RBAC, "request a token", "POST", f"{SYSTEM}/serviceaccounts/auth/token", {"spec": {}}),
    Try(RBAC, "use a kubelet's whole API (`nodes/proxy`)", "GET", f"{NODE_2}/proxy"),
    Try(RBAC, "delete a Node", "DELETE", NODE_2),
    Try(RBAC, "become an administrator", "POST", BINDINGS, {"roleRef": ROLE}),
    Try(RBAC, "remove an admission policy", "DELETE", f"{POLICIES}/leasehold-agent-pods"),
)
"""Tried with every token."""

TRIES: Mapping[str, tuple[Try, ...]] = {
    "node-agent": (
        Try(ALLOWED, "change the GPU amounts of its own node", "PATCH", f"{NODE}/status", AMOUNTS),
        _annotate(
            ALLOWED,
            "change the device annotations of its own node",
            NODE,
            "volcano.sh/node-vgpu-register",
        ),
        _annotate(
            ALLOWED,
            "show a pod of its own node as allocated",
            f"{PODS}/own",
            "volcano.sh/bind-phase",
        ),
        Try(
            ALLOWED,
            "say in a condition of its own node why its GPUs are not offered as configured",
            "PATCH",
            f"{NODE}/status",
            _condition(SHARING_CONDITION),
        ),
        Try(ALLOWED, "read every Node", "GET", NODE_2),
        Try(POLICY, "change the GPU amounts of another node", "PATCH", f"{NODE_2}/status", AMOUNTS),
        _annotate(
            POLICY,
            "change the device annotations of another node",
            NODE_2,
            "volcano.sh/node-vgpu-register",
        ),
        Try(POLICY, "change the addresses of another node", "PATCH", f"{NODE_2}/status", ADDRESSES),
        Try(POLICY, "change the addresses of its own node", "PATCH", f"{NODE}/status", ADDRESSES),
        Try(
            POLICY,
            "change the CPUs of its own node",
            "PATCH",
            f"{NODE}/status",
            {"status": {"capacity": {"cpu": "999"}}},
        ),
        Try(POLICY, "make its own node not ready", "PATCH", f"{NODE}/status", _condition("Ready")),
        Try(POLICY, "label its own node by its status", "PATCH", f"{NODE}/status", LABEL),
        Try(POLICY, "label its own node", "PATCH", NODE, LABEL),
        _annotate(POLICY, "annotate its own node", NODE, "example.org/any"),
        Try(POLICY, "taint another node", "PATCH", NODE_2, TAINT),
        Try(POLICY, "taint its own node", "PATCH", NODE, TAINT),
        Try(POLICY, "change the image of a pod on another node", "PATCH", f"{PODS}/other", IMAGE),
        Try(POLICY, "change the image of a pod on its own node", "PATCH", f"{PODS}/own", IMAGE),
        _annotate(
            POLICY,
            "show a pod of another node as allocated",
            f"{PODS}/other",
            "volcano.sh/bind-phase",
        ),
        _annotate(
            POLICY, "forge the lease of a pod on its own node", f"{PODS}/own", "leasehold.dev/lease"
        ),
        Try(POLICY, "label a pod on its own node", "PATCH", f"{PODS}/own", LABEL),
        Try(POLICY, "add a finalizer to a pod on its own node", "PATCH", f"{PODS}/own", FINALIZER),
        Try(POLICY, "create Koordinator's Device of another node", "POST", DEVICES, DEVICE),
        Try(
            RBAC,
            "create a ResourceSlice, without the component dra",
            "POST",
            SLICES,
            {"metadata": {"name": "new"}},
        ),
        Try(RBAC, "list pods", "GET", PODS),
        Try(RBAC, "evict a pod", "POST", f"{PODS}/own/eviction", {"metadata": {"name": "own"}}),
        Try(RBAC, "bind a pod", "POST", f"{PODS}/waiting/binding", BINDING),
        Try(RBAC, "read the Secret `auth`", "GET", f"{SYSTEM}/secrets/auth"),
    ),
    "binder": (
        Try(ALLOWED, "read every pod", "GET", PODS),
        Try(ALLOWED, "bind a waiting pod to any node", "POST", f"{PODS}/waiting/binding", BINDING),
        _annotate(
            ALLOWED, "forge the lease that a pod shows", f"{PODS}/own", "leasehold.dev/lease"
        ),
        Try(
            ALLOWED,
            "evict a pod, within its PodDisruptionBudget",
            "POST",
            f"{PODS}/own/eviction?dryRun=All",
            {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "own"}},
        ),
        Try(POLICY, "change the image of a pod", "PATCH", f"{PODS}/other", IMAGE),
        Try(POLICY, "label a pod", "PATCH", f"{PODS}/other", LABEL),
        Try(POLICY, "add a finalizer to a pod", "PATCH", f"{PODS}/other", FINALIZER),
        _annotate(POLICY, "annotate a pod for others", f"{PODS}/other", "example.org/any"),
        Try(
            POLICY,
            "report a pod as failed",
            "PATCH",
            f"{PODS}/other/status",
            {"status": {"phase": "Failed"}},
        ),
        Try(RBAC, "change a Node", "PATCH", NODE, LABEL),
        Try(RBAC, "read the Secret `auth`", "GET", f"{SYSTEM}/secrets/auth"),
    ),
    "planner": (
        Try(ALLOWED, "read every pod", "GET", PODS),
        Try(RBAC, "evict a pod", "POST", f"{PODS}/own/eviction", {"metadata": {"name": "own"}}),
        Try(RBAC, "bind a pod", "POST", f"{PODS}/waiting/binding", BINDING),
        Try(RBAC, "change a pod", "PATCH", f"{PODS}/own", LABEL),
        Try(RBAC, "read every Node", "GET", "/api/v1/nodes"),
        Try(RBAC, "read the Secret `auth`", "GET", f"{SYSTEM}/secrets/auth"),
    ),
    "watcher": (
        Try(ALLOWED, "read every pod", "GET", PODS),
        Try(ALLOWED, "read every Node", "GET", "/api/v1/nodes"),
        Try(ALLOWED, "read every ResourceClaim", "GET", CLAIMS),
        Try(
            ALLOWED,
            "say of a PodGroup of Kubernetes that its pods wait or are placed",
            "PATCH",
            f"{GROUPS}/own/status",
            {"status": {"conditions": [{"type": "PodGroupScheduled", "status": "True"}]}},
        ),
        Try(RBAC, "change a PodGroup", "PATCH", f"{GROUPS}/own", LABEL),
        Try(RBAC, "change a ResourceClaim", "PATCH", f"{CLAIMS}/own", LABEL),
        Try(RBAC, "change a pod", "PATCH", f"{PODS}/own", LABEL),
        Try(RBAC, "change a Node", "PATCH", NODE, LABEL),
        Try(RBAC, "read the Secret `auth`", "GET", f"{SYSTEM}/secrets/auth"),
    ),
    "webhook": (
        Try(
            ALLOWED,
            "take over the webhook, and with it each pod that is reviewed",
            "PATCH",
            f"{WEBHOOK}/leasehold",
            LABEL,
        ),
        Try(
            RBAC,
            "read a ConfigMap of a tenant",
            "GET",
            "/api/v1/namespaces/team-a/configmaps/own",
        ),
        Try(RBAC, "register another webhook", "POST", WEBHOOK, {"metadata": {"name": "mine"}}),
        Try(RBAC, "list pods", "GET", PODS),
        Try(RBAC, "change a pod", "PATCH", f"{PODS}/own", LABEL),
        Try(RBAC, "read the Secret `auth`", "GET", f"{SYSTEM}/secrets/auth"),
    ),
    "timekeeper": (
        Try(ALLOWED, "read a pod by its name", "GET", f"{PODS}/own"),
        Try(RBAC, "list pods", "GET", PODS),
        Try(
            RBAC,
            "create a budget",
            "POST",
            "/apis/leasehold.dev/v1beta1/gpubudgets",
            {"metadata": {"name": "mine"}},
        ),
        Try(RBAC, "change a pod", "PATCH", f"{PODS}/own", LABEL),
        Try(RBAC, "read the Secret `auth`", "GET", f"{SYSTEM}/secrets/auth"),
    ),
    "api": (
        Try(RBAC, "list pods", "GET", PODS),
        Try(RBAC, "read every Node", "GET", "/api/v1/nodes"),
        Try(RBAC, "read the Secret `auth`", "GET", f"{SYSTEM}/secrets/auth"),
    ),
    "operator": (
        Try(ALLOWED, "read every pod", "GET", PODS),
        Try(RBAC, "change a pod", "PATCH", f"{PODS}/own", LABEL),
        Try(RBAC, "change the webhook", "PATCH", f"{WEBHOOK}/leasehold", LABEL),
        Try(RBAC, "read the Secret `auth`", "GET", f"{SYSTEM}/secrets/auth"),
    ),
    "auth": (
        Try(
            ALLOWED,
            "read the Secret `auth`, with which it is every service at NATS and Redis",
            "GET",
            f"{SYSTEM}/secrets/auth",
        ),
        Try(RBAC, "list pods", "GET", PODS),
        Try(RBAC, "change a pod", "PATCH", f"{PODS}/own", LABEL),
        Try(RBAC, "read the webhook's Secret", "GET", f"{SYSTEM}/secrets/webhook-certificate"),
    ),
    "placer": (
        Try(RBAC, "list pods", "GET", PODS),
        Try(RBAC, "read every Node", "GET", "/api/v1/nodes"),
        Try(RBAC, "read the Secret `auth`", "GET", f"{SYSTEM}/secrets/auth"),
    ),
}
"""By service account."""

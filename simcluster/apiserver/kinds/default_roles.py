"""The roles that every cluster has, for the kinds that are served here; pure.

https://kubernetes.io/docs/reference/access-authn-authz/rbac/#default-roles-and-role-bindings
"""

from collections.abc import Iterator, Sequence

from simcluster.apimachinery.objects import Json

_API = "rbac.authorization.k8s.io"
_READ = ("get", "list", "watch")
_WRITE = ("create", "delete", "deletecollection", "patch", "update")
_WORKLOADS = (
    ("apps", ("controllerrevisions",), ("daemonsets", "deployments", "deployments/scale",
     "replicasets", "replicasets/scale", "statefulsets", "statefulsets/scale")),
    ("batch", (), ("cronjobs", "jobs")),
    ("autoscaling", (), ("horizontalpodautoscalers",)),
    ("policy", (), ("poddisruptionbudgets",)),
    ("networking.k8s.io", (), ("ingresses", "networkpolicies")),
    ("resource.k8s.io", (), ("resourceclaims", "resourceclaimtemplates")),
    ("", ("events", "namespaces", "namespaces/status", "pods/log", "pods/status",
          "resourcequotas", "resourcequotas/status"),
     ("configmaps", "endpoints", "persistentvolumeclaims", "pods", "serviceaccounts", "services")),
)  # fmt: skip
"""A group, what users of a namespace may read there, and what editors may also write."""
_EDITED = (
    ("", ("secrets",), (*_READ, *_WRITE)),
    ("", ("pods/attach", "pods/exec", "pods/portforward", "pods/proxy", "services/proxy"),
     ("get", "create", "delete", "deletecollection", "patch", "update", "list", "watch")),
    ("", ("pods/eviction", "serviceaccounts/token"), ("create",)),
    ("", ("events",), _WRITE),
    ("", ("serviceaccounts",), ("impersonate",)),
)  # fmt: skip
_SCHEDULED = (
    (("", "events.k8s.io"), ("events",), ("create", "patch", "update")),
    ("coordination.k8s.io", ("leases",), ("create",)),
    ("coordination.k8s.io", ("leasecandidates",), (*_READ, *_WRITE)),
    ("", ("nodes", "namespaces", "persistentvolumeclaims", "persistentvolumes",
          "replicationcontrollers", "services"), _READ),
    ("", ("pods",), ("delete", *_READ)),
    ("", ("bindings", "pods/binding"), ("create",)),
    ("", ("pods/status",), ("patch", "update")),
    ("", ("pods/finalizers",), ("update",)),
    (("apps", "extensions"), ("replicasets",), _READ),
    ("apps", ("statefulsets",), _READ),
    ("policy", ("poddisruptionbudgets",), _READ),
    ("authentication.k8s.io", ("tokenreviews",), ("create",)),
    ("authorization.k8s.io", ("subjectaccessreviews",), ("create",)),
    ("storage.k8s.io", ("csidrivers", "csinodes", "csistoragecapacities", "volumeattachments"),
     _READ),
    ("resource.k8s.io", ("deviceclasses", "resourceslices"), _READ),
    ("resource.k8s.io", ("resourceclaims",), ("create", "delete", "patch", "update", *_READ)),
    ("resource.k8s.io", ("resourceclaims/status",), ("get", "list", "watch", "patch", "update")),
    ("resource.k8s.io", ("resourceclaims/binding",), ("patch", "update")),
)  # fmt: skip
_VOLUMES = (
    ("", ("persistentvolumeclaims", "persistentvolumes"), ("patch", "update", *_READ)),
    ("storage.k8s.io", ("storageclasses",), _READ),
)
_Rows = Sequence[tuple[str | Sequence[str], Sequence[str], Sequence[str]]]


def default_roles() -> Iterator[tuple[str, Json]]:
    """Yield the roles and bindings, each with the plural of its kind."""
    yield _role("cluster-admin", (("*", ("*",), ("*",)),), urls=True)
    yield _binding("cluster-admin", {"kind": "Group", "name": "system:masters"})
    readable = [(group, (*read, *written), _READ) for group, read, written in _WORKLOADS]
    writable = [(group, written, _WRITE) for group, _, written in _WORKLOADS]
    administered = [
        (_API, ("roles", "rolebindings"), (*_READ, *_WRITE)),
        ("authorization.k8s.io", ("localsubjectaccessreviews",), ("create",)),
    ]
    yield _aggregated("view", "view")
    yield _aggregated("edit", "edit", "view")
    yield _aggregated("admin", "admin", "edit", "view")
    yield _role("system:aggregate-to-view", readable, to="view")
    yield _role("system:aggregate-to-edit", [*writable, *_EDITED], to="edit")
    yield _role("system:aggregate-to-admin", administered, to="admin")
    yield _role("system:kube-scheduler", _SCHEDULED)
    yield _role("system:volume-scheduler", _VOLUMES)
    for name in ("system:kube-scheduler", "system:volume-scheduler"):
        yield _binding(name, {"kind": "User", "name": "system:kube-scheduler"})
    reader = "extension-apiserver-authentication-reader"
    read = {"apiGroups": [""], "resources": ["configmaps"], "verbs": list(_READ),
            "resourceNames": ["extension-apiserver-authentication"]}  # fmt: skip
    yield "roles", {"metadata": {"name": reader, "namespace": "kube-system"}, "rules": [read]}


def _role(name: str, rows: _Rows, *, to: str = "", urls: bool = False) -> tuple[str, Json]:
    labels = {f"rbac.authorization.k8s.io/aggregate-to-{to}": "true"} if to else {}
    rules: list[Json] = [
        {
            "apiGroups": [groups] if isinstance(groups, str) else list(groups),
            "resources": list(resources),
            "verbs": list(verbs),
        }
        for groups, resources, verbs in rows
        if resources
    ]
    if urls:
        rules.append({"nonResourceURLs": ["*"], "verbs": ["*"]})
    return "clusterroles", {"metadata": {"name": name, "labels": labels}, "rules": rules}


def _aggregated(name: str, *of: str) -> tuple[str, Json]:
    labels = ({f"rbac.authorization.k8s.io/aggregate-to-{role}": "true"} for role in of)
    selectors = [{"matchLabels": label} for label in labels]
    obj: Json = {
        "metadata": {"name": name},
        "aggregationRule": {"clusterRoleSelectors": selectors},
        "rules": [],
    }
    return "clusterroles", obj


def _binding(role: str, subject: Json) -> tuple[str, Json]:
    return "clusterrolebindings", {
        "metadata": {"name": role},
        "roleRef": {"apiGroup": _API, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": _API, **subject}],
    }

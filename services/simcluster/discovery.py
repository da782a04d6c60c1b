"""What the API server says it serves: versions, groups, kinds, in the old form and the new."""

from collections.abc import Iterable

from services.simcluster.objects import Json
from services.simcluster.resources import RESOURCES, Resource

VERSION = "v1.36.0"
AGGREGATED = "apidiscovery.k8s.io"
_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
_SUBRESOURCES = {
    "status": ("", ("get", "patch", "update")),
    "binding": ("Binding", ("create",)),
    "eviction": ("Eviction", ("create",)),
    "exec": ("PodExecOptions", ("create", "get")),
    "attach": ("PodAttachOptions", ("create", "get")),
    "portforward": ("PodPortForwardOptions", ("create", "get")),
    "log": ("Pod", ("get",)),
}


def version() -> Json:
    """Answer `/version`."""
    major, minor, _ = VERSION.removeprefix("v").split(".")
    return {
        "major": major,
        "minor": minor,
        "gitVersion": VERSION,
        "gitCommit": "",
        "gitTreeState": "clean",
        "buildDate": "2026-01-01T00:00:00Z",
        "goVersion": "",
        "compiler": "",
        "platform": "linux/amd64",
    }


def core_versions(address: str) -> Json:
    """Answer `/api`."""
    client = {"clientCIDR": "0.0.0.0/0", "serverAddress": address}
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [client]}


def group_list() -> Json:
    """Answer `/apis`."""
    groups = [group(name) for name in group_names()]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def group_names() -> list[str]:
    """Return the named groups, in the order of the table."""
    return list(dict.fromkeys(kind.group for kind in RESOURCES.values() if kind.group))


def group(name: str) -> Json:
    """Answer `/apis/{group}`."""
    served = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": name,
        "versions": [served],
        "preferredVersion": served,
    }


def resource_list(name: str) -> Json:
    """Answer `/api/v1` (empty name) and `/apis/{group}/v1`."""
    entries = [entry for kind in _kinds_of(name) for entry in _entries(kind)]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{name}/v1" if name else "v1",
        "resources": entries,
    }


def _kinds_of(name: str) -> Iterable[Resource]:
    return (kind for kind in RESOURCES.values() if kind.group == name)


def _subresources(kind: Resource) -> tuple[str, ...]:
    return (*kind.subresources, *(("status",) if kind.has_status else ()))


def _entries(kind: Resource) -> Iterable[Json]:
    entry: Json = {
        "name": kind.plural,
        "singularName": kind.singular,
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": list(_VERBS),
    }
    if kind.short_names:
        entry["shortNames"] = list(kind.short_names)
    if kind.categories:
        entry["categories"] = list(kind.categories)
    yield entry
    for subresource in _subresources(kind):
        answered, verbs = _SUBRESOURCES[subresource]
        below: Json = {
            "name": f"{kind.plural}/{subresource}",
            "singularName": "",
            "namespaced": kind.namespaced,
            "kind": answered or kind.kind,
            "verbs": list(verbs),
        }
        if subresource == "eviction":
            below |= {"group": "policy", "version": "v1"}
        yield below


def aggregated(*, core: bool, form: str) -> Json:
    """Answer `/api` or `/apis` for clients that ask for all kinds at once, in v2 or v2beta1."""
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": f"{AGGREGATED}/{form}",
        "metadata": {},
        "items": [_aggregated_group(name) for name in ([""] if core else group_names())],
    }


def _aggregated_group(name: str) -> Json:
    return {
        "metadata": {"name": name, "creationTimestamp": None},
        "versions": [
            {
                "version": "v1",
                "freshness": "Current",
                "resources": [_aggregated_kind(kind) for kind in _kinds_of(name)],
            }
        ],
    }


def _aggregated_kind(kind: Resource) -> Json:
    def response(name: str, group_name: str) -> Json:
        return {"group": group_name, "version": "v1", "kind": name}

    below = []
    for subresource in _subresources(kind):
        answered, verbs = _SUBRESOURCES[subresource]
        in_group = "policy" if subresource == "eviction" else kind.group
        below.append(
            {
                "subresource": subresource,
                "responseKind": response(answered or kind.kind, in_group),
                "verbs": list(verbs),
            }
        )
    entry: Json = {
        "resource": kind.plural,
        "responseKind": response(kind.kind, kind.group),
        "scope": "Namespaced" if kind.namespaced else "Cluster",
        "singularResource": kind.singular,
        "verbs": list(_VERBS),
    }
    if kind.short_names:
        entry["shortNames"] = list(kind.short_names)
    if kind.categories:
        entry["categories"] = list(kind.categories)
    if below:
        entry["subresources"] = below
    return entry

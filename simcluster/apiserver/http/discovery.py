"""API discovery: groups, versions and kinds, in the classic and the aggregated form; pure."""

from collections.abc import Iterable

from simcluster.apimachinery.objects import Json
from simcluster.apimachinery.resources import Kinds, Resource
from simcluster.apiserver.crd.custom_kinds import version_priority

VERSION = "v1.36.0"
AGGREGATED = "apidiscovery.k8s.io"
_SUBRESOURCES = {
    "status": ("", ("get", "patch", "update")),
    "binding": ("Binding", ("create",)),
    "eviction": ("Eviction", ("create",)),
    "exec": ("PodExecOptions", ("create", "get")),
    "attach": ("PodAttachOptions", ("create", "get")),
    "portforward": ("PodPortForwardOptions", ("create", "get")),
    "log": ("Pod", ("get",)),
    "token": ("TokenRequest", ("create",)),
    "proxy": ("NodeProxyOptions", ("get",)),
    "ephemeralcontainers": ("Pod", ("get", "patch", "update")),
    "resize": ("Pod", ("get", "patch", "update")),
    "scale": ("Scale", ("get", "patch", "update")),
}
_GROUPS = {"eviction": "policy", "scale": "autoscaling", "token": "authentication.k8s.io"}
"""The groups of bodies that are not of the group of their resource."""


def version() -> Json:
    """Return `/version`."""
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
    """Return `/api`."""
    client = {"clientCIDR": "0.0.0.0/0", "serverAddress": address}
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [client]}


def group_list(kinds: Kinds) -> Json:
    """Return `/apis`."""
    groups = [group(kinds, name) for name in group_names(kinds)]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def group_names(kinds: Kinds) -> list[str]:
    """Return the named groups, in the order of the kinds."""
    return list(dict.fromkeys(kind.group for kind in kinds if kind.group))


def versions(kinds: Kinds, name: str) -> list[str]:
    """Return a group's versions, best first."""
    return sorted({kind.version for kind in kinds if kind.group == name}, key=version_priority)


def group_versions(kinds: Kinds) -> list[str]:
    """Return the path of every group and version: `api/v1`, `apis/{group}/{version}`."""
    named = [f"apis/{name}/{v}" for name in group_names(kinds) for v in versions(kinds, name)]
    return ["api/v1", *named]


def group(kinds: Kinds, name: str) -> Json:
    """Return `/apis/{group}`."""
    served = [
        {"groupVersion": f"{name}/{version}", "version": version}
        for version in versions(kinds, name)
    ]
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": name,
        "versions": served,
        "preferredVersion": served[0],
    }


def resource_list(kinds: Kinds, name: str, version: str) -> Json:
    """Return `/api/v1` (empty name) or `/apis/{group}/{version}`."""
    entries = [entry for kind in _kinds_of(kinds, name, version) for entry in _entries(kind)]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{name}/{version}" if name else version,
        "resources": entries,
    }


def _kinds_of(kinds: Kinds, name: str, version: str) -> Iterable[Resource]:
    return (kind for kind in kinds if kind.group == name and kind.version == version)


def _subresources(kind: Resource) -> tuple[str, ...]:
    return (*kind.subresources, *(("status",) if kind.has_status else ()))


def _entries(kind: Resource) -> Iterable[Json]:
    entry: Json = {
        "name": kind.plural,
        "singularName": kind.singular,
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": list(kind.verbs),
    }
    if kind.short_names:
        entry["shortNames"] = list(kind.short_names)
    if kind.categories:
        entry["categories"] = list(kind.categories)
    yield entry
    for subresource in _subresources(kind):
        body_kind, verbs = _SUBRESOURCES[subresource]
        below: Json = {
            "name": f"{kind.plural}/{subresource}",
            "singularName": "",
            "namespaced": kind.namespaced,
            "kind": body_kind or kind.kind,
            "verbs": list(verbs),
        }
        if subresource in _GROUPS:
            below |= {"group": _GROUPS[subresource], "version": "v1"}
        yield below


def aggregated(kinds: Kinds, *, core: bool, form: str) -> Json:
    """Return `/api` or `/apis` in the aggregated form, `v2` or `v2beta1`."""
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": f"{AGGREGATED}/{form}",
        "metadata": {},
        "items": [
            _aggregated_group(kinds, name) for name in ([""] if core else group_names(kinds))
        ],
    }


def _aggregated_group(kinds: Kinds, name: str) -> Json:
    return {
        "metadata": {"name": name, "creationTimestamp": None},
        "versions": [
            {
                "version": version,
                "freshness": "Current",
                "resources": [_aggregated_kind(kind) for kind in _kinds_of(kinds, name, version)],
            }
            for version in versions(kinds, name)
        ],
    }


def _aggregated_kind(kind: Resource) -> Json:
    def response(name: str, group_name: str) -> Json:
        return {"group": group_name, "version": kind.version, "kind": name}

    below = []
    for subresource in _subresources(kind):
        body_kind, verbs = _SUBRESOURCES[subresource]
        in_group = _GROUPS.get(subresource, kind.group)
        below.append(
            {
                "subresource": subresource,
                "responseKind": response(body_kind or kind.kind, in_group),
                "verbs": list(verbs),
            }
        )
    entry: Json = {
        "resource": kind.plural,
        "responseKind": response(kind.kind, kind.group),
        "scope": "Namespaced" if kind.namespaced else "Cluster",
        "singularResource": kind.singular,
        "verbs": list(kind.verbs),
    }
    if kind.short_names:
        entry["shortNames"] = list(kind.short_names)
    if kind.categories:
        entry["categories"] = list(kind.categories)
    if below:
        entry["subresources"] = below
    return entry

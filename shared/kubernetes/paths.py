"""Paths of objects at the API server; pure."""

from urllib.parse import quote


def node_path(name: str) -> str:
    """Return the path of a node."""
    return f"/api/v1/nodes/{quote(name, safe='')}"


def objects_path(namespace: str, kind: str, name: str = "", *, group: str = "/api/v1") -> str:
    """Return the path of an object of a namespace, or, without a name, of all of that kind."""
    path = f"{group}/namespaces/{quote(namespace, safe='')}/{kind}"
    return f"{path}/{quote(name, safe='')}" if name else path


def pod_path(namespace: str, name: str) -> str:
    """Return the path of a pod."""
    return objects_path(namespace, "pods", name)

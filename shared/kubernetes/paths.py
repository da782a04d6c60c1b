"""Paths of objects at the API server; pure."""

from urllib.parse import quote


def node_path(name: str) -> str:
    return f"/api/v1/nodes/{quote(name, safe='')}"


def objects_path(namespace: str, kind: str, name: str = "", *, group: str = "/api/v1") -> str:
    """Return the path of an object, or, without a name, of all of its kind in the namespace.

    >>> objects_path("ml", "configmaps", "prices")
    '/api/v1/namespaces/ml/configmaps/prices'
    """
    path = f"{group}/namespaces/{quote(namespace, safe='')}/{kind}"
    return f"{path}/{quote(name, safe='')}" if name else path


def pod_path(namespace: str, name: str) -> str:
    return objects_path(namespace, "pods", name)

"""The target of a request: the kind, object and subresource that its URL names; pure."""

from dataclasses import dataclass
from urllib.parse import unquote

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.resources import Kinds, Resource
from simcluster.apiserver.kinds.builtin_resources import BINDINGS

PATH_NOT_FOUND = ApiError(
    404, "NotFound", "the server could not find the requested resource", details={}
)


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """A kind, and perhaps one of its objects, and perhaps a subresource."""

    kind: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def key(self) -> str:
        """The object's key in the store."""
        return f"{self.namespace}/{self.name}" if self.kind.namespaced else self.name


def parse_target(path: str, kinds: Kinds) -> RequestTarget:
    """Parse `/api/v1/...` and `/apis/{group}/{version}/...`; 404 for what is not served."""
    group, version, rest = _split_version([unquote(part) for part in path.strip("/").split("/")])
    namespace, rest = _split_namespace(rest)
    if not 0 < len(rest) < 4:
        raise PATH_NOT_FOUND
    plural, name, subresource = (*rest, "", "")[:3]
    if (group, version, plural) == ("", "v1", "bindings"):
        return _bindings(namespace, name)
    kind = kinds.find(group, version, plural)
    if kind is None or (subresource and subresource not in _subresources(kind)):
        raise PATH_NOT_FOUND
    if (namespace and not kind.namespaced) or (name and kind.namespaced and not namespace):
        raise PATH_NOT_FOUND
    return RequestTarget(kind, namespace, name, subresource)


def _bindings(namespace: str, name: str) -> RequestTarget:
    if name or not namespace:
        raise PATH_NOT_FOUND
    return RequestTarget(BINDINGS, namespace)


def _split_version(parts: list[str]) -> tuple[str, str, list[str]]:
    """Return group, version, and the parts of the path after them."""
    if parts[0] == "api":
        return "", "".join(parts[1:2]), parts[2:]
    return "".join(parts[1:2]), "".join(parts[2:3]), parts[3:]


def _split_namespace(rest: list[str]) -> tuple[str, list[str]]:
    """Return the namespace in whose objects the path leads, and the parts after it."""
    in_namespace = len(rest) > 2 and rest[0] == "namespaces"
    if in_namespace and rest[2] not in {"status", "finalize"}:
        return rest[1], rest[2:]
    return "", rest


def _subresources(kind: Resource) -> set[str]:
    served = set(kind.subresources)
    if kind.has_status:
        served.add("status")
    if kind.table == "namespaces":
        served.add("finalize")
    return served

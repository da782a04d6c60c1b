"""What a URL of the Kubernetes API points at."""

from dataclasses import dataclass
from urllib.parse import unquote

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.resources import Kinds, Resource

PATH_NOT_FOUND = ApiError(
    404, "NotFound", "the server could not find the requested resource", details={}
)


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """A kind, and perhaps one object of it, and perhaps a subresource of that."""

    kind: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def key(self) -> str:
        """The object's key in the store."""
        return f"{self.namespace}/{self.name}" if self.kind.namespaced else self.name


def parse_target(path: str, kinds: Kinds) -> RequestTarget:
    """Read `/api/v1/...` and `/apis/{group}/{version}/...`; 404 for what is not served."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if parts[0] == "api":
        group, version, rest = "", parts[1] if len(parts) > 1 else "", parts[2:]
    else:
        group, version, rest = "/".join(parts[1:2]), "/".join(parts[2:3]), parts[3:]
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces" and rest[2] not in {"status", "finalize"}:
        namespace, rest = rest[1], rest[2:]
    if not 0 < len(rest) < 4:
        raise PATH_NOT_FOUND
    name = rest[1] if len(rest) > 1 else ""
    subresource = rest[2] if len(rest) > 2 else ""
    if (group, version, rest[0]) == ("", "v1", "bindings"):
        return RequestTarget(kinds["pods"], namespace, name, "binding")
    kind = kinds.find(group, version, rest[0])
    if kind is None or (namespace and not kind.namespaced):
        raise PATH_NOT_FOUND
    served = (*kind.subresources, *(("status",) if kind.has_status else ()))
    if kind.table == "namespaces":
        served = (*served, "finalize")
    if (subresource and subresource not in served) or (name and kind.namespaced and not namespace):
        raise PATH_NOT_FOUND
    return RequestTarget(kind, namespace, name, subresource)

"""Rules of RBAC roles, and what they allow; pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from simcluster.apimachinery.objects import Json

EVERYTHING: Sequence[Json] = (
    {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]},
    {"verbs": ["*"], "nonResourceURLs": ["*"]},
)
_OPEN = ("/api", "/apis", "/healthz", "/livez", "/openapi", "/readyz", "/version")
AUTHENTICATED: Sequence[Json] = (
    {"verbs": ["create"], "apiGroups": ["authentication.k8s.io"],
     "resources": ["selfsubjectreviews"]},
    {"verbs": ["create"], "apiGroups": ["authorization.k8s.io"],
     "resources": ["selfsubjectaccessreviews", "selfsubjectrulesreviews"]},
    {"verbs": ["get"], "nonResourceURLs": [url for path in _OPEN for url in (path, f"{path}/*")]},
)  # fmt: skip
"""The rules of every user."""


@dataclass(frozen=True, slots=True)
class ResourceAttributes:
    """What a request does, in the terms of a role's rules."""

    verb: str
    group: str
    resource: str
    """With its subresource, such as `pods/status`."""
    namespace: str = ""
    name: str = ""


def allows(rule: Json, request: ResourceAttributes) -> bool:
    """Return whether a rule allows a request."""
    names = rule.get("resourceNames")
    return (
        _named(rule.get("verbs"), request.verb)
        and _named(rule.get("apiGroups"), request.group)
        and any(_covers(each, request.resource) for each in rule.get("resources") or ())
        and (not names or request.name in names)
    )


def allows_url(rule: Json, verb: str, path: str) -> bool:
    """Return whether a rule allows a request of a path that is no resource."""
    urls = rule.get("nonResourceURLs") or ()
    return _named(rule.get("verbs"), verb) and any(
        each in {"*", path} or (each.endswith("*") and path.startswith(each[:-1])) for each in urls
    )


def _named(listed: Sequence[str] | None, wanted: str) -> bool:
    return any(each in {"*", wanted} for each in listed or ())


def _covers(pattern: str, resource: str) -> bool:
    """Return whether a resource of a rule covers one; `*/status` covers `status` of every kind."""
    _, _, subresource = resource.partition("/")
    return pattern in {"*", resource} or bool(subresource and pattern == f"*/{subresource}")

"""Rules of RBAC roles, and what they allow; pure."""

from collections.abc import Iterable, Iterator, Sequence
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
        and any(_covers(resource, request.resource) for resource in rule.get("resources") or ())
        and (not names or request.name in names)
    )


def allows_url(rule: Json, verb: str, path: str) -> bool:
    """Return whether a rule allows a request of a path that is no resource."""
    urls = rule.get("nonResourceURLs") or ()
    return _named(rule.get("verbs"), verb) and any(
        url in {"*", path} or (url.endswith("*") and path.startswith(url[:-1])) for url in urls
    )


def not_covered(rules: Iterable[Json], owned: Sequence[Json]) -> list[Json]:
    """Return the parts of rules, each of one verb and one target, that other rules do not allow."""
    missing: list[Json] = []
    for rule in rules:
        for verb in rule.get("verbs") or ():
            missing += [
                {"nonResourceURLs": [url], "verbs": [verb]}
                for url in rule.get("nonResourceURLs") or ()
                if not any(allows_url(own, verb, url) for own in owned)
            ]
            missing += [
                part
                for part in _parts(rule, verb)
                if not any(allows(own, _attributes(part)) for own in owned)
            ]
    return missing


def _parts(rule: Json, verb: str) -> Iterator[Json]:
    for group in rule.get("apiGroups") or ():
        for resource in rule.get("resources") or ():
            for name in rule.get("resourceNames") or ("",):
                names = {"resourceNames": [name]} if name else {}
                yield {"apiGroups": [group], "resources": [resource], **names, "verbs": [verb]}


def _attributes(part: Json) -> ResourceAttributes:
    (name,) = part.get("resourceNames") or ("",)
    return ResourceAttributes(
        part["verbs"][0], part["apiGroups"][0], part["resources"][0], name=name
    )


def _named(listed: Sequence[str] | None, wanted: str) -> bool:
    return any(value in {"*", wanted} for value in listed or ())


def _covers(pattern: str, resource: str) -> bool:
    """Return whether a resource of a rule covers one; `*/status` covers `status` of every kind."""
    _, _, subresource = resource.partition("/")
    return pattern in {"*", resource} or bool(subresource and pattern == f"*/{subresource}")

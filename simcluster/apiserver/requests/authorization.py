"""RBAC: whether the stored roles allow a request; administrators may do everything.

Differences from Kubernetes: there are no aggregated roles, and a role may grant permissions that
its author does not have.
https://kubernetes.io/docs/reference/access-authn-authz/rbac/
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, namespace_of
from simcluster.apiserver.requests.request_target import RequestTarget
from simcluster.apiserver.storage.store import ObjectStore

_ADMINISTRATORS = "system:masters"
_ACCOUNT = "system:serviceaccount:"
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True, slots=True)
class ResourceAttributes:
    """What a request does, in the terms of a role's rules."""

    verb: str
    group: str
    resource: str
    """With its subresource, such as `pods/status`."""
    namespace: str = ""
    name: str = ""


def attributes_of(method: str, target: RequestTarget, *, watch: bool) -> ResourceAttributes:
    """Return the attributes of an HTTP request."""
    if method == "GET":
        verb = "watch" if watch else ("get" if target.name else "list")
    elif method == "DELETE":
        verb = "delete" if target.name else "deletecollection"
    else:
        verb = _VERBS.get(method, method.lower())
    namespace = target.name if target.kind.table == "namespaces" else target.namespace
    return ResourceAttributes(
        verb=verb,
        group=target.kind.group,
        resource="/".join(filter(None, (target.kind.plural, target.subresource))),
        namespace=namespace,
        name=target.name,
    )


def authorize(store: ObjectStore, user: Json, request: ResourceAttributes) -> None:
    """Raise the 403 of Kubernetes unless a role of the user allows the request."""
    if is_allowed(store, user, request):
        return
    where = f'in the namespace "{request.namespace}"' if request.namespace else (
        "at the cluster scope"
    )  # fmt: skip
    text = (
        f'User "{user.get("username")}" cannot {request.verb} resource "{request.resource}" '
        f'in API group "{request.group}" {where}'
    )
    plural = request.resource.partition("/")[0]
    qualified = f"{plural}.{request.group}" if request.group else plural
    raise ApiError.forbidden(qualified, request.name, text)


def is_allowed(store: ObjectStore, user: Json, request: ResourceAttributes) -> bool:
    """Return whether a role of the user allows the request."""
    if _ADMINISTRATORS in user.get("groups", ()):
        return True
    return any(_allows(rule, request) for rule in _rules(store, user, request.namespace))


def review_access(store: ObjectStore, user: Json, review: Json) -> Json:
    """Return the completed SubjectAccessReview, or of `user` the SelfSubjectAccessReview."""
    spec = review.get("spec") or {}
    wanted = spec.get("resourceAttributes") or {}
    of_user = {"username": spec.get("user"), "groups": spec.get("groups") or ()}
    names = filter(None, (wanted.get("resource", ""), wanted.get("subresource", "")))
    request = ResourceAttributes(
        verb=wanted.get("verb", ""),
        group=wanted.get("group", ""),
        resource="/".join(names),
        namespace=wanted.get("namespace", ""),
        name=wanted.get("name", ""),
    )
    is_self = review.get("kind") == "SelfSubjectAccessReview"
    allowed = is_allowed(store, user if is_self else of_user, request)
    return {**review, "status": {"allowed": allowed}}


def _rules(store: ObjectStore, user: Json, namespace: str) -> Iterator[Json]:
    """Yield the rules of all roles that are bound to the user, cluster-wide or in the namespace."""
    bindings = store.list("clusterrolebindings")
    if namespace:
        bindings = [*bindings, *store.list("rolebindings", namespace)]
    for binding in bindings:
        if any(_is_subject(each, user) for each in binding.get("subjects") or ()):
            role = binding["roleRef"]
            in_namespace = namespace_of(binding) if role["kind"] == "Role" else None
            found = store.find(f"{role['kind'].lower()}s", in_namespace, role["name"])
            yield from (found.obj.get("rules") or ()) if found is not None else ()


def _is_subject(subject: Json, user: Json) -> bool:
    if subject["kind"] == "ServiceAccount":
        return bool(
            user.get("username") == f"{_ACCOUNT}{subject.get('namespace')}:{subject['name']}"
        )
    if subject["kind"] == "Group":
        return subject["name"] in user.get("groups", ())
    return bool(subject["name"] == user.get("username"))


def _allows(rule: Json, request: ResourceAttributes) -> bool:
    names = rule.get("resourceNames")
    return (
        _named(rule.get("verbs"), request.verb)
        and _named(rule.get("apiGroups"), request.group)
        and any(_covers(each, request.resource) for each in rule.get("resources") or ())
        and (not names or request.name in names)
    )


def _named(listed: Sequence[str] | None, wanted: str) -> bool:
    return any(each in {"*", wanted} for each in listed or ())


def _covers(pattern: str, resource: str) -> bool:
    """Return whether a resource of a rule covers one; `*/status` covers `status` of every kind."""
    _, _, subresource = resource.partition("/")
    return pattern in {"*", resource} or bool(subresource and pattern == f"*/{subresource}")

"""RBAC: whether the stored roles allow a request; administrators may do everything.

In contrast to Kubernetes, the rules of an aggregated role are not written into it.
https://kubernetes.io/docs/reference/access-authn-authz/rbac/
"""

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.objects import (
    Json,
    json_text,
    list_at,
    name_of,
    namespace_of,
)
from simcluster.apimachinery.selectors import selected_name
from simcluster.apiserver.rbac import ACCOUNT, RoleIndex
from simcluster.apiserver.rbac_rules import (
    AUTHENTICATED,
    ResourceAttributes,
    allows,
    allows_url,
    not_covered,
)
from simcluster.apiserver.requests.request_target import RequestTarget

_RBAC_GROUP = "rbac.authorization.k8s.io"
_CLAIMS_GROUP = "resource.k8s.io"
_NODE = "authentication.kubernetes.io/node-name"
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


def attributes_of(
    method: str, target: RequestTarget, *, watch: bool, fields: str
) -> ResourceAttributes:
    """Return the attributes of an HTTP request; a list or watch of one name is of that object."""
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
        name=target.name or (selected_name(fields) if method == "GET" else ""),
    )


def authorize(roles: RoleIndex, user: Json, request: ResourceAttributes) -> None:
    """Raise the 403 of Kubernetes unless a role of the user allows the request."""
    if is_allowed(roles, user, request):
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


def is_allowed(roles: RoleIndex, user: Json, request: ResourceAttributes) -> bool:
    """Return whether a role of the user allows the request."""
    return any(allows(rule, request) for rule in roles.rules_of(user, request.namespace))


def refuse_escalation(roles: RoleIndex, user: Json, target: RequestTarget, obj: Json) -> None:
    """Raise the 403 of Kubernetes for a role or binding that grants more than its author has.

    The verbs `escalate` and `bind` on the role permit it.
    """
    table = target.kind.table
    namespace = target.namespace
    if table in {"roles", "clusterroles"}:
        verb = "escalate"
        role_table = table
        role = name_of(obj)
        rules = obj.get("rules") or ()
    elif table in {"rolebindings", "clusterrolebindings"}:
        reference = obj.get("roleRef") or {}
        role = str(reference.get("name"))
        verb = "bind"
        role_table = f"{str(reference.get('kind')).lower()}s"
        rules = roles.rules_of_reference(obj, namespace)
    else:
        return
    permission = ResourceAttributes(verb, _RBAC_GROUP, role_table, namespace, role)
    missing = not_covered(rules, [*roles.rules_of(user, namespace), *AUTHENTICATED])
    if missing and not is_allowed(roles, user, permission):
        groups = " ".join(f'"{group}"' for group in user.get("groups") or ())
        text = (
            f'user "{user.get("username")}" (groups=[{groups}]) is attempting to grant RBAC '
            "permissions not currently held:\n" + "\n".join(map(_go_rule, missing))
        )
        raise ApiError.forbidden(target.kind.qualified, name_of(obj), text)


def _go_rule(rule: Json) -> str:
    """Return a rule as messages of Kubernetes show it."""
    names = {
        "apiGroups": "APIGroups",
        "resources": "Resources",
        "resourceNames": "ResourceNames",
        "nonResourceURLs": "NonResourceURLs",
        "verbs": "Verbs",
    }
    shown = (
        f"{name}:[{' '.join(json_text(value) for value in rule[field])}]"
        for field, name in names.items()
        if field in rule
    )
    return "{" + ", ".join(shown) + "}"


def authorize_claim_status(
    roles: RoleIndex, user: Json, verb: str, *, new: Json, old: Json
) -> None:
    """Raise the 403 of Kubernetes 1.36 unless the user may change what differs in the status.

    The allocation and the consumers need the right on `resourceclaims/binding`, and a driver's
    devices one on `resourceclaims/driver` by its name, for any node or that of the user's token.
    """
    before, after = old.get("status") or {}, new.get("status") or {}
    where = {"namespace": namespace_of(new)}
    if any(before.get(field) != after.get(field) for field in ("allocation", "reservedFor")):
        binding = ResourceAttributes(
            verb, _CLAIMS_GROUP, "resourceclaims/binding", name=name_of(new), **where
        )
        authorize(roles, user, binding)
    changed = {
        str(device.get("driver"))
        for obj, other in ((before, after), (after, before))
        for device in obj.get("devices") or ()
        if device not in (other.get("devices") or ())
    }
    own_node = ((user.get("extra") or {}).get(_NODE) or [""])[0]
    for driver in sorted(changed):
        scopes = ["arbitrary-node", *(["associated-node"] if own_node in _nodes_of(new) else ())]
        wanted = [
            ResourceAttributes(
                f"{scope}:{verb}", _CLAIMS_GROUP, "resourceclaims/driver", name=driver, **where
            )
            for scope in scopes
        ]
        if not any(is_allowed(roles, user, request) for request in wanted):
            authorize(roles, user, wanted[0])


def _nodes_of(claim: Json) -> set[str]:
    """Return the nodes that an allocation names."""
    return {
        str(node)
        for term in list_at(claim, "status.allocation.nodeSelector.nodeSelectorTerms")
        for field in term.get("matchFields") or ()
        for node in field.get("values") or ()
    }


def impersonated(roles: RoleIndex, user: Json, name: str, groups: list[str]) -> Json:
    """Return the other user as whom a request is made; 403 if `user` may not impersonate it."""
    account = name.removeprefix(ACCOUNT).partition(":") if name.startswith(ACCOUNT) else None
    kind = "users" if account is None else "serviceaccounts"
    authorize(roles, user, ResourceAttributes("impersonate", "", kind, name=name))
    for group in groups:
        authorize(roles, user, ResourceAttributes("impersonate", "", "groups", name=group))
    if account is not None and not groups:
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{account[0]}"]
    return {"username": name, "groups": [*groups, "system:authenticated"]}


def authorize_url(roles: RoleIndex, user: Json, method: str, path: str) -> None:
    """Raise the 403 of Kubernetes unless a role allows a request of a path that is no resource."""
    verb = method.lower()
    if not _is_url_allowed(roles, user, verb, path):
        text = f'forbidden: User "{user.get("username")}" cannot {verb} path "{path}"'
        raise ApiError(403, "Forbidden", text, details={})


def _is_url_allowed(roles: RoleIndex, user: Json, verb: str, path: str) -> bool:
    rules = (*roles.rules_of(user, ""), *AUTHENTICATED)
    return any(allows_url(rule, verb, path) for rule in rules)


def review_access(roles: RoleIndex, user: Json, review: Json, *, now: str) -> Json:
    """Return a completed review: of `user` if it is a Self... one, of the user in it if not."""
    spec = review.get("spec") or {}
    if review.get("kind") == "SelfSubjectReview":
        return {**review, "metadata": {"creationTimestamp": now}, "status": {"userInfo": user}}
    if review.get("kind") == "SelfSubjectRulesReview":
        return {**review, "status": _rules_status(roles, user, str(spec.get("namespace") or ""))}
    of_user = {"username": spec.get("user"), "groups": spec.get("groups") or ()}
    chosen = user if review.get("kind") == "SelfSubjectAccessReview" else of_user
    wanted = spec.get("resourceAttributes") or {}
    if url := spec.get("nonResourceAttributes"):
        allowed = _is_url_allowed(roles, chosen, url.get("verb", ""), url.get("path", ""))
        return {**review, "status": {"allowed": allowed}}
    names = filter(None, (wanted.get("resource", ""), wanted.get("subresource", "")))
    request = ResourceAttributes(
        verb=wanted.get("verb", ""),
        group=wanted.get("group", ""),
        resource="/".join(names),
        namespace=wanted.get("namespace", ""),
        name=wanted.get("name", ""),
    )
    return {**review, "status": {"allowed": is_allowed(roles, chosen, request)}}


def check_local_review(review: Json, namespace: str) -> None:
    """Raise 422 for a LocalSubjectAccessReview of another namespace, or of no resource."""
    wanted = (review.get("spec") or {}).get("resourceAttributes")
    if wanted is None:
        cause = Cause(
            "FieldValueInvalid",
            "Invalid value: null: disallowed on this kind of request",
            "spec.nonResourceAttributes",
        )
    elif wanted.get("namespace") != namespace:
        text = f"Invalid value: {json_text(wanted.get('namespace', ''))}: must match "
        cause = Cause(
            "FieldValueInvalid",
            f"{text}metadata.namespace: {namespace}",
            "spec.resourceAttributes.namespace",
        )
    else:
        return
    raise ApiError.invalid("LocalSubjectAccessReview", "authorization.k8s.io", "", [cause])


def _rules_status(roles: RoleIndex, user: Json, namespace: str) -> Json:
    rules = (*roles.rules_of(user, namespace), *AUTHENTICATED)
    return {
        "resourceRules": [rule for rule in rules if rule.get("resources")],
        "nonResourceRules": [rule for rule in rules if rule.get("nonResourceURLs")],
        "incomplete": False,
    }

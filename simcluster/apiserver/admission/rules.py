"""Rules, scopes and selectors: which requests a webhook or a policy matches; pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from simcluster.apimachinery.conversions import to_version
from simcluster.apimachinery.objects import Json, metadata, name_of
from simcluster.apimachinery.resources import Resource
from simcluster.apimachinery.selectors import selector_requirements

_EXEMPT = "admissionregistration.k8s.io"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionAttributes:
    """A request as admission sees it; `obj` is None for a deletion."""

    operation: str
    kind: Resource
    body_kind: Json
    """Group, version and kind of `obj`; the body of a subresource is of another kind."""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    obj: Json | None = None
    old_obj: Json | None = None
    options: Json
    dry_run: bool = False
    user: Json = field(default_factory=dict)
    """The user, as `userInfo` shows it."""

    @property
    def is_exempt(self) -> bool:
        """True for the configuration of admission itself, which could lock everyone out."""
        return self.kind.group == _EXEMPT


def matching_version(
    rules: Iterable[Json],
    request: AdmissionAttributes,
    versions: Sequence[Resource],
    *,
    exact: bool,
) -> Resource | None:
    """Return the version of the kind that the rules match; None if they match none.

    Unless `exact`, a rule for one version of a kind matches requests in all its versions.
    """
    same = (version for version in versions if version.plural == request.kind.plural)
    candidates = [request.kind, *(() if exact else same)]
    listed = list(rules)
    return next(
        (kind for kind in candidates if any(_rule(rule, kind, request) for rule in listed)), None
    )


def _rule(rule: Json, kind: Resource, request: AdmissionAttributes) -> bool:
    return (
        _in_scope(rule.get("scope") or "*", request)
        and _named(rule.get("operations"), request.operation)
        and _named(rule.get("apiGroups"), kind.group)
        and _named(rule.get("apiVersions"), kind.version)
        and any(_resource(resource, kind, request) for resource in rule.get("resources") or ())
        and (not rule.get("resourceNames") or request.name in rule["resourceNames"])
    )


def _named(listed: Sequence[str] | None, wanted: str) -> bool:
    return any(value in {"*", wanted} for value in listed or ())


def _in_scope(scope: str, request: AdmissionAttributes) -> bool:
    namespaced = bool(request.namespace) and request.kind.table != "namespaces"
    return {"*": True, "Namespaced": namespaced, "Cluster": not namespaced}.get(scope, False)


def _resource(pattern: str, kind: Resource, request: AdmissionAttributes) -> bool:
    resource, _, subresource = pattern.partition("/")
    return resource in {"*", kind.plural} and subresource in {"*", request.subresource}


def selectors_match(
    hook: Json, request: AdmissionAttributes, namespace_labels: Callable[[str], Json | None]
) -> bool:
    """Return whether the selectors of a webhook or a policy match the request."""
    return _namespace_selected(hook, request, namespace_labels) and _object_selected(hook, request)


def _namespace_selected(
    hook: Json, request: AdmissionAttributes, namespace_labels: Callable[[str], Json | None]
) -> bool:
    requirements = selector_requirements(hook.get("namespaceSelector") or {})
    if not requirements:
        return True
    if request.kind.table == "namespaces" and not request.subresource:
        labels = metadata(request.obj or request.old_obj or {}).get("labels")
    elif request.namespace:
        labels = namespace_labels(request.namespace)
    else:
        return True
    return all(matches(labels or {}) for matches in requirements)


def _object_selected(hook: Json, request: AdmissionAttributes) -> bool:
    requirements = selector_requirements(hook.get("objectSelector") or {})
    if not requirements:
        return True
    candidates = [obj for obj in (request.obj, request.old_obj) if obj is not None]
    return any(
        all(e(metadata(obj).get("labels") or {}) for e in requirements) for obj in candidates
    )


def objects_in_version(
    request: AdmissionAttributes, kind: Resource
) -> tuple[Json | None, Json | None]:
    """Return the request's object and old object, converted to a version of the kind."""
    if kind is request.kind or request.subresource not in {"", "status"}:
        return request.obj, request.old_obj
    return (
        None if request.obj is None else to_version(kind, request.obj),
        None if request.old_obj is None else to_version(kind, request.old_obj),
    )


def admission_request(request: AdmissionAttributes, kind: Resource, *, uid: str) -> Json:
    """Return the `AdmissionRequest` for a webhook that matched on `kind`."""
    resource = {"group": kind.group, "version": kind.version, "resource": kind.plural}
    request_resource = {
        "group": request.kind.group,
        "version": request.kind.version,
        "resource": request.kind.plural,
    }
    body_kind = request.body_kind
    if kind is not request.kind and request.subresource in {"", "status"}:
        body_kind = group_version_kind(kind)
    described: Json = {
        "uid": uid,
        "kind": body_kind,
        "resource": resource,
        "requestKind": request.body_kind,
        "requestResource": request_resource,
        "operation": request.operation,
        "userInfo": request.user,
        "object": None,
        "oldObject": None,
        "dryRun": request.dry_run,
        "options": request.options,
    }
    if request.subresource:
        described |= {"subResource": request.subresource, "requestSubResource": request.subresource}
    name = request.name or (name_of(request.obj) if request.obj else "")
    described |= {
        key: text for key, text in (("name", name), ("namespace", request.namespace)) if text
    }
    return described


def group_version_kind(kind: Resource) -> Json:
    """Return group, version and kind as in an `AdmissionRequest`."""
    return {"group": kind.group, "version": kind.version, "kind": kind.kind}


def expression_variables(request: AdmissionAttributes, kind: Resource) -> Json:
    """Return the variables of expressions: `object`, `oldObject` and `request`."""
    obj, old = objects_in_version(request, kind)
    described = admission_request(request, kind, uid="")
    return {"object": obj, "oldObject": old, "request": described}

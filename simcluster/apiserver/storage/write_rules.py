"""Rules of every write: preconditions, fields that updates keep, effects of deletions; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.objects import (
    Json,
    JsonValue,
    at_path,
    deep_copy,
    list_at,
    metadata,
    name_of,
    namespace_of,
)
from simcluster.apimachinery.pods import has_finished
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.storage.records import ObjectRecord


def check_preconditions(kind: Resource, old: Json, preconditions: Mapping[str, JsonValue]) -> None:
    """Refuse with 409 if `wanted` has another uid or resourceVersion than `old`."""
    meta = old["metadata"]
    if preconditions.get("uid") and preconditions["uid"] != meta["uid"]:
        reason = (
            f"Precondition failed: UID in precondition: {preconditions['uid']}, "
            f"UID in object meta: {meta['uid']}"
        )
        raise ApiError.conflict(kind.qualified, name_of(old), reason)
    if (
        preconditions.get("resourceVersion")
        and preconditions["resourceVersion"] != meta["resourceVersion"]
    ):
        reason = (
            "the object has been modified; please apply your changes to the latest version "
            "and try again"
        )
        raise ApiError.conflict(kind.qualified, name_of(old), reason)


def refuse_invalid(kind: Resource, obj: Json, causes: Sequence[Cause]) -> None:
    """Refuse with 422 if there are causes."""
    if causes:
        raise ApiError.invalid(kind.kind, kind.group, name_of(obj), causes)


def check_namespace(kind: Resource, new: Json, record: ObjectRecord | None) -> None:
    """Refuse a new object whose namespace does not exist or is terminating."""
    namespace = namespace_of(new)
    if record is None:
        raise ApiError.not_found("namespaces", namespace)
    if metadata(record.obj).get("deletionTimestamp"):
        reason = (
            f"unable to create new content in namespace {namespace} because it is being terminated"
        )
        cause = Cause("NamespaceTerminating", f"namespace {namespace} is being terminated",
                      "metadata.namespace")  # fmt: skip
        raise ApiError.forbidden(kind.qualified, name_of(new), reason, [cause])


_SYSTEM_FIELDS = (
    "uid", "creationTimestamp", "generation", "resourceVersion", "deletionTimestamp",
    "deletionGracePeriodSeconds", "generateName",
)  # fmt: skip
_WITH_STATUS = ("labels", "annotations", "finalizers")


def normalize_type(obj: Json, kind: Resource) -> Json:
    """Return the object with its type and metadata in order; 400 for another kind."""
    for key, expected in (("apiVersion", kind.api_version), ("kind", kind.kind)):
        if obj.get(key) not in (None, "", expected):
            raise ApiError.bad_request(
                f"{kind.kind} in version {kind.api_version!r} cannot be handled: "
                f"the object provided has {key} {obj[key]!r}"
            )
    rest = {key: value for key, value in obj.items() if key not in {"apiVersion", "kind"}}
    meta = rest.pop("metadata", None)
    if meta is not None and not isinstance(meta, dict):
        raise ApiError.bad_request("metadata is not a map")
    clean = {key: value for key, value in (meta or {}).items() if value not in (None, "", {}, [])}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": clean, **rest}


def merge_update(kind: Resource, new: Json, old: Json, subresource: str) -> Json:
    """Return the object to store when `new` replaces `old`, or a subresource of it."""
    if subresource == "status":
        return _merge_status(kind, new, old)
    if subresource == "ephemeralcontainers":
        result = deep_copy(old)
        _replace(result["spec"], "ephemeralContainers", new["spec"].get("ephemeralContainers"))
        return result
    if subresource == "resize":
        return _with_resources(new, deep_copy(old))
    for field in _SYSTEM_FIELDS:
        _replace(new["metadata"], field, old["metadata"].get(field))
    if kind.table != "nodes":
        new["metadata"].pop("managedFields", None)
    new["metadata"].pop("selfLink", None)
    if kind.table == "pods" and isinstance(new.get("spec"), dict):
        for field in ("priority", "preemptionPolicy"):  # admission sets them at creation
            if new["spec"].get(field) is None and field in old["spec"]:
                new["spec"][field] = old["spec"][field]
    if kind.has_status and not subresource:
        _replace(new, "status", old.get("status"))
    return new


def _with_resources(new: Json, pod: Json) -> Json:
    """Give a pod's containers the resources that they have in another version of it."""
    for field in ("initContainers", "containers"):
        listed = list_at(new, f"spec.{field}")
        resources = {container.get("name"): container.get("resources") for container in listed}
        for container in list_at(pod, f"spec.{field}"):
            if container["name"] in resources:
                container["resources"] = resources[container["name"]] or {}
    return pod


def _merge_status(kind: Resource, new: Json, old: Json) -> Json:
    if kind.status_only:
        result = {**deep_copy(old), "apiVersion": kind.api_version}
        _replace(result, "status", new.get("status"))
        return result
    result = deep_copy(old)
    result["status"] = new.get("status") or {}
    for field in _WITH_STATUS:
        _replace(result["metadata"], field, metadata(new).get(field))
    return result


def _replace(target: Json, field: str, value: object) -> None:
    if value in (None, {}, []):
        target.pop(field, None)
    else:
        target[field] = value


DEFAULT_GRACE_S = 30


@dataclass(frozen=True, slots=True)
class Deletion:
    """The effect of a deletion: it `removes` the object, or marks it if that `changes` it."""

    removes: bool
    changes: bool = True
    grace_s: int = 0


def decide_deletion(kind: Resource, obj: Json, *, grace_s: int | None) -> Deletion:
    """Decide the effect of a deletion; `grace_s` is the requested period, None for the default.

    A pod on a node is only marked: its kubelet stops it and deletes it with period 0. An object
    with finalizers is only marked, too.
    """
    meta = metadata(obj)
    marked = bool(meta.get("deletionTimestamp"))
    wanted = _pod_grace_s(obj, grace_s) if kind.table == "pods" else 0
    if marked and grace_s is None:
        wanted = int(meta.get("deletionGracePeriodSeconds") or 0)
    if wanted == 0 and not (meta.get("finalizers") or _spec_finalizers(kind, obj)):
        return Deletion(removes=True)
    current = int(meta.get("deletionGracePeriodSeconds") or 0)
    return Deletion(removes=False, changes=not marked or wanted < current, grace_s=wanted)


def _pod_grace_s(pod: Json, requested_s: int | None) -> int:
    if not at_path(pod, "spec.nodeName") or has_finished(pod):
        return 0
    if requested_s is not None:
        return max(requested_s, 0)
    own = at_path(pod, "spec.terminationGracePeriodSeconds")
    return DEFAULT_GRACE_S if own is None else int(own)


def _spec_finalizers(kind: Resource, obj: Json) -> bool:
    return kind.table == "namespaces" and bool(at_path(obj, "spec.finalizers"))

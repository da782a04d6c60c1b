"""The rules of every write: preconditions, what an update may change, what a deletion does."""

import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.objects import (
    Json,
    at_path,
    deep_copy,
    metadata,
    name_of,
    namespace_of,
)
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.storage.records import ObjectRecord


def check_preconditions(kind: Resource, old: Json, wanted: Mapping[str, Any]) -> None:
    """Refuse with 409 where `wanted` names another uid or resourceVersion than `old` has."""
    meta = old["metadata"]
    if wanted.get("uid") and wanted["uid"] != meta["uid"]:
        why = (
            f"Precondition failed: UID in precondition: {wanted['uid']}, "
            f"UID in object meta: {meta['uid']}"
        )
        raise ApiError.conflict(kind.qualified, name_of(old), why)
    if wanted.get("resourceVersion") and wanted["resourceVersion"] != meta["resourceVersion"]:
        why = (
            "the object has been modified; please apply your changes to the latest version "
            "and try again"
        )
        raise ApiError.conflict(kind.qualified, name_of(old), why)


def refuse_invalid(kind: Resource, obj: Json, causes: Sequence[Cause]) -> None:
    """Refuse with 422 where there are causes to."""
    if causes:
        raise ApiError.invalid(kind.kind, kind.group, name_of(obj), causes)


def check_namespace(kind: Resource, new: Json, found: ObjectRecord | None) -> None:
    """Refuse a new object whose namespace is not there, or is on its way out."""
    namespace = namespace_of(new)
    if found is None:
        raise ApiError.not_found("namespaces", namespace)
    if metadata(found.obj).get("deletionTimestamp"):
        why = (
            f"unable to create new content in namespace {namespace} because it is being terminated"
        )
        cause = Cause("NamespaceTerminating", f"namespace {namespace} is being terminated",
                      "metadata.namespace")  # fmt: skip
        raise ApiError.forbidden(kind.qualified, name_of(new), why, [cause])


_SYSTEM_FIELDS = (
    "uid", "creationTimestamp", "generation", "resourceVersion", "deletionTimestamp",
    "deletionGracePeriodSeconds", "generateName",
)  # fmt: skip


_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


_WITH_STATUS = ("labels", "annotations", "finalizers")


def generated_name(prefix: str) -> str:
    """Return the prefix with five random letters, cut so that the whole stays below 64."""
    return prefix[:58] + "".join(secrets.choice(_ALPHABET) for _ in range(5))


def assign_identity(meta: Json, *, now: str) -> None:
    """Give a new object's metadata what makes it one: name, uid, the time of its creation."""
    if "name" not in meta and meta.get("generateName"):
        meta["name"] = generated_name(meta["generateName"])
    meta.update(uid=str(uuid.uuid4()), creationTimestamp=now)
    for absent in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds",
                   "selfLink", "managedFields"):  # fmt: skip
        meta.pop(absent, None)


def normalize_type(obj: Json, kind: Resource) -> Json:
    """Return the object with its type first and its metadata in place; 400 for another kind."""
    for key, mine in (("apiVersion", kind.api_version), ("kind", kind.kind)):
        if obj.get(key) not in (None, "", mine):
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
    """Return what is stored when `new` is written over `old` through a subresource, or none."""
    if subresource == "status" and kind.status_only:
        result = {**deep_copy(old), "apiVersion": kind.api_version}
        _replace(result, "status", new.get("status"))
        return result
    if subresource == "status":
        result = deep_copy(old)
        result["status"] = new.get("status") or {}
        for field in _WITH_STATUS:
            _replace(result["metadata"], field, metadata(new).get(field))
        return result
    for field in _SYSTEM_FIELDS:
        _replace(new["metadata"], field, old["metadata"].get(field))
    new["metadata"].pop("managedFields", None)
    new["metadata"].pop("selfLink", None)
    if kind.table == "pods" and isinstance(new.get("spec"), dict):
        for field in ("priority", "preemptionPolicy"):  # given at creation, kept by admission
            if new["spec"].get(field) is None and field in old["spec"]:
                new["spec"][field] = old["spec"][field]
    if kind.has_status and not subresource:
        _replace(new, "status", old.get("status"))
    return new


def _replace(target: Json, field: str, value: object) -> None:
    if value in (None, {}, []):
        target.pop(field, None)
    else:
        target[field] = value


DEFAULT_GRACE_S = 30


_FINISHED = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class Deletion:
    """`gone_now`: remove it. Otherwise mark it with `grace_s`, unless nothing `changes`."""

    removes: bool
    changes: bool = True
    grace_s: int = 0


def decide_deletion(kind: Resource, obj: Json, *, grace_s: int | None) -> Deletion:
    """Decide what deleting `obj` does; `grace_s` is what was asked, None for the default.

    A pod on a node is its kubelet's to end, so it stays, marked, until deleted with grace 0.
    Finalizers keep any object until they are gone.
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


def _pod_grace_s(pod: Json, asked_s: int | None) -> int:
    if not at_path(pod, "spec.nodeName") or at_path(pod, "status.phase") in _FINISHED:
        return 0
    if asked_s is not None:
        return max(asked_s, 0)
    own = at_path(pod, "spec.terminationGracePeriodSeconds")
    return DEFAULT_GRACE_S if own is None else int(own)


def _spec_finalizers(kind: Resource, obj: Json) -> bool:
    return kind.table == "namespaces" and bool(at_path(obj, "spec.finalizers"))

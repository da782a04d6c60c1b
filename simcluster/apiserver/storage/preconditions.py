"""The refusals of writes that would hit another object than the one meant, or a bad one."""

from collections.abc import Mapping, Sequence
from typing import Any

from simcluster.apiserver.http.errors import ApiError, Cause
from simcluster.apiserver.kinds.resources import Resource
from simcluster.apiserver.storage.history import Record
from simcluster.apiserver.storage.objects import Json, metadata, name_of, namespace_of


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


def check_namespace(kind: Resource, new: Json, found: Record | None) -> None:
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

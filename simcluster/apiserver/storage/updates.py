"""What an update may change: system fields, status and identity stay as they were."""

import secrets
import uuid

from simcluster.apiserver.http.errors import ApiError
from simcluster.apiserver.kinds.resources import Resource
from simcluster.apiserver.storage.objects import Json, copied, metadata

_SYSTEM_FIELDS = (
    "uid", "creationTimestamp", "generation", "resourceVersion", "deletionTimestamp",
    "deletionGracePeriodSeconds", "generateName",
)  # fmt: skip
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_WITH_STATUS = ("labels", "annotations", "finalizers")


def generated_name(prefix: str) -> str:
    """Return the prefix with five random letters, cut so that the whole stays below 64."""
    return prefix[:58] + "".join(secrets.choice(_ALPHABET) for _ in range(5))


def identify(meta: Json, *, now: str) -> None:
    """Give a new object's metadata what makes it one: name, uid, the time of its creation."""
    if "name" not in meta and meta.get("generateName"):
        meta["name"] = generated_name(meta["generateName"])
    meta.update(uid=str(uuid.uuid4()), creationTimestamp=now)
    for absent in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds",
                   "selfLink", "managedFields"):  # fmt: skip
        meta.pop(absent, None)


def named(obj: Json, kind: Resource) -> Json:
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


def carried_over(kind: Resource, new: Json, old: Json, subresource: str) -> Json:
    """Return what is stored when `new` is written over `old` through a subresource, or none."""
    if subresource == "status" and kind.status_alone:
        result = {**copied(old), "apiVersion": kind.api_version}
        _replace(result, "status", new.get("status"))
        return result
    if subresource == "status":
        result = copied(old)
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

"""Create, replace, patch, delete: the requests that change objects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.simcluster import patches
from services.simcluster.binding import bind
from services.simcluster.conversions import shown
from services.simcluster.custom_kinds import CustomKind
from services.simcluster.disruption import Disruptions
from services.simcluster.errors import ApiError, Cause
from services.simcluster.field_names import drop_unknown
from services.simcluster.objects import Json, copied, name_of
from services.simcluster.query import dry_run, whole
from services.simcluster.selectors import selection
from services.simcluster.store import Store
from services.simcluster.target import Target

_ANSWERED_WHOLE = frozenset({"pods", "namespaces", "services", "serviceaccounts",
                             "persistentvolumeclaims", "resourcequotas"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Written:
    """The HTTP code and the object (or Status) of an accepted write, and what to warn of."""

    code: int
    obj: Json
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """One write as it came in."""

    target: Target
    query: Mapping[str, str]
    content_type: str
    body: Any


class Writer:
    """Applies writes to the store."""

    def __init__(self, store: Store, disruptions: Disruptions) -> None:
        self._store = store
        self._disruptions = disruptions

    def write(self, method: str, request: WriteRequest) -> Written:
        """Do what the method says; 405 where the target does not take it."""
        target = request.target
        if method == "POST":
            return self._post(request)
        if target.subresource not in {"", "status", "finalize"}:
            raise not_allowed(method)
        if method == "DELETE" and not target.subresource:
            if target.name:
                return self._delete(request)
            return self._delete_collection(request)
        if method == "PUT" and target.name:
            return self._put(request)
        if method == "PATCH" and target.name:
            return self._patch(request)
        raise not_allowed(method)

    def _post(self, request: WriteRequest) -> Written:
        target = request.target
        body = _object(request.body)
        dry = dry_run(request.query)
        if target.subresource == "binding":
            name = target.name or name_of(body)
            bind(self._store, target.namespace, name, body, dry_run=dry)
            return Written(201, success())
        if target.subresource == "eviction":
            dry = dry_run(request.query, body.get("deleteOptions"))
            self._disruptions.evict(target.namespace, target.name, body, dry_run=dry)
            return Written(201, success())
        if target.name:
            raise not_allowed("POST")
        return self._create(request, body)

    def _create(self, request: WriteRequest, body: Json) -> Written:
        warnings = self._prepare(request, body)
        plural = request.target.kind.table
        obj = self._store.create(plural, body, dry_run=dry_run(request.query))
        return Written(201, obj, warnings)

    def _put(self, request: WriteRequest) -> Written:
        target = request.target
        body = _object(request.body)
        warnings = self._prepare(request, body)
        if name_of(body) != target.name:
            raise ApiError.bad_request(
                f"the name of the object ({name_of(body)}) does not match the name on the URL "
                f"({target.name})"
            )
        return Written(200, self._update(request, body, "update"), warnings)

    def _patch(self, request: WriteRequest) -> Written:
        target = request.target
        patch = patches.patcher(target.kind, request.content_type, request.body)
        applies = request.content_type == patches.APPLY_PATCH
        if applies and not request.query.get("fieldManager"):
            cause = Cause("FieldValueRequired", "Required value: is required for apply patch",
                          "fieldManager")  # fmt: skip
            raise ApiError.invalid("PatchOptions", "meta.k8s.io", "", [cause])
        if applies and self._store.find(target.kind.table, target.namespace, target.name) is None:
            return self._create(request, _object(request.body))
        old = copied(self._store.read(target.kind.table, target.namespace, target.name))
        new = patch(shown(target.kind, old))
        warnings = self._prepare(request, new)
        return Written(200, self._update(request, new, "patch"), warnings)

    def _update(self, request: WriteRequest, obj: Json, verb: str) -> Json:
        return self._store.update(
            request.target.kind.table,
            obj,
            subresource=request.target.subresource,
            dry_run=dry_run(request.query),
            verb=verb,
        )

    def _delete(self, request: WriteRequest) -> Written:
        target = request.target
        options = _object(request.body) if request.body else {}
        obj = self._delete_one(target, target.name, request, options)
        if target.kind.table in _ANSWERED_WHOLE or not self._store.gone(target.kind.table, obj):
            return Written(200, obj)
        details = {
            "name": target.name,
            "group": target.kind.group,
            "kind": target.kind.plural,
            "uid": obj["metadata"]["uid"],
        }
        return Written(200, success(details))

    def _delete_one(self, target: Target, name: str, request: WriteRequest, options: Json) -> Json:
        wanted = options.get("preconditions") or {}
        grace_s = options.get("gracePeriodSeconds")
        return self._store.delete(
            target.kind.table,
            target.namespace,
            name,
            grace_s=whole(request.query, "gracePeriodSeconds") if grace_s is None else int(grace_s),
            uid=wanted.get("uid"),
            resource_version=wanted.get("resourceVersion"),
            dry_run=dry_run(request.query, options),
        )

    def _delete_collection(self, request: WriteRequest) -> Written:
        target, query = request.target, request.query
        options = _object(request.body) if request.body else {}
        chosen = selection(
            target.kind,
            target.namespace,
            query.get("labelSelector", ""),
            query.get("fieldSelector", ""),
        )
        deleted = []
        for record in self._store.page(target.kind.table, chosen).records:
            if not self._store.gone(target.kind.table, record.obj):
                where = Target(target.kind, record.obj["metadata"].get("namespace", ""))
                deleted.append(self._delete_one(where, name_of(record.obj), request, options))
        return Written(
            200,
            {
                "kind": target.kind.list_kind,
                "apiVersion": target.kind.api_version,
                "metadata": {"resourceVersion": str(self._store.version)},
                "items": deleted,
            },
        )

    def _prepare(self, request: WriteRequest, body: Json) -> Sequence[str]:
        """Give the object the URL's namespace and drop unknown fields; returns the warnings."""
        self._place(request.target, body)
        kind = request.target.kind
        warnings = drop_unknown(kind, body, request.query)
        if isinstance(kind, CustomKind) and kind.warning:
            return [kind.warning, *warnings]
        return warnings

    def _place(self, target: Target, body: Json) -> None:
        meta = body.get("metadata")
        if meta is not None and not isinstance(meta, dict):
            raise ApiError.bad_request("metadata is not a map")
        if not target.kind.namespaced:
            return
        meta = meta or {}
        if meta.get("namespace") not in (None, "", target.namespace):
            raise ApiError.bad_request(
                f"the namespace of the provided object does not match the namespace sent on the "
                f"request ({meta['namespace']} and {target.namespace})"
            )
        body["metadata"] = {**meta, "namespace": target.namespace}


def _object(body: Any) -> Json:
    if not isinstance(body, dict):
        raise ApiError.bad_request("the body of the request is not an object")
    return body


def not_allowed(method: str) -> ApiError:
    """405: the target is there and does not take this method."""
    text = f"the server does not allow this method ({method}) on the requested resource"
    return ApiError(405, "MethodNotAllowed", text)


def success(details: Json | None = None) -> Json:
    """Return the Status of a write that has no object to show."""
    status: Json = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if details:
        status["details"] = details
    return status

"""Writes of objects: create, replace, patch, delete."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from simcluster.apimachinery.conversions import to_storage, to_version
from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.objects import Json, JsonValue, deep_copy, metadata, name_of
from simcluster.apimachinery.selectors import parse_selection
from simcluster.apiserver.admission.chain import AdmissionChain
from simcluster.apiserver.crd.custom_kinds import CustomKind
from simcluster.apiserver.kinds.binding import bind
from simcluster.apiserver.kinds.builtin_resources import BINDINGS
from simcluster.apiserver.kinds.disruption_budgets import DisruptionController
from simcluster.apiserver.kinds.garbage_collection import GarbageCollector
from simcluster.apiserver.kinds.scale import scale_of, with_scale
from simcluster.apiserver.kinds.service_account_tokens import ServiceAccountTokens
from simcluster.apiserver.rbac import RoleIndex
from simcluster.apiserver.requests import patches
from simcluster.apiserver.requests.admitted_writes import CLAIM_STATUS, AdmittedWrites
from simcluster.apiserver.requests.authorization import refuse_escalation
from simcluster.apiserver.requests.body_checks import drop_unknown_fields, new_event_causes
from simcluster.apiserver.requests.field_managers import recorded_managers
from simcluster.apiserver.requests.query_parameters import is_dry_run, non_negative_int
from simcluster.apiserver.requests.request_target import RequestTarget
from simcluster.apiserver.storage.store import ObjectStore
from simcluster.apiserver.storage.write_rules import refuse_invalid

_WRITTEN = frozenset({"", "status", "finalize", "ephemeralcontainers", "resize"})
_RETURNED_ON_DELETE = frozenset(
    {
        "pods",
        "namespaces",
        "services",
        "serviceaccounts",
        "persistentvolumeclaims",
        "resourcequotas",
    }
)


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The HTTP code, the object or Status, and the warnings of an accepted write."""

    code: int
    obj: Json
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """One write request."""

    target: RequestTarget
    query: Mapping[str, str]
    content_type: str
    body: JsonValue
    user: Json
    """The user of the request."""
    agent: str = ""
    """The program, as its User-Agent names it."""


class ObjectWriter:
    """Carries out writes, with admission if a webhook or a policy may match them."""

    def __init__(
        self,
        store: ObjectStore,
        disruptions: DisruptionController,
        garbage: GarbageCollector,
        chain: AdmissionChain,
        tokens: ServiceAccountTokens,
        *,
        roles: RoleIndex,
    ) -> None:
        self._store = store
        self._disruptions = disruptions
        self._garbage = garbage
        self._chain = chain
        self._tokens = tokens
        self._roles = roles

    async def write(self, method: str, request: WriteRequest) -> WriteResult:
        """Carry out a write; 405 if the target does not support the method."""
        target = request.target
        if method == "POST":
            return await self._post(request)
        if target.subresource == "scale" and method in {"PUT", "PATCH"}:
            return await self._scale(method, request)
        if target.subresource not in _WRITTEN:
            raise method_not_allowed(method)
        if method == "DELETE" and not target.subresource:
            if target.name:
                return await self._delete(request)
            return await self._delete_collection(request)
        if method == "PUT" and target.name:
            return await self._put(request)
        if method == "PATCH" and target.name:
            return await self._patch(request)
        raise method_not_allowed(method)

    def _admitted_writes(self, user: Json) -> AdmittedWrites:
        return AdmittedWrites(self._store, self._chain, user, self._roles)

    async def admit_connect(self, target: RequestTarget, options: Json, user: Json) -> None:
        """Admit a command in a pod."""
        if self._needs_admission(target, "CONNECT"):
            await self._admitted_writes(user).admit_connect(target, options)

    def _needs_admission(self, target: RequestTarget, operation: str) -> bool:
        """Return whether a webhook or a policy may match."""
        return self._chain.intercepts(target.kind, operation, target.subresource, target.namespace)

    async def _post(self, request: WriteRequest) -> WriteResult:
        target = request.target
        body = _object(request.body)
        binds = target.kind is BINDINGS or target.subresource == "binding"
        if not binds and target.subresource not in {"eviction", "token"}:
            if target.name:
                raise method_not_allowed("POST")
            return await self._create(request, body)
        warnings: list[str] = []
        target = replace(target, name=target.name or name_of(body))
        if self._needs_admission(target, "CREATE"):
            admitted = self._admitted_writes(request.user)
            body = await admitted.admit_body(target, body, request.query, warnings)
        if target.subresource == "token":
            answer = self._tokens.issue(target.namespace, target.name, body)
            return WriteResult(201, answer, warnings)
        dry = is_dry_run(request.query, body.get("deleteOptions"))
        if binds:
            bind(self._store, target.namespace, target.name, body, dry_run=dry)
        else:
            self._disruptions.evict(target.namespace, target.name, body, dry_run=dry)
        return WriteResult(201, success_status(), warnings)

    async def _create(self, request: WriteRequest, body: Json) -> WriteResult:
        warnings = self._prepare(request, body)
        target = request.target
        if target.kind.group == "events.k8s.io":
            refuse_invalid(target.kind, body, list(new_event_causes(body)))
        body = to_storage(target.kind, body)
        refuse_escalation(self._roles, request.user, target, body)
        if self._needs_admission(target, "CREATE"):
            obj = await self._admitted_writes(request.user).create(
                target, body, request.query, warnings
            )
        else:
            obj = self._store.create(target.kind.table, body, dry_run=is_dry_run(request.query))
        return WriteResult(201, obj, warnings)

    async def _put(self, request: WriteRequest) -> WriteResult:
        target = request.target
        body = _object(request.body)
        warnings = self._prepare(request, body)
        if name_of(body) != target.name:
            raise ApiError.bad_request(
                f"the name of the object ({name_of(body)}) does not match the name on the URL "
                f"({target.name})"
            )
        body = to_storage(target.kind, body)
        return await self._update(request, lambda: body, "update", warnings)

    async def _patch(self, request: WriteRequest) -> WriteResult:
        target = request.target
        table = target.kind.table
        patch = patches.patch_function(target.kind, request.content_type, request.body)
        is_apply = request.content_type == patches.APPLY_PATCH
        if is_apply and not request.query.get("fieldManager"):
            cause = Cause("FieldValueRequired", "Required value: is required for apply patch",
                          "fieldManager")  # fmt: skip
            raise ApiError.invalid("PatchOptions", "meta.k8s.io", "", [cause])
        if is_apply and self._store.find(table, target.namespace, target.name) is None:
            return await self._create(request, _object(request.body))
        warnings: list[str] = []

        def new_version() -> Json:
            old = deep_copy(self._store.read(table, target.namespace, target.name))
            version = old["metadata"]["resourceVersion"]
            new = patch(to_version(target.kind, old))
            warnings[:] = self._prepare(request, new)
            if metadata(new).get("resourceVersion") == version:
                del new["metadata"]["resourceVersion"]
            return to_storage(target.kind, new)

        return await self._update(request, new_version, "patch", warnings)

    async def _scale(self, method: str, request: WriteRequest) -> WriteResult:
        """Set the replicas of a workload, by a Scale or a patch of one."""
        target = replace(request.target, subresource="")
        patch = (
            patches.patch_function(target.kind, request.content_type, request.body)
            if method == "PATCH"
            else lambda _old: _object(request.body)
        )

        def scaled() -> Json:
            workload = self._store.read(target.kind.table, target.namespace, target.name)
            scale = scale_of(workload)
            del scale["metadata"]["resourceVersion"]
            return with_scale(workload, patch(scale))

        result = await self._update(replace(request, target=target), scaled, "patch", [])
        return replace(result, obj=scale_of(result.obj))

    async def _update(
        self, request: WriteRequest, make: Callable[[], Json], verb: str, warnings: list[str]
    ) -> WriteResult:
        target = request.target
        query = request.query

        def checked() -> Json:
            obj = make()
            refuse_escalation(self._roles, request.user, target, obj)
            if target.kind.table == "nodes" and not target.subresource:
                old = self._store.read("nodes", None, target.name)
                manager = query.get("fieldManager") or request.agent
                managers = recorded_managers(old, obj, manager, self._store.now())
                metadata(obj)["managedFields"] = managers
            return obj

        needs_rights = (target.kind.table, target.subresource) == CLAIM_STATUS
        if not (needs_rights or self._needs_admission(target, "UPDATE")):
            obj = self._store.update(
                target.kind.table,
                checked(),
                subresource=target.subresource,
                dry_run=is_dry_run(query),
                verb=verb,
            )
        else:
            admitted = self._admitted_writes(request.user)
            obj = await admitted.update(target, checked, query, warnings, verb=verb)
        return WriteResult(200, obj, warnings)

    async def _delete(self, request: WriteRequest) -> WriteResult:
        target = request.target
        options = _object(request.body) if request.body else {}
        warnings: list[str] = []
        obj = await self._delete_one(target, target.name, request, options, warnings)
        if target.kind.table in _RETURNED_ON_DELETE or not self._store.is_gone(
            target.kind.table, obj
        ):
            return WriteResult(200, obj, warnings)
        details = {
            "name": target.name,
            "group": target.kind.group,
            "kind": target.kind.plural,
            "uid": obj["metadata"]["uid"],
        }
        return WriteResult(200, success_status(details), warnings)

    async def _delete_one(
        self,
        target: RequestTarget,
        name: str,
        request: WriteRequest,
        options: Json,
        warnings: list[str],
    ) -> Json:
        preconditions = options.get("preconditions") or {}
        grace_s = options.get("gracePeriodSeconds")
        if self._needs_admission(target, "DELETE"):
            admitted = self._admitted_writes(request.user)
            await admitted.admit_delete(target, name, request.query, options, warnings)
        policy = options.get("propagationPolicy") or request.query.get("propagationPolicy")
        if policy == "Orphan" and not is_dry_run(request.query, options):
            self._garbage.orphan(self._store.read(target.kind.table, target.namespace, name))
        return self._store.delete(
            target.kind.table,
            target.namespace,
            name,
            grace_s=non_negative_int(request.query, "gracePeriodSeconds")
            if grace_s is None
            else int(grace_s),
            uid=preconditions.get("uid"),
            resource_version=preconditions.get("resourceVersion"),
            dry_run=is_dry_run(request.query, options),
        )

    async def _delete_collection(self, request: WriteRequest) -> WriteResult:
        target = request.target
        query = request.query
        if target.kind is BINDINGS:
            raise method_not_allowed("DELETE")
        options = _object(request.body) if request.body else {}
        chosen = parse_selection(
            target.kind,
            target.namespace,
            query.get("labelSelector", ""),
            query.get("fieldSelector", ""),
        )
        deleted: list[Json] = []
        warnings: list[str] = []
        for record in self._store.page(target.kind.table, chosen).records:
            if not self._store.is_gone(target.kind.table, record.obj):
                where = RequestTarget(target.kind, record.obj["metadata"].get("namespace", ""))
                name = name_of(record.obj)
                deleted.append(await self._delete_one(where, name, request, options, warnings))
        body = {
            "kind": target.kind.list_kind,
            "apiVersion": target.kind.api_version,
            "metadata": {"resourceVersion": str(self._store.version)},
            "items": deleted,
        }
        return WriteResult(200, body, warnings)

    def _prepare(self, request: WriteRequest, body: Json) -> list[str]:
        """Set the URL's namespace and drop unknown fields; return the warnings."""
        self._set_namespace(request.target, body)
        kind = request.target.kind
        warnings = drop_unknown_fields(kind, body, request.query)
        if isinstance(kind, CustomKind) and kind.warning:
            return [kind.warning, *warnings]
        return warnings

    def _set_namespace(self, target: RequestTarget, body: Json) -> None:
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


def _object(body: JsonValue) -> Json:
    if not isinstance(body, dict):
        raise ApiError.bad_request("the body of the request is not an object")
    return body


def method_not_allowed(method: str) -> ApiError:
    """Return the 405 for a method that the target does not support."""
    text = f"the server does not allow this method ({method}) on the requested resource"
    return ApiError(405, "MethodNotAllowed", text)


def success_status(details: Json | None = None) -> Json:
    """Return the Status of a write that returns no object."""
    status: Json = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if details:
        status["details"] = details
    return status

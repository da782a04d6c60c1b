"""Writes with admission: defaults, mutating webhooks, validation, validating webhooks, store.

The object that is stored is the one that was validated. It is written over the version that the
webhooks saw; if that has changed, and the client set no resourceVersion, the write is repeated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from simcluster.apimachinery.conversions import to_storage, to_version
from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, deep_copy, metadata, name_of
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.admission.chain import AdmissionChain
from simcluster.apiserver.admission.rules import AdmissionAttributes, group_version_kind
from simcluster.apiserver.rbac import RoleIndex
from simcluster.apiserver.requests.authorization import authorize_claim_status
from simcluster.apiserver.requests.query_parameters import is_dry_run
from simcluster.apiserver.requests.request_target import RequestTarget
from simcluster.apiserver.storage.store import ObjectStore

_ATTEMPTS = 5
_BODIES: Mapping[str, Json] = {
    "binding": {"group": "", "version": "v1", "kind": "Binding"},
    "eviction": {"group": "policy", "version": "v1", "kind": "Eviction"},
    "attach": {"group": "", "version": "v1", "kind": "PodAttachOptions"},
    "exec": {"group": "", "version": "v1", "kind": "PodExecOptions"},
    "token": {"group": "authentication.k8s.io", "version": "v1", "kind": "TokenRequest"},
}
_OPTIONS = {"CREATE": "CreateOptions", "UPDATE": "UpdateOptions", "DELETE": "DeleteOptions"}


CLAIM_STATUS = ("resourceclaims", "status")
"""Table and subresource whose parts need rights of their own."""


@dataclass(frozen=True, slots=True)
class AdmittedWrites:
    """Carries out one user's writes; warnings are appended to `warnings`."""

    store: ObjectStore
    chain: AdmissionChain
    user: Json
    """The user of the request."""
    roles: RoleIndex

    async def create(
        self, target: RequestTarget, body: Json, query: Mapping[str, str], warnings: list[str]
    ) -> Json:
        """Create an object."""
        table = target.kind.table
        kind = target.kind
        draft = self.store.draft(table, body)
        self.store.apply_defaults(kind, draft)
        named = replace(target, name=name_of(draft))
        request = self._attributes("CREATE", named, query, to_version(kind, draft))
        request = await self.chain.mutate(
            request,
            warnings,
            complete=lambda obj: self.store.apply_defaults(kind, obj),
            admit=lambda obj: self.store.admit(kind, obj),
        )
        final = to_storage(kind, request.obj or draft)
        checked = self.store.insert(table, final, dry_run=True)
        await self.chain.validate(replace(request, obj=to_version(kind, checked)), warnings)
        return self.store.insert(table, final, dry_run=request.dry_run)

    async def update(
        self,
        target: RequestTarget,
        make: Callable[[], Json],
        query: Mapping[str, str],
        warnings: list[str],
        *,
        verb: str,
    ) -> Json:
        """Update an object to what `make` returns for its present version."""
        for attempt in range(_ATTEMPTS):
            new = make()
            attempt_warnings: list[str] = []
            try:
                written = await self._update(target, new, query, attempt_warnings, verb)
            except ApiError as error:
                own = metadata(new).get("resourceVersion")
                may_retry = error.code == 409 and target.name and not own
                if not may_retry or attempt == _ATTEMPTS - 1:
                    raise
            else:
                warnings += attempt_warnings
                return written
        raise AssertionError("the last attempt returns or raises")

    async def _update(
        self,
        target: RequestTarget,
        new: Json,
        query: Mapping[str, str],
        warnings: list[str],
        verb: str,
    ) -> Json:
        table = target.kind.table
        part = target.subresource
        kind = target.kind
        draft, old = self.store.draft_update(table, new, subresource=part)
        request = self._attributes(
            "UPDATE", target, query, to_version(kind, draft), old=to_version(kind, old)
        )
        request = await self.chain.mutate(
            request,
            warnings,
            complete=lambda obj: self.store.apply_defaults(kind, obj),
            admit=lambda _obj: None,
        )
        final = deep_copy(to_storage(kind, request.obj or draft))
        final["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        if (table, part) == CLAIM_STATUS:
            authorize_claim_status(self.roles, self.user, verb, new=final, old=old)
        checked = self.store.update(table, final, subresource=part, dry_run=True, verb=verb)
        await self.chain.validate(replace(request, obj=to_version(kind, checked)), warnings)
        return self.store.update(table, final, subresource=part, dry_run=request.dry_run, verb=verb)

    async def admit_delete(
        self,
        target: RequestTarget,
        name: str,
        query: Mapping[str, str],
        options: Json,
        warnings: list[str],
    ) -> Json:
        """Admit the deletion of an object, and return the object."""
        old = to_version(target.kind, self.store.read(target.kind.table, target.namespace, name))
        request = self._attributes(
            "DELETE", replace(target, name=name), query, None, old=old, body=options
        )
        request = await self.chain.mutate(request, warnings, complete=_nothing, admit=_nothing)
        await self.chain.validate(request, warnings)
        return old

    async def admit_body(
        self, target: RequestTarget, body: Json, query: Mapping[str, str], warnings: list[str]
    ) -> Json:
        """Return the body of a Binding, an Eviction or a TokenRequest after admission."""
        request = self._attributes("CREATE", target, query, body, body=body.get("deleteOptions"))
        request = await self.chain.mutate(request, warnings, complete=_nothing, admit=_nothing)
        await self.chain.validate(request, warnings)
        return request.obj or body

    async def admit_connect(self, target: RequestTarget, options: Json) -> None:
        """Admit a command in a pod."""
        body = {"kind": _BODIES[target.subresource]["kind"], "apiVersion": "v1", **options}
        request = replace(self._attributes("CONNECT", target, {}, body), options={})
        request = await self.chain.mutate(request, [], complete=_nothing, admit=_nothing)
        await self.chain.validate(request, [])

    def _attributes(
        self,
        operation: str,
        target: RequestTarget,
        query: Mapping[str, str],
        obj: Json | None,
        *,
        old: Json | None = None,
        body: Json | None = None,
    ) -> AdmissionAttributes:
        dry = is_dry_run(query, body)
        options: Json = {"kind": _OPTIONS.get(operation, ""), "apiVersion": "meta.k8s.io/v1"}
        options |= {
            key: query[key] for key in ("fieldManager", "fieldValidation") if query.get(key)
        }
        if dry:
            options["dryRun"] = ["All"]
        return AdmissionAttributes(
            operation=operation,
            kind=target.kind,
            body_kind=_BODIES.get(target.subresource) or group_version_kind(target.kind),
            subresource=target.subresource,
            namespace=_namespace(target.kind, target),
            name=target.name,
            obj=obj,
            old_obj=old,
            options=options,
            dry_run=dry,
            user=self.user,
        )


def _namespace(kind: Resource, target: RequestTarget) -> str:
    """Return the request's namespace; a namespace object counts as being in itself."""
    return target.name if kind.table == "namespaces" else target.namespace


def _nothing(_obj: Json) -> None:
    """Change nothing: neither defaults nor built-in admission apply."""

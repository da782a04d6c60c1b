"""The admission chain: mutating webhooks in turn, policies, then all validating webhooks."""

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, deep_copy, metadata, name_of
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.admission.policies import BoundPolicies
from simcluster.apiserver.admission.review import (
    AdmissionResponse,
    WebhookCallError,
    admission_review,
    apply_webhook_patch,
    call_failed_error,
    denied_error,
    dry_run_error,
    parse_review,
)
from simcluster.apiserver.admission.rules import (
    AdmissionAttributes,
    expression_variables,
    matching_version,
    selectors_match,
)
from simcluster.apiserver.admission.webhook_client import WebhookClient
from simcluster.apiserver.cel import ExpressionError, conditions_hold
from simcluster.apiserver.rbac import RoleIndex
from simcluster.apiserver.storage.records import ObjectChange
from simcluster.apiserver.storage.store import ObjectStore

log = logging.getLogger(__name__)

MUTATING = "mutatingwebhookconfigurations"
VALIDATING = "validatingwebhookconfigurations"
Completion = Callable[[Json], None]


@dataclass(frozen=True, slots=True)
class RegisteredWebhook:
    """One webhook of one configuration."""

    spec: Json
    mutating: bool

    @property
    def name(self) -> str:
        """The webhook's name, which every message contains."""
        return str(self.spec["name"])


class AdmissionChain:
    """Calls the webhooks and evaluates the policies that match a request."""

    def __init__(self, store: ObjectStore, roles: RoleIndex) -> None:
        self._store = store
        self._roles = roles
        self.client = WebhookClient(store)
        self._policies = BoundPolicies(store)
        self._hooks: dict[str, list[RegisteredWebhook]] = {MUTATING: [], VALIDATING: []}
        store.listeners.append(self._on_change)
        for table in self._hooks:
            self._load(table)

    @property
    def is_idle(self) -> bool:
        """True while there is no webhook and no bound policy."""
        return self._policies.is_idle and not any(self._hooks.values())

    def intercepts(self, kind: Resource, operation: str, subresource: str, namespace: str) -> bool:
        """Return whether a rule of any webhook or policy may match such a request."""
        if self.is_idle:
            return False
        request = AdmissionAttributes(
            operation=operation,
            kind=kind,
            body_kind={},
            options={},
            subresource=subresource,
            namespace=namespace,
        )
        versions = self._store.kinds.versions(kind.table)
        rules = [hook.spec.get("rules") or () for hooks in self._hooks.values() for hook in hooks]
        rules += self._policies.rules()
        return any(
            matching_version(rule, request, versions, exact=False) is not None for rule in rules
        )

    def _on_change(self, kind: Resource, _change: ObjectChange) -> None:
        if kind.table in self._hooks:
            self._load(kind.table)

    def _load(self, table: str) -> None:
        """Load the configurations in the order of their names, which is the order of calls."""
        configs = sorted(self._store.list(table), key=name_of)
        self._hooks[table] = [
            RegisteredWebhook(spec, table == MUTATING)
            for config in configs
            for spec in config.get("webhooks") or ()
        ]

    async def mutate(
        self,
        request: AdmissionAttributes,
        warnings: list[str],
        *,
        complete: Completion,
        admit: Completion,
    ) -> AdmissionAttributes:
        """Call the mutating webhooks, then reinvoke those whose `reinvocationPolicy` requires it.

        `complete` sets defaults after each change. `admit` repeats the built-in admission, which
        refuses changes that contradict it.
        """
        if request.is_exempt:
            return request
        original = request.obj
        reinvocable: list[RegisteredWebhook] = []
        to_reinvoke: list[RegisteredWebhook] = []
        for hook in self._hooks[MUTATING]:
            before = request.obj
            kind = self._matched_version(hook, request)
            if kind is None:
                continue
            request = await self._mutate_by(hook, kind, request, warnings, complete)
            if request.obj != before:
                to_reinvoke = list(reinvocable)
            if hook.spec.get("reinvocationPolicy") == "IfNeeded":
                reinvocable.append(hook)
        if request.obj == original or request.obj is None:
            return request
        readmitted = deep_copy(request.obj)
        admit(readmitted)
        if readmitted != request.obj:
            request, to_reinvoke = replace(request, obj=readmitted), reinvocable
        for hook in to_reinvoke:
            kind = self._matched_version(hook, request)
            if kind is not None:
                request = await self._mutate_by(hook, kind, request, warnings, complete)
        return request

    async def validate(self, request: AdmissionAttributes, warnings: list[str]) -> None:
        """Evaluate the policies, then call all validating webhooks; raise the first refusal."""
        if request.is_exempt:
            return
        self._policies.validate(request, warnings)
        matched = [(hook, self._matched_version(hook, request)) for hook in self._hooks[VALIDATING]]
        calls = [
            self._refusal(hook, kind, request, warnings)
            for hook, kind in matched
            if kind is not None
        ]
        for refusal in await asyncio.gather(*calls):
            if refusal is not None:
                raise refusal

    async def _refusal(
        self,
        hook: RegisteredWebhook,
        kind: Resource,
        request: AdmissionAttributes,
        warnings: list[str],
    ) -> ApiError | None:
        try:
            await self._call(hook, kind, request, warnings)
        except ApiError as refusal:
            return refusal
        return None

    async def _mutate_by(
        self,
        hook: RegisteredWebhook,
        kind: Resource,
        request: AdmissionAttributes,
        warnings: list[str],
        complete: Completion,
    ) -> AdmissionAttributes:
        response = await self._call(hook, kind, request, warnings)
        if response is None or not response.patch:
            return request
        changed = apply_webhook_patch(request, kind, hook.name, response.patch)
        if changed.obj is not None:
            complete(changed.obj)
        return changed

    async def _call(
        self,
        hook: RegisteredWebhook,
        kind: Resource,
        request: AdmissionAttributes,
        warnings: list[str],
    ) -> AdmissionResponse | None:
        """Return a webhook's response; None if the call failed and `failurePolicy` is `Ignore`.

        Raises an `ApiError` if the webhook denies the request.
        """
        if request.dry_run and hook.spec.get("sideEffects") not in {"None", "NoneOnDryRun"}:
            raise dry_run_error(hook.name)
        uid = str(uuid.uuid4())
        try:
            body = await self.client.post(
                hook.spec["clientConfig"],
                admission_review(request, kind, uid=uid),
                timeout_s=int(hook.spec.get("timeoutSeconds") or 10),
            )
            response = parse_review(body, uid=uid, mutating=hook.mutating)
        except WebhookCallError as error:
            if hook.spec.get("failurePolicy") != "Ignore":
                raise call_failed_error(hook.name, str(error)) from error
            log.warning("failed calling webhook, failing open %s: %s", hook.name, error)
            return None
        warnings += response.warnings
        if not response.allowed:
            raise denied_error(hook.name, response.status)
        return response

    def _matched_version(
        self, hook: RegisteredWebhook, request: AdmissionAttributes
    ) -> Resource | None:
        """Return the version in which a webhook receives the request; None if it does not match."""
        kind = matching_version(
            hook.spec.get("rules") or (),
            request,
            self._store.kinds.versions(request.kind.table),
            exact=hook.spec.get("matchPolicy") == "Exact",
        )
        if kind is None or not selectors_match(hook.spec, request, self.namespace_labels):
            return None
        conditions = hook.spec.get("matchConditions") or ()
        variables = expression_variables(request, kind)
        if any("authorizer" in condition["expression"] for condition in conditions):
            rules = self._roles.rules_of(request.user, request.namespace)
            variables["authorizer"] = {"rules": list(rules)}
        try:
            matches = conditions_hold(conditions, variables)
        except ExpressionError as error:
            if hook.spec.get("failurePolicy") == "Ignore":
                return None
            name = request.name or (name_of(request.obj) if request.obj else "")
            raise ApiError.forbidden(request.kind.qualified, name, str(error)) from error
        return kind if matches else None

    def namespace_labels(self, name: str) -> Json | None:
        """Return a namespace's labels; None if it does not exist."""
        record = self._store.find("namespaces", None, name)
        return None if record is None else metadata(record.obj).get("labels")

"""ValidatingAdmissionPolicies: deny or warn by CEL expressions.

Differences from Kubernetes: there is no `authorizer`, and audit annotations are dropped, because
there is no audit log.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, at_path, metadata, name_of
from simcluster.apimachinery.resources import Resource
from simcluster.apimachinery.selectors import selector_requirements
from simcluster.apiserver.admission.rules import (
    AdmissionAttributes,
    expression_variables,
    matching_version,
    selectors_match,
)
from simcluster.apiserver.cel import ExpressionError, compile_expression, conditions_hold
from simcluster.apiserver.storage.records import ObjectChange
from simcluster.apiserver.storage.store import ObjectStore

POLICIES = "validatingadmissionpolicies"
BINDINGS = "validatingadmissionpolicybindings"
_CODES = {"Unauthorized": 401, "Forbidden": 403, "RequestEntityTooLarge": 413, "Invalid": 422}


@dataclass(frozen=True, slots=True)
class PolicyDenial:
    """Why a policy denies a request."""

    message: str
    reason: str = "Invalid"


class BoundPolicies:
    """All policies that have a binding."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._bound: list[tuple[Json, list[Json]]] = []
        store.listeners.append(self._on_change)
        self._load()

    @property
    def is_idle(self) -> bool:
        """True while no policy is bound."""
        return not self._bound

    def rules(self) -> list[Sequence[Json]]:
        """Return the rules of each bound policy, without their `resourceNames`."""
        return [
            [{**rule, "resourceNames": []} for rule in _rules(policy)] for policy, _ in self._bound
        ]

    def _on_change(self, kind: Resource, _change: ObjectChange) -> None:
        if kind.table in {POLICIES, BINDINGS}:
            self._load()

    def _load(self) -> None:
        bindings = self._store.list(BINDINGS)
        pairs = (
            (policy, [b for b in bindings if at_path(b, "spec.policyName") == name_of(policy)])
            for policy in self._store.list(POLICIES)
        )
        self._bound = [(policy, bound) for policy, bound in pairs if bound]

    def validate(self, request: AdmissionAttributes, warnings: list[str]) -> None:
        """Raise the first denial; append what bindings only warn of to `warnings`."""
        denied: list[tuple[str, PolicyDenial]] = []
        for policy, bindings in self._bound:
            kind = self._matched_version(policy["spec"].get("matchConstraints") or {}, request)
            if kind is None:
                continue
            for binding in bindings:
                limits = binding["spec"].get("matchResources")
                if limits and self._matched_version(limits, request, everything=True) is None:
                    continue
                binding_text = f"ValidatingAdmissionPolicy '{name_of(policy)}' with binding "
                binding_text += f"'{name_of(binding)}'"
                actions = binding["spec"].get("validationActions") or ()
                for denial in self._denials(policy, binding, request, kind):
                    if "Warn" in actions:
                        warnings.append(f"Validation failed for {binding_text}: {denial.message}")
                    if "Deny" in actions:
                        denied.append((binding_text, denial))
        if denied:
            raise _refusal(request, *denied[0])

    def _matched_version(
        self, match: Json, request: AdmissionAttributes, *, everything: bool = False
    ) -> Resource | None:
        """Return the version in which rules and selectors match a request; None if they do not.

        With `everything`, an empty list of rules matches all requests, as in bindings.
        """
        versions = self._store.kinds.versions(request.kind.table)
        exact = match.get("matchPolicy") == "Exact"
        rules = match.get("resourceRules") or ()
        excluded = match.get("excludeResourceRules") or ()
        if matching_version(excluded, request, versions, exact=exact) is not None:
            return None
        kind = matching_version(rules, request, versions, exact=exact)
        if kind is None and everything and not rules:
            kind = request.kind
        return kind if kind and selectors_match(match, request, self._labels) else None

    def _labels(self, namespace: str) -> Json | None:
        record = self._store.find("namespaces", None, namespace)
        return None if record is None else metadata(record.obj).get("labels")

    def _denials(
        self, policy: Json, binding: Json, request: AdmissionAttributes, kind: Resource
    ) -> Iterator[PolicyDenial]:
        spec = policy["spec"]
        variables = expression_variables(request, kind)
        namespace = None
        if request.namespace and request.kind.table != "namespaces":
            namespace = self._store.find("namespaces", None, request.namespace)
        variables["namespaceObject"] = None if namespace is None else namespace.obj
        strict = spec.get("failurePolicy") != "Ignore"
        try:
            params = self._params(spec, binding["spec"], request)
        except LookupError as error:
            if strict:
                yield PolicyDenial(f"failed to configure binding: {error.args[0]}")
            return
        for param in params:
            for denial, is_error in _violations(spec, {**variables, "params": param}):
                if strict or not is_error:
                    yield denial

    def _params(
        self, spec: Json, bound: Json, request: AdmissionAttributes
    ) -> Sequence[Json | None]:
        """Return the parameter objects of a policy; one None if the policy takes none."""
        wanted = spec.get("paramKind")
        ref = bound.get("paramRef")
        if not wanted or not ref:
            return [None]
        type_of = (wanted.get("apiVersion"), wanted.get("kind"))
        kind = next((k for k in self._store.kinds if (k.api_version, k.kind) == type_of), None)
        if kind is None:
            raise LookupError(f"paramKind {wanted.get('kind')} is not known")
        namespace = (ref.get("namespace") or request.namespace) if kind.namespaced else None
        params = self._find_params(kind, namespace, ref)
        if not params and ref.get("parameterNotFoundAction") != "Allow":
            raise LookupError(
                "no params found for policy binding with `Deny` parameterNotFoundAction"
            )
        return params

    def _find_params(self, kind: Resource, namespace: str | None, ref: Json) -> list[Json]:
        """Return the objects that a `paramRef` names or selects."""
        if ref.get("name"):
            record = self._store.find(kind.table, namespace, ref["name"])
            return [] if record is None else [record.obj]
        terms = selector_requirements(ref.get("selector") or {})
        return [
            obj
            for obj in self._store.list(kind.table, namespace)
            if all(term(metadata(obj).get("labels") or {}) for term in terms)
        ]


def _rules(policy: Json) -> Sequence[Json]:
    return at_path(policy, "spec.matchConstraints.resourceRules") or ()


def _violations(spec: Json, variables: Json) -> Iterator[tuple[PolicyDenial, bool]]:
    """Yield a denial for each failed validation, and whether an error in it is the reason."""
    try:
        if not conditions_hold(spec.get("matchConditions") or (), variables):
            return
    except ExpressionError as error:
        yield PolicyDenial(str(error)), True
        return
    variables = {**variables, "variables": _variables(spec.get("variables") or (), variables)}
    for validation in spec.get("validations") or ():
        expression = validation["expression"]
        try:
            if compile_expression(expression).evaluate(variables) is True:
                continue
        except ExpressionError as error:
            yield PolicyDenial(f"expression '{expression}' resulted in error: {error}"), True
            continue
        yield (
            PolicyDenial(_message(validation, variables), validation.get("reason") or "Invalid"),
            False,
        )


def _variables(described: Sequence[Json], variables: Json) -> Json:
    """Evaluate a policy's variables; one that fails is missing for the expressions that use it."""
    found: Json = {}
    for variable in described:
        try:
            found[variable["name"]] = compile_expression(variable["expression"]).evaluate(
                {**variables, "variables": found}
            )
        except ExpressionError:
            continue
    return found


def _message(validation: Json, variables: Mapping[str, object]) -> str:
    message: object = ""
    if validation.get("messageExpression"):
        try:
            message = compile_expression(validation["messageExpression"]).evaluate(variables)
        except ExpressionError:
            message = ""
    text = message.strip() if isinstance(message, str) and "\n" not in message else ""
    plain = str(validation.get("message") or "").strip()
    return text or plain or f"failed expression: {validation['expression'].strip()}"


def _refusal(request: AdmissionAttributes, binding_text: str, denial: PolicyDenial) -> ApiError:
    text = f"{binding_text} denied request: {denial.message}"
    name = request.name or (name_of(request.obj) if request.obj else "")
    refused = ApiError.forbidden(request.kind.qualified, name, text)
    refused.reason = denial.reason
    refused.code = _CODES.get(denial.reason, 422)
    refused.details = {**(refused.details or {}), "causes": [{"message": text}]}
    return refused

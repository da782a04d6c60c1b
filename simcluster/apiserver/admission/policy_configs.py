"""ValidatingAdmissionPolicies and their bindings: defaults and validation."""

from collections.abc import Iterator

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.names import metadata_causes
from simcluster.apimachinery.objects import Json, at_path, json_text
from simcluster.apiserver.admission.webhook_configs import rule_causes
from simcluster.apiserver.cel import condition_causes, expression_causes
from simcluster.apiserver.storage.strategy import KindStrategy, ObjectLookup

_ACTIONS = ("Audit", "Deny", "Warn")
_REASONS = ("Forbidden", "Invalid", "RequestEntityTooLarge", "Unauthorized")


def _required(field: str, text: str = "") -> Cause:
    return Cause("FieldValueRequired", f"Required value: {text}".removesuffix(": "), field)


def _unsupported(field: str, value: object, allowed: tuple[str, ...]) -> Cause:
    listed = ", ".join(f'"{value}"' for value in allowed)
    text = f"Unsupported value: {json_text(value)}: supported values: {listed}"
    return Cause("FieldValueNotSupported", text, field)


def _complete_match(match: object) -> None:
    if isinstance(match, dict):
        match.setdefault("matchPolicy", "Equivalent")
        match.setdefault("namespaceSelector", {})
        match.setdefault("objectSelector", {})
        for field in ("resourceRules", "excludeResourceRules"):
            for rule in match.get(field) or ():
                rule.setdefault("scope", "*")


class AdmissionPolicyStrategy(KindStrategy):
    """The strategy of policies; a policy has no effect until it is bound."""

    has_generation = True

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Fail closed and match equivalent versions by default."""
        spec = obj.get("spec")
        if not isinstance(spec, dict):
            raise ApiError.bad_request("a ValidatingAdmissionPolicy must have a spec")
        spec.setdefault("failurePolicy", "Fail")
        _complete_match(spec.get("matchConstraints"))

    def validate(self, obj: Json) -> list[Cause]:
        """Validate rules and expressions."""
        return [*metadata_causes(obj), *_policy_causes(obj["spec"])]


def _policy_causes(spec: Json) -> Iterator[Cause]:
    rules = at_path(spec, "matchConstraints.resourceRules") or ()
    if not rules:
        yield _required("spec.matchConstraints.resourceRules")
    yield from rule_causes(rules, "spec.matchConstraints.resourceRules")
    yield from condition_causes(spec.get("matchConditions") or (), "spec.matchConditions")
    yield from condition_causes(spec.get("variables") or (), "spec.variables")
    if not spec.get("validations") and not spec.get("auditAnnotations"):
        text = "validations or auditAnnotations must contain at least one item"
        yield _required("spec.validations", text)
    for at, validation in enumerate(spec.get("validations") or ()):
        path = f"spec.validations[{at}]"
        yield from expression_causes(validation.get("expression"), f"{path}.expression")
        if validation.get("messageExpression"):
            where = f"{path}.messageExpression"
            yield from expression_causes(validation["messageExpression"], where)
        if validation.get("reason") and validation["reason"] not in _REASONS:
            yield _unsupported(f"{path}.reason", validation["reason"], _REASONS)


class PolicyBindingStrategy(KindStrategy):
    """The strategy of bindings: where a policy applies, and what a violation causes."""

    has_generation = True

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Match equivalent versions by default."""
        if not isinstance(obj.get("spec"), dict):
            raise ApiError.bad_request("a ValidatingAdmissionPolicyBinding must have a spec")
        _complete_match(obj["spec"].get("matchResources"))

    def validate(self, obj: Json) -> list[Cause]:
        """Require a policy and valid actions."""
        spec = obj["spec"]
        causes = metadata_causes(obj)
        if not spec.get("policyName"):
            causes.append(_required("spec.policyName"))
        actions = spec.get("validationActions") or []
        if not actions:
            causes.append(_required("spec.validationActions"))
        causes += [
            _unsupported("spec.validationActions", action, _ACTIONS)
            for action in actions
            if action not in _ACTIONS
        ]
        if "Deny" in actions and "Warn" in actions:
            text = "Invalid value: Deny and Warn must not be used together"
            causes.append(Cause("FieldValueInvalid", text, "spec.validationActions"))
        ref = spec.get("paramRef")
        if ref and bool(ref.get("name")) == ("selector" in ref):
            causes.append(_required("spec.paramRef", "one of name or selector must be specified"))
        return causes

"""The strategy of custom objects: pruning, defaults and validation by their schema."""

from collections.abc import Iterator

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.names import metadata_causes
from simcluster.apimachinery.objects import Json, JsonValue, json_text, metadata
from simcluster.apiserver.cel import ExpressionError, compile_expression
from simcluster.apiserver.crd.custom_kinds import CustomKind
from simcluster.apiserver.crd.schema_check import ABSENT, children, schema_violations
from simcluster.apiserver.crd.schema_shape import RULES, fill_defaults, prune
from simcluster.apiserver.storage.strategy import KindStrategy, ObjectLookup

_REASONS = {
    "FieldValueForbidden": "Forbidden",
    "FieldValueRequired": "Required value",
    "FieldValueDuplicate": "Duplicate value",
}


def rule_violations(
    schema: Json, value: JsonValue, path: str = "", old: JsonValue = ABSENT
) -> Iterator[Cause]:
    """Evaluate the rules on a value and all below it, except where it equals `old`."""
    if value is None or (old is not ABSENT and old == value):
        return
    for rule in schema.get(RULES) or ():
        yield from _evaluate(rule, schema, value, path, old)
    for child in children(schema, value, path, old):
        yield from rule_violations(*child)


def _evaluate(
    rule: Json, schema: Json, value: JsonValue, path: str, old: JsonValue
) -> Iterator[Cause]:
    expression = compile_expression(rule["rule"])
    variables = {"self": value}
    if "oldSelf" in expression.variables:
        if old is ABSENT:
            return
        variables["oldSelf"] = old
    where = path + str(rule.get("fieldPath") or "") if path else str(
        rule.get("fieldPath") or "").removeprefix(".")  # fmt: skip
    try:
        if expression.evaluate(variables) is True:
            return
        detail = _detail(rule, variables)
    except ExpressionError as error:
        detail = f"{error} evaluating rule: {rule.get('message') or rule['rule']}"
    reason = rule.get("reason") or "FieldValueInvalid"
    text = _REASONS.get(reason, "Invalid value")
    if reason == "FieldValueInvalid" and schema.get("type") not in {"object", "array"}:
        text = f"{text}: {json_text(value)}"
    yield Cause(reason, f"{text}: {detail}", where or "<nil>")


def _detail(rule: Json, variables: Json) -> str:
    if rule.get("messageExpression"):
        try:
            message = compile_expression(rule["messageExpression"]).evaluate(variables)
        except ExpressionError:
            message = ""
        if isinstance(message, str) and message.strip() and "\n" not in message:
            return message.strip()
    return str(rule.get("message") or "").strip() or f"failed rule: {rule['rule'].strip()}"


_TYPE_AND_METADATA = frozenset({"apiVersion", "kind", "metadata"})
_BLOCKING = frozenset(
    {
        "FieldValueNotSupported",
        "FieldValueRequired",
        "FieldValueTooLong",
        "FieldValueTooMany",
        "FieldValueTypeInvalid",
    }
)
"""After other causes, such as a number above its maximum, the rules are evaluated as well."""
_UNEVALUATED = Cause(
    "FieldValueInvalid",
    "Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation",
    "<nil>",
)


class CustomObjectStrategy(KindStrategy):
    """Writes the objects of one custom kind in one version."""

    has_generation = True

    def __init__(self, kind: CustomKind) -> None:
        self.kind = kind

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Drop the status if it is a subresource; 405 while the definition is terminating."""
        definition = cluster.find("customresourcedefinitions", None, self.kind.table)
        if definition is None or metadata(definition.obj).get("deletionTimestamp"):
            text = "create not allowed while custom resource definition is terminating"
            raise ApiError(405, "MethodNotAllowed", text)
        if self.kind.has_status:
            obj.pop("status", None)

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Drop fields that the schema does not specify and set its defaults."""
        prune(self.kind.schema, obj)
        fill_defaults(self.kind.schema, obj)

    def validate(self, obj: Json) -> list[Cause]:
        """Validate metadata, and the object by its schema."""
        return self._causes(obj, ABSENT)

    def validate_update(self, new: Json, old: Json) -> list[Cause]:
        """Validate what has changed: invalid values that stay the same are allowed."""
        return self._causes(new, old)

    def validate_subresource_update(self, new: Json, old: Json) -> list[Cause]:
        """Validate the status by the schema, and the object by the rules."""
        status = (self.kind.schema.get("properties") or {}).get("status")
        if "status" not in new or not isinstance(status, dict):
            return []
        prune({"properties": {"status": status}}, {"status": new["status"]})
        fill_defaults(status, new["status"])
        before = old.get("status", ABSENT)
        causes = list(schema_violations(status, new["status"], "status", before))
        return self._with_rules(causes, new, old)

    def changes_generation(self, new: Json, old: Json) -> bool:
        """All fields count but metadata, and the status if it is a subresource."""
        excluded = _TYPE_AND_METADATA | ({"status"} if self.kind.has_status else frozenset())
        return {k: v for k, v in new.items() if k not in excluded} != {
            k: v for k, v in old.items() if k not in excluded
        }

    def _causes(self, obj: Json, old: Json) -> list[Cause]:
        """Validate metadata, then by the schema all but apiVersion, kind and metadata."""
        schema = self.kind.schema
        own = {key: value for key, value in (schema.get("properties") or {}).items()
               if key not in _TYPE_AND_METADATA}  # fmt: skip
        causes = metadata_causes(obj)
        causes += schema_violations({**schema, "properties": own}, obj, "", old)
        return self._with_rules(causes, obj, old)

    def _with_rules(self, causes: list[Cause], obj: Json, old: Json) -> list[Cause]:
        if not self.kind.rules:
            return causes
        if any(cause.reason in _BLOCKING for cause in causes):
            return [*causes, _UNEVALUATED]
        return [*causes, *rule_violations(self.kind.schema, obj, "", old)]

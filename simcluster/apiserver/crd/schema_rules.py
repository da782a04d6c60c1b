"""The CEL rules of a schema, `x-kubernetes-validations`."""

from collections.abc import Iterator

from simcluster.apimachinery.errors import Cause
from simcluster.apimachinery.objects import Json, JsonValue, json_text
from simcluster.apiserver.cel import ExpressionError, compile_expression
from simcluster.apiserver.crd.schema_check import ABSENT, children
from simcluster.apiserver.crd.schema_shape import RULES

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
    yield Cause(reason, f"{text}: {detail}", where)


def _detail(rule: Json, variables: Json) -> str:
    if rule.get("messageExpression"):
        try:
            message = compile_expression(rule["messageExpression"]).evaluate(variables)
        except ExpressionError:
            message = ""
        if isinstance(message, str) and message.strip() and "\n" not in message:
            return message.strip()
    return str(rule.get("message") or "").strip() or f"failed rule: {rule['rule'].strip()}"

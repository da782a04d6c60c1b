"""The rules a schema adds in CEL, `x-kubernetes-validations`: what they say of a value."""

from collections.abc import Iterator
from typing import Any

from simcluster.apimachinery.errors import Cause
from simcluster.apimachinery.objects import Json, json_text
from simcluster.apiserver.cel import ExpressionError, compile_expression
from simcluster.apiserver.crd.schema_check import ABSENT, child_path, old_item_finder

RULES = "x-kubernetes-validations"
_REASONS = {
    "FieldValueForbidden": "Forbidden",
    "FieldValueRequired": "Required value",
    "FieldValueDuplicate": "Duplicate value",
}


def has_rules(schema: Any) -> bool:
    """Tell whether a schema has rules anywhere."""
    if isinstance(schema, dict):
        return RULES in schema or any(has_rules(below) for below in schema.values())
    return isinstance(schema, list) and any(has_rules(below) for below in schema)


def rule_violations(schema: Json, value: Any, path: str = "", old: Any = ABSENT) -> Iterator[Cause]:
    """Evaluate the rules on a value and all below it; what has not changed since is let be."""
    if value is None or (old is not ABSENT and old == value):
        return
    for rule in schema.get(RULES) or ():
        yield from _evaluate(rule, schema, value, path, old)
    if isinstance(value, dict):
        properties, others = schema.get("properties") or {}, schema.get("additionalProperties")
        before = old if isinstance(old, dict) else {}
        for key, item in value.items():
            below = properties.get(key, others)
            if isinstance(below, dict):
                was = before.get(key, ABSENT)
                yield from rule_violations(below, item, child_path(path, key), was)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        partner = old_item_finder(schema, old)
        for at, item in enumerate(value):
            yield from rule_violations(schema["items"], item, f"{path}[{at}]", partner(item))


def _evaluate(rule: Json, schema: Json, value: Any, path: str, old: Any) -> Iterator[Cause]:
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
    words = _REASONS.get(reason, "Invalid value")
    if reason == "FieldValueInvalid" and schema.get("type") not in {"object", "array"}:
        words = f"{words}: {json_text(value)}"
    yield Cause(reason, f"{words}: {detail}", where)


def _detail(rule: Json, variables: Json) -> str:
    if rule.get("messageExpression"):
        try:
            said = compile_expression(rule["messageExpression"]).evaluate(variables)
        except ExpressionError:
            said = ""
        if isinstance(said, str) and said.strip() and "\n" not in said:
            return said.strip()
    return str(rule.get("message") or "").strip() or f"failed rule: {rule['rule'].strip()}"

"""What is wrong with the expressions of webhooks, policies and schemas."""

from collections.abc import Iterator
from typing import Any

from simcluster.apiserver.admission.cel import ExpressionError, compiled
from simcluster.apiserver.crd.schema_check import shown
from simcluster.apiserver.http.errors import Cause
from simcluster.apiserver.storage.names import is_qualified


def condition_causes(conditions: Any, path: str) -> Iterator[Cause]:
    """Check that conditions have names and compile."""
    for at, condition in enumerate(conditions):
        if not is_qualified(str(condition.get("name") or "")):
            yield Cause("FieldValueRequired", "Required value", f"{path}[{at}].name")
        yield from expression_causes(condition.get("expression"), f"{path}[{at}].expression")


def expression_causes(text: object, path: str) -> Iterator[Cause]:
    """Check that an expression is there and compiles."""
    if not isinstance(text, str) or not text.strip():
        yield Cause("FieldValueRequired", "Required value", path)
        return
    try:
        compiled(text)
    except ExpressionError as error:
        yield Cause("FieldValueInvalid", f"Invalid value: {shown(text)}: {error}", path)

"""What is wrong with a PodDisruptionBudget."""

import re
from collections.abc import Iterator

from simcluster.apiserver.http.errors import ApiError, Cause
from simcluster.apiserver.storage.objects import Json
from simcluster.apiserver.storage.selectors import object_requirements

_PERCENT = re.compile(r"\d{1,3}%")


def budget_causes(budget: Json) -> Iterator[Cause]:
    """Check the amounts and the selector."""
    spec = budget.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    amounts = {
        field: spec[field]
        for field in ("minAvailable", "maxUnavailable")
        if spec.get(field) is not None
    }
    if len(amounts) > 1:
        text = "Invalid value: minAvailable and maxUnavailable cannot be both set"
        yield Cause("FieldValueInvalid", text, "spec")
    for field, amount in amounts.items():
        whole = isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0
        if not whole and not (isinstance(amount, str) and _PERCENT.fullmatch(amount)):
            text = f"Invalid value: {amount!r}: must be a whole number or a percentage"
            yield Cause("FieldValueInvalid", text, f"spec.{field}")
    try:
        object_requirements(spec.get("selector"))
    except (ApiError, AttributeError, KeyError, TypeError) as error:
        text = f"Invalid value: not a label selector: {error}"
        yield Cause("FieldValueInvalid", text, "spec.selector")

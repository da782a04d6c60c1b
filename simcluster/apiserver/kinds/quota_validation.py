"""What is wrong with a ResourceQuota."""

from collections.abc import Iterator

from shared.model.errors import RequestError
from simcluster.apiserver.crd.schema_check import shown
from simcluster.apiserver.http.errors import Cause
from simcluster.apiserver.kinds.quantities import quantity
from simcluster.apiserver.kinds.quota_usage import SCOPES
from simcluster.apiserver.storage.names import is_qualified
from simcluster.apiserver.storage.objects import Json, at_path

_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
_SCOPES = (*SCOPES, "PriorityClass")


def quota_causes(quota: Json) -> Iterator[Cause]:
    """Check names, amounts and scopes."""
    for name, amount in (at_path(quota, "spec.hard") or {}).items():
        where = f"spec.hard[{name}]"
        if not is_qualified(name.removeprefix("requests.").removeprefix("limits.")):
            text = f"Invalid value: {shown(name)}: not a qualified name"
            yield Cause("FieldValueInvalid", text, where)
        try:
            negative = quantity(amount).value < 0
        except RequestError as error:
            yield Cause("FieldValueInvalid", f"Invalid value: {shown(amount)}: {error}", where)
        else:
            if negative:
                text = f"Invalid value: {shown(amount)}: must be greater than or equal to 0"
                yield Cause("FieldValueInvalid", text, where)
    scopes = [(name, "Exists") for name in at_path(quota, "spec.scopes") or ()]
    expressions = at_path(quota, "spec.scopeSelector.matchExpressions") or ()
    for scope, operator in [
        *scopes,
        *((e.get("scopeName"), e.get("operator")) for e in expressions),
    ]:
        if scope not in _SCOPES:
            text = f"Invalid value: {shown(scope)}: unsupported scope"
            yield Cause("FieldValueInvalid", text, "spec.scopes")
        elif operator not in _OPERATORS or (scope in SCOPES and operator != "Exists"):
            text = f"Invalid value: {shown(operator)}: must be 'Exist' when scope is {scope}"
            yield Cause("FieldValueInvalid", text, "spec.scopeSelector.matchExpressions")

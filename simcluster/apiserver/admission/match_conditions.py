"""What expressions of webhooks and policies speak of, and whether conditions hold."""

from collections.abc import Iterable

from simcluster.apiserver.admission.cel import ExpressionError, compiled
from simcluster.apiserver.admission.rules import Attributes, in_version, request_of
from simcluster.apiserver.kinds.resources import Resource
from simcluster.apiserver.storage.objects import Json


def variables_of(request: Attributes, kind: Resource) -> Json:
    """Return the object, the old object and the request, as a version of the kind shows them."""
    obj, old = in_version(request, kind)
    described = request_of(request, kind, uid="")
    return {"object": obj, "oldObject": old, "request": described}


def holds(conditions: Iterable[Json], variables: Json) -> bool:
    """Tell whether all conditions hold; one that is false decides, whatever else cannot be told.

    Raises `ExpressionError` where none is false and some cannot be told.
    """
    errors: list[str] = []
    for condition in conditions:
        try:
            if compiled(condition["expression"]).evaluate(variables) is False:
                return False
        except ExpressionError as error:
            errors.append(f"expression '{condition['expression']}' resulted in error: {error}")
    if errors:
        raise ExpressionError(errors[0] if len(errors) == 1 else f"[{', '.join(errors)}]")
    return True

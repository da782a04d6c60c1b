"""CEL expressions; the only module that imports the `cel` library.

The library comes with the extra `simulated` and takes 0.25 s to load, so it is imported when the
first expression is compiled. This module adds Kubernetes' quantities, list functions and the
checks of `authorizer`: of resources, in the namespace of the request. The
library does not know optional fields (`?.`) and `cel.bind`; expressions with them do not compile.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

from shared.model.errors import RequestError
from shared.model.quantity import parse_quantity
from simcluster.apimachinery.errors import Cause
from simcluster.apimachinery.names import is_qualified
from simcluster.apimachinery.objects import Json, JsonValue, json_text
from simcluster.apiserver.rbac_rules import ResourceAttributes, allows

log = logging.getLogger(__name__)

_QUANTITY = "quantity"
_MISSING = (
    "expressions need the package common-expression-language; "
    "install leasehold with its extra `embedded`"
)


class ExpressionError(Exception):
    """An expression does not compile, or its evaluation failed."""


class CelExpression:
    """A compiled expression, for any number of evaluations."""

    def __init__(self, text: str) -> None:
        try:
            import cel  # noqa: PLC0415  (slow to load, and not installed everywhere)
        except ImportError as error:
            raise ExpressionError(_MISSING) from error
        self.text = text
        self._context = cel.Context
        try:
            self._program = cel.compile(text)
        except ValueError as error:
            raise ExpressionError(f"compilation failed: {error}") from error

    @property
    def variables(self) -> frozenset[str]:
        """The names of the variables that it uses."""
        return frozenset(self._program.variables())

    def evaluate(self, variables: Mapping[str, JsonValue]) -> JsonValue:
        """Return the value; `ExpressionError` for missing fields and the like."""
        try:
            return self._program.execute(self._context(dict(variables), dict(_FUNCTIONS)))
        except KeyError as error:
            raise ExpressionError(f"no such key: {error.args[0]}") from error
        except (ValueError, TypeError, RuntimeError) as error:
            raise ExpressionError(str(error)) from error


@lru_cache(maxsize=1024)
def compile_expression(text: str) -> CelExpression:
    """Compile an expression; `ExpressionError` if it does not compile."""
    return CelExpression(text)


def matches_device(text: str, device: Json) -> bool:
    """Return whether an expression of a device selector matches; not if its evaluation fails."""
    try:
        return compile_expression(text).evaluate({"device": device}) is True
    except ExpressionError as error:
        log.info("%r of %s: %s", text, device.get("driver"), error)
        return False


def _amount(value: JsonValue) -> JsonValue:
    text = str(value[_QUANTITY] if isinstance(value, dict) else value)
    if text != text.strip():
        raise ValueError(f"unable to parse quantity {text!r}")
    try:
        return parse_quantity(text)
    except RequestError as error:
        raise ValueError(str(error)) from error


def _quantity(value: str) -> Json:
    _amount(value)
    return {_QUANTITY: value}


def _is_quantity(value: str) -> bool:
    try:
        _amount(value)
    except ValueError:
        return False
    return True


def _compare(left: Json, right: Json) -> int:
    a, b = _amount(left), _amount(right)
    return int(a > b) - int(a < b)


def _index_of(items: JsonValue, wanted: JsonValue) -> int:
    return items.find(wanted) if isinstance(items, str) else (
        items.index(wanted) if wanted in items else -1
    )  # fmt: skip


def _full_year(instant: datetime, zone: str = "UTC") -> int:
    """Return the year in a time zone, by its IANA name."""
    if zone not in available_timezones():
        raise ValueError(f"unknown time zone {zone}")
    return instant.astimezone(ZoneInfo(zone)).year


def _check(authorizer: Json, verb: str) -> bool:
    """Evaluate the last step of `authorizer.group(…).resource(…).check(verb)`."""
    names = filter(None, (authorizer["resource"], authorizer.get("subresource")))
    wanted = ResourceAttributes(
        verb, authorizer["group"], "/".join(names), name=authorizer.get("name", "")
    )
    return any(allows(rule, wanted) for rule in authorizer["rules"])


_FUNCTIONS: Mapping[str, Callable[..., JsonValue]] = {
    "quantity": _quantity,
    "isQuantity": _is_quantity,
    "isLessThan": lambda left, right: _compare(left, right) < 0,
    "isGreaterThan": lambda left, right: _compare(left, right) > 0,
    "compareTo": _compare,
    "asInteger": lambda value: int(_amount(value)),
    "isInteger": lambda value: _amount(value).denominator == 1,
    "split": lambda text, separator: text.split(separator),
    "join": lambda items, separator="": separator.join(items),
    "lowerAscii": str.lower,
    "upperAscii": str.upper,
    "trim": str.strip,
    "replace": lambda text, old, new: text.replace(old, new),
    "substring": lambda text, start, end=None: text[start:end],
    "indexOf": _index_of,
    "getFullYear": _full_year,
    "sum": sum,
    "min": lambda items: min(items),  # noqa: PLW0108  (the library counts arguments)
    "max": lambda items: max(items),  # noqa: PLW0108
    "isSorted": lambda items: items == sorted(items),
    "find": lambda text, pattern: ((m := re.search(pattern, text)) and m[0]) or "",
    "group": lambda authorizer, group: {**authorizer, "group": group},
    "resource": lambda authorizer, resource: {**authorizer, "resource": resource},
    "subresource": lambda authorizer, subresource: {**authorizer, "subresource": subresource},
    "namespace": lambda authorizer, _namespace: authorizer,
    "name": lambda authorizer, name: {**authorizer, "name": name},
    "check": _check,
    "allowed": lambda allowed: allowed,
    "findAll": lambda text, pattern: [m[0] for m in re.finditer(pattern, text)],
}


def condition_causes(conditions: JsonValue, path: str) -> Iterator[Cause]:
    """Require that conditions have names and compile."""
    for at, condition in enumerate(conditions):
        if not is_qualified(str(condition.get("name") or "")):
            yield Cause("FieldValueRequired", "Required value", f"{path}[{at}].name")
        yield from expression_causes(condition.get("expression"), f"{path}[{at}].expression")


def expression_causes(text: object, path: str) -> Iterator[Cause]:
    """Require an expression that compiles."""
    if not isinstance(text, str) or not text.strip():
        yield Cause("FieldValueRequired", "Required value", path)
        return
    try:
        compile_expression(text)
    except ExpressionError as error:
        yield Cause("FieldValueInvalid", f"Invalid value: {json_text(text)}: {error}", path)


def conditions_hold(conditions: Iterable[Json], variables: Json) -> bool:
    """Return whether all conditions are true; one that is false decides, whatever others raise.

    Raises `ExpressionError` if none is false and the evaluation of some failed.
    """
    errors: list[str] = []
    for condition in conditions:
        try:
            if compile_expression(condition["expression"]).evaluate(variables) is False:
                return False
        except ExpressionError as error:
            errors.append(f"expression '{condition['expression']}' resulted in error: {error}")
    if errors:
        raise ExpressionError(errors[0] if len(errors) == 1 else f"[{', '.join(errors)}]")
    return True

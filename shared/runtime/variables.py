"""The environment variables `LEASEHOLD_...`: defaults of arguments, and which there are."""

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from shared.model.errors import RequestError
from shared.runtime.setting_values import Bounds, parse_number, without_password
from shared.runtime.variable_names import NAMES

PREFIX = "LEASEHOLD_"


class VariableText(str):
    """The default of an argument that has a variable: the variable's text, or one without it."""

    __slots__ = ("is_set", "variable")
    variable: str
    is_set: bool
    """Whether the text is the variable's."""

    @classmethod
    def read(
        cls, variable: str, default: str = "", environ: Mapping[str, str] = os.environ
    ) -> "VariableText":
        """Return the variable's text, or the default."""
        text = cls(environ.get(variable, default))
        text.variable, text.is_set = variable, variable in environ
        return text


def argument_reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the `type` of an argument, whose value `read` parses or refuses with ValueError.

    An invalid variable raises RequestError with its name; argparse adds the name of a flag.
    """

    def parse(text: str) -> Any:
        try:
            return read(str(text))
        except ValueError as error:
            shown = f"{without_password(text)!r} {error}"
            if isinstance(text, VariableText) and text.is_set:
                raise RequestError(f"{text.variable}={shown}") from error
            raise argparse.ArgumentTypeError(shown) from error

    return parse


def argument_of(
    variable: str, default: str = "", read: Callable[[str], Any] = str
) -> dict[str, Any]:
    """Return `default` and `type` of an argument of a command that has a variable, too."""
    return {"default": VariableText.read(variable, default), "type": argument_reader(read)}


def number_argument(kind: type[int] | type[float], at_least: float = 0) -> Callable[[str], Any]:
    """Return the `type` of an argument that is a finite number, for `int` a whole one."""
    bounds = Bounds(at_least=at_least)
    return argument_reader(lambda text: parse_number(text, kind, bounds))


def port_argument(text: str) -> int:
    """Return a port; the `type` of an argument."""
    port: int = argument_reader(lambda text: parse_number(text, int, Bounds(at_most=65535)))(text)
    return port


def check_variables(environ: Mapping[str, str], own: AbstractSet[str] = frozenset()) -> None:
    """Raise RequestError for a variable `LEASEHOLD_...` that nothing reads, with the nearest one.

    All settings may be in one ConfigMap, so those of every component count as known. Kubernetes
    sets variables for each Service of the namespace; those of a Service `leasehold...` are skipped.
    """
    known = own | NAMES
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known and not _is_of_service(name, environ):
            words = [each.removeprefix(PREFIX) for each in sorted(known)]
            near = difflib.get_close_matches(name.removeprefix(PREFIX), words, n=1, cutoff=0.7)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ": remove it"
            raise RequestError(f"{name} is not a setting{hint}")


_OF_SERVICE = re.compile(r"(\w+?)_(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_[A-Z]+\w*)?)")


def _is_of_service(name: str, environ: Mapping[str, str]) -> bool:
    """Whether Kubernetes sets the variable for a Service, which then has a SERVICE_HOST, too."""
    found = _OF_SERVICE.fullmatch(name)
    return found is not None and f"{found[1]}_SERVICE_HOST" in environ


def variable_of(name: str) -> str:
    """Return the variable of the setting of this name."""
    return PREFIX + name.upper()

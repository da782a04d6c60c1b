"""Templates of kubectl's `-o jsonpath=`, such as `{.leases[*].name}`; pure.

https://kubernetes.io/docs/reference/kubectl/jsonpath/
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from shared.model.bounds import printable_lines
from shared.model.errors import RequestError

_EXPRESSION = re.compile(r"""\{((?:"[^"]*"|'[^']*'|[^{}"'])*)\}""")
_STEP = re.compile(
    r"""\.?\[(?P<key>'[^']*'|"[^"]*"|-?\d+|\*)\]"""
    r"""|\[\?\(@(?P<path>[^=!]*?)\s*(?P<operator>==|!=)\s*(?P<value>[^)]*)\)\]"""
    r"""|\.(?P<name>[\w-]+|\*)"""
)
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\"": '"'}


def expand(template: str, document: Any) -> str:
    """Return a template with the values of a document. Raises RequestError for other syntax."""
    pieces = _EXPRESSION.split(template if "{" in template else f"{{{template}}}")
    if any("{" in literal for literal in pieces[::2]):
        raise RequestError(f"-o jsonpath: {template!r} has a {{ without }}")
    return "".join(_expanded(pieces, document, document))


def _expanded(pieces: Sequence[str], here: Any, root: Any) -> Iterator[str]:
    """Yield the text of pieces: those with even numbers are literal, the others expressions."""
    number = 0
    while number < len(pieces):
        piece = pieces[number].strip() if number % 2 else pieces[number]
        if number % 2 and piece.startswith("range "):
            end = _end_of(pieces, number)
            for item in _values(piece.removeprefix("range ").strip(), here, root):
                yield from _expanded(pieces[number + 1 : end], item, root)
            number = end
        elif number % 2 and piece[:1] in {'"', "'"}:
            yield re.sub(r'\\[nt"]', lambda found: _ESCAPES[found[0]], piece[1:-1])
        elif number % 2:
            yield printable_lines(" ".join(map(_text, _values(piece, here, root))))
        else:
            yield piece
        number += 1


def _end_of(pieces: Sequence[str], start: int) -> int:
    depth = 0
    for number in range(start, len(pieces), 2):
        piece = pieces[number].strip()
        depth += piece.startswith("range ") - (piece == "end")
        if not depth:
            return number
    raise RequestError("-o jsonpath: {range} without {end}")


def _values(path: str, here: Any, root: Any) -> list[Any]:
    """Return the values at a path; `$` is the document, `@` or nothing the current value."""
    found, rest = [root if path[:1] == "$" else here], path.lstrip("$@")
    while rest:
        step = _STEP.match(rest)
        if step is None:
            raise RequestError(
                f"-o jsonpath: {rest!r} is not supported; -o json has everything, also for jq"
            )
        found = [value for each in found for value in _next(step, each, root)]
        rest = rest[step.end() :]
    return found


def _next(step: re.Match[str], here: Any, root: Any) -> list[Any]:
    name = step["name"] or (step["key"] or "").strip("'\"")
    members = list(here.values()) if isinstance(here, dict) else here
    if step["operator"]:
        wanted = step["value"].strip().strip("'\"")
        return [
            each
            for each in (members if isinstance(members, list) else ())
            if (wanted in map(_text, _values(step["path"], each, root)))
            == (step["operator"] == "==")
        ]
    if name == "*":
        return members if isinstance(members, list) else []
    if isinstance(here, dict):
        return [here[name]] if name in here else []
    if isinstance(here, list) and re.fullmatch(r"-?\d+", name):
        return here[int(name) :][:1] if -len(here) <= int(name) else []
    return []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

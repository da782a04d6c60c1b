"""`docs/timings.md`: every constant and setting in seconds, with what it is for.

Constants of `simcluster`, tools and tests are left out, and so are units, rates, bounds on values,
and names that begin with an underscore: no operator or reader has to weigh them.
"""

import ast
import dataclasses
import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from tools.generate.pages import DOCS, ROOT, filled

PAGE = DOCS / "timings.md"
FOLDERS = ("services", "shared")
UNITS = frozenset({"MINUTE_S", "HOUR_S", "DAY_S"})
BOUNDS = frozenset({"shared/model/bounds.py"})
"""Modules of which constants in seconds are bounds on values."""
TIMED_CLASSES = ("Settings", "Timing", "Policy", "PortBounds")
"""How the names of classes end that hold timings."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A constant or a field in seconds."""

    path: str
    name: str
    """With its class, if it is a field."""
    value: object
    text: str
    """What it is for, or empty if the code does not say it."""

    @property
    def room(self) -> str:
        """The folder of the service, or of what services share."""
        return "/".join(Path(self.path).parts[:2])


def timings() -> list[Timing]:
    """Return all of them, by path and place."""
    return [
        timing
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_pb2" not in path.name
        for timing in _timings_of(path)
    ]


def _timings_of(path: Path) -> Iterator[Timing]:
    relative = str(path.relative_to(ROOT))
    tree = ast.parse(path.read_text())
    if "_S" not in path.read_text() and "_s" not in path.read_text():
        return
    if relative not in BOUNDS:
        for name, text in _documented(tree.body):
            if _is_constant(name):
                yield Timing(relative, name, getattr(_module(relative), name), text)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith(TIMED_CLASSES):
            yield from _fields_of(relative, node)


def _is_constant(name: str) -> bool:
    is_time = name.endswith("_S") and not name.endswith("_PER_S")
    return is_time and not name.startswith("_") and name not in UNITS


def _fields_of(relative: str, node: ast.ClassDef) -> Iterator[Timing]:
    texts = {name: text for name, text in _documented(node.body) if name.endswith("_s")}
    kind = getattr(_module(relative), node.name)
    if not texts or not dataclasses.is_dataclass(kind):
        return
    for field in dataclasses.fields(kind):
        if field.name in texts and field.default is not dataclasses.MISSING:
            text = str(field.metadata.get("help") or texts[field.name])
            yield Timing(relative, f"{node.name}.{field.name}", field.default, text)


def _module(relative: str) -> Any:
    return importlib.import_module(relative.removesuffix(".py").replace("/", "."))


def _documented(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield each name that is assigned a value, and the docstring below it."""
    for node, following in pairwise((*body, ast.Pass())):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                pass
            case _:
                continue
        text = ""
        match following:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                text = " ".join(docstring.split())
        yield name, text


def undocumented(found: Iterable[Timing]) -> list[str]:
    """Return the constants and fields of which the code does not say what they are for."""
    return [f"{timing.path} {timing.name}" for timing in found if not timing.text]


def generated() -> str:
    """Return the page."""
    return filled(PAGE, {"timings": _tables(timings())})


def _tables(found: list[Timing]) -> str:
    parts = []
    for room, of_room in groupby(found, key=lambda timing: timing.room):
        rows = [
            f"| `{timing.name}` | {_shown(timing.value)} | {_cell(timing)} |" for timing in of_room
        ]
        parts.append("\n".join([f"## {room}\n", "| | seconds | |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _cell(timing: Timing) -> str:
    file = "/".join(Path(timing.path).parts[2:])
    text = timing.text.replace("|", "\\|")
    return f"{text[:1].upper()}{text[1:].removesuffix('.')} ({file})"


def _shown(value: object) -> str:
    match value:
        case dict():
            return ", ".join(f"{key}: {_shown(number)}" for key, number in value.items())
        case tuple():
            return " to ".join(map(_shown, value))
        case int() | float():
            return f"{value:,.10g}"
        case _:
            return "unset"

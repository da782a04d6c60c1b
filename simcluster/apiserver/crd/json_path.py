"""Kubernetes' JSONPath in columns and selectable fields: names, indices, `*`, filters; pure."""

import re
from collections.abc import Callable, Iterator

from simcluster.apimachinery.objects import JsonValue

_STEP = re.compile(
    r"""\.(?P<name>(?:\\.|[^.\[\]\\])+)
    |\[(?P<index>-?\d+)\]
    |\[(?P<quote>['"])(?P<quoted>(?:\\.|(?!(?P=quote)).)*)(?P=quote)\]
    |(?P<every>\.?\[\*\]|\.\*)
    |\[\?\(\s*@(?P<field>[^=!<>\s]*)\s*(?:(?P<op>==|!=)\s*(?P<value>'[^']*'|"[^"]*"|[\w.-]+))?\s*\)\]
    """,
    re.VERBOSE,
)
_LITERALS: dict[str, JsonValue] = {"true": True, "false": False, "null": None}

Step = Callable[[JsonValue], Iterator[JsonValue]]


def compile_path(path: str) -> Callable[[JsonValue], list[JsonValue]]:
    """Return a function that finds all values at a path; `ValueError` for an unsupported path."""
    steps = list(_steps(path))

    def find(obj: JsonValue) -> list[JsonValue]:
        matches = [obj]
        for step in steps:
            matches = [below for match in matches for below in step(match)]
        return matches

    return find


def _steps(path: str) -> Iterator[Step]:
    at = 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None:
            raise ValueError(f"unrecognized path {path!r} at {at}")
        yield _step(match)
        at = match.end()


def _step(match: re.Match[str]) -> Step:
    if match["every"]:
        return _every
    if match["index"]:
        return _item(int(match["index"]))
    if match["field"] is not None:
        return _filter(match["field"], match["op"], match["value"])
    name = match["name"] if match["name"] is not None else match["quoted"]
    return _child(re.sub(r"\\(.)", r"\1", name))


def _every(value: JsonValue) -> Iterator[JsonValue]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _item(index: int) -> Step:
    def step(value: JsonValue) -> Iterator[JsonValue]:
        if isinstance(value, list) and -len(value) <= index < len(value):
            yield value[index]

    return step


def _child(name: str) -> Step:
    def step(value: JsonValue) -> Iterator[JsonValue]:
        if isinstance(value, dict) and name in value:
            yield value[name]

    return step


def _filter(path: str, operator: str | None, text: str | None) -> Step:
    find = compile_path(path)
    wanted = None if text is None else _literal(text)

    def holds(item: JsonValue) -> bool:
        value = find(item)
        if operator is None:
            return bool(value)
        return bool(value) and (value[0] == wanted) is (operator == "==")

    return lambda value: (item for item in _every(value) if holds(item))


def _literal(text: str) -> JsonValue:
    if text[0] in "'\"":
        return text[1:-1]
    if text in _LITERALS:
        return _LITERALS[text]
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text

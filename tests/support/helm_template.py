"""Renders what our Helm chart is written in: so much of Go's template language and no more.

`{{- if X }}`, `{{- else }}`, `{{- end }}` and `{{- range $name, $value := X }}` on lines of their
own, `{{ X | quote }}`, `toJson`, `sha256sum` and `default N` among text, where X is a path below
`.Values` or `.Release`. Anything else is an error, so that the generator cannot quietly come to
need more.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_ACTION = re.compile(r"^\s*\{\{- (.*?) \}\}$")
_VALUE = re.compile(r"\{\{ (.*?) \}\}")
_RANGE = re.compile(r"^range \$name, \$value := (\S+)$")

Scope = Mapping[str, Any]


def rendered(template: str, values: Mapping[str, Any], namespace: str) -> str:
    """Return the text that Helm makes of the template."""
    scope = {"Values": values, "Release": {"Namespace": namespace, "Name": "leasehold"}}
    return "\n".join(_block(iter(template.splitlines()), scope)) + "\n"


def _block(rest: Iterator[str], scope: Scope) -> Iterator[str]:
    for line in rest:
        action = _ACTION.match(line)
        if action is None:
            yield _VALUE.sub(lambda found: _written(found[1], scope), line)
            continue
        inside, otherwise = _branches(rest)
        loop = _RANGE.match(action[1])
        if loop is not None:
            for name, value in sorted(_looked_up(loop[1], scope).items()):
                yield from _block(iter(inside), {**scope, "$name": name, "$value": value})
        elif _holds(action[1], scope):
            yield from _block(iter(inside), scope)
        else:
            yield from _block(iter(otherwise), scope)


def _branches(rest: Iterator[str]) -> tuple[list[str], list[str]]:
    """The lines up to the end that belongs to this beginning, before and after its else."""
    found: tuple[list[str], list[str]] = ([], [])
    branch, depth = 0, 0
    for line in rest:
        action = _ACTION.match(line)
        expression = action[1] if action is not None else ""
        if expression == "end" and depth == 0:
            return found
        if expression == "else" and depth == 0:
            branch = 1
            continue
        depth += {"end": -1}.get(expression, int(expression.startswith(("if ", "range "))))
        found[branch].append(line)
    raise ValueError("no end")


def _holds(expression: str, scope: Scope) -> bool:
    found = re.match(r"^if (not )?(\S+)$", expression)
    if found is None:
        raise ValueError(f"not a condition: {expression}")
    return bool(_looked_up(found[2], scope)) != bool(found[1])


def _looked_up(path: str, scope: Scope) -> Any:
    if path.startswith("$"):
        return scope[path]
    if not re.match(r"^(\.\w+)+$", path):
        raise ValueError(f"not a path: {path}")
    found: Any = scope
    for name in path.removeprefix(".").split("."):
        found = (found or {}).get(name)
    return found


def _written(expression: str, scope: Scope) -> str:
    if expression == '"{{"':
        return "{{"
    path, *pipes = expression.split(" | ")
    found = _looked_up(path, scope)
    for pipe in pipes:
        name, _, argument = pipe.partition(" ")
        if name == "default":
            found = found or json.loads(argument)
        elif name == "quote":
            found = json.dumps(str(found))
        elif name == "toJson":
            found = json.dumps(found, sort_keys=True)
        elif name == "sha256sum":
            found = hashlib.sha256(str(found).encode()).hexdigest()
        else:
            raise ValueError(f"not a function of ours: {pipe}")
    return str(found)

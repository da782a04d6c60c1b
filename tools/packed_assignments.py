"""Refuses several assignments in one line that are no pair: `python -m tools.packed_assignments`.

`a, b = x, y` and `a = b = x` are for a swap (`a, b = b, a`), for names that differ only in words
that belong together (`first_row, last_row = 0, 9`), and for a name beside the attribute or item
that keeps its value (`task = self.task = start()`).
"""

import ast
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("services", "shared", "simcluster", "tests", "tools")
TOGETHER = (
    {"x", "y", "z"}, {"x0", "y0"}, {"width", "height"}, {"row", "column"},
    {"low", "high"}, {"lowest", "highest"}, {"least", "most"}, {"min", "max"}, {"lower", "upper"},
    {"first", "second", "third", "last"}, {"begin", "end"}, {"start", "stop", "end"},
    {"from", "to"},
    {"before", "after"}, {"old", "new"}, {"previous", "current", "next"}, {"left", "right"},
    {"read", "write"}, {"reader", "writer"}, {"reads", "writes"}, {"key", "value"},
    {"host", "port"}, {"user", "password", "secret"}, {"certificate", "key"}, {"public", "private"},
    {"memory", "cores"}, {"cpu", "memory"}, {"a", "b", "c"}, {"one", "two", "other", "others"},
    {"true", "false"}, {"enter", "exit"}, {"hits", "misses"}, {"numerator", "denominator"},
    {"name", "namespace"}, {"mine", "theirs"}, {"here", "there"}, {"added", "removed"},
    {"requests", "limits"}, {"request", "limit"}, {"request", "reply"}, {"out", "err"},
    {"stdout", "stderr"}, {"major", "minor"}, {"head", "tail"}, {"source", "target"},
    {"quick", "slow"}, {"small", "large"}, {"idle", "busy"}, {"idle", "used"}, {"leased", "used"},
    {"ours", "theirs"}, {"younger", "older"}, {"young", "old"}, {"open", "closed"},
    {"wide", "narrow"},
)  # fmt: skip
"""Words that name the parts of one thing."""


def assignments(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each packed assignment."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        if len(node.targets) > 1:
            names = [ast.unparse(target) for target in node.targets]
            if not (_are_together(names) or _keeps(node.targets)):
                yield node.lineno, ast.unparse(node)
        elif _is_packed(node):
            yield node.lineno, ast.unparse(node)


def _is_packed(node: ast.Assign) -> bool:
    """Return whether a tuple of values is assigned to a tuple of names, and they are no pair."""
    (target,) = node.targets
    value = node.value
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)):
        return False
    if any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts)):
        return False
    names = [ast.unparse(part) for part in target.elts]
    read = {ast.unparse(part) for part in ast.walk(value) if isinstance(part, ast.expr)}
    return read.isdisjoint(names) and not _are_together(names)


def _are_together(names: list[str]) -> bool:
    return all(_is_pair(name, other) for name, other in combinations(names, 2))


def _is_pair(name: str, other: str) -> bool:
    """Return whether two names differ in one word, and these words belong together."""
    first = name.lower().replace(".", "_").strip("_").split("_")
    second = other.lower().replace(".", "_").strip("_").split("_")
    if len(first) != len(second):
        return False
    differing = [{*words} for words in zip(first, second, strict=True) if words[0] != words[1]]
    return len(differing) == 1 and any(differing[0] <= words for words in TOGETHER)


def _keeps(targets: list[ast.expr]) -> bool:
    """Return whether one name and one attribute or item get the value."""
    kinds = sorted(isinstance(target, ast.Name) for target in targets)
    return kinds == [False, True]


def packed() -> list[str]:
    """Return the packed assignments of all files, each with its file and line."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_pb2" not in path.name
        for line, text in assignments(ast.parse(path.read_text()))
    ]


def main() -> int:
    """Print what is refused, and return whether there is any."""
    refused = packed()
    for text in refused:
        print(f"{text}: write one assignment a line")
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())

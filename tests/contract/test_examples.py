"""The examples in docstrings of production code give what they show."""

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules_with_examples() -> Iterator[str]:
    for package in ("services", "shared"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if ">>> " in path.read_text():
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_examples_in_docstrings_give_what_they_show() -> None:
    results = {
        name: doctest.testmod(importlib.import_module(name)) for name in modules_with_examples()
    }

    assert [name for name, result in results.items() if result.failed] == []
    assert sum(result.attempted for result in results.values()) >= 20

"""Both distributions declare the packages that they import, and no others."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NEVER_IMPORTED = {
    "leasehold": {"tzdata"},
    "leasehold-simcluster": set[str](),
}
"""tzdata is what `zoneinfo` reads where the system has no time zones."""
OWN = {"services", "shared", "simcluster"}
NAME = re.compile(r"[A-Za-z0-9._-]+")
PROVIDERS = packages_distributions()


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def imported(*folders: str) -> set[str]:
    """The first names of all modules that the files of folders import, tests left out."""
    found: set[str] = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            if "tests" not in path.relative_to(ROOT).parts:
                found.update(first_names(path.read_text()))
    return found - set(sys.stdlib_module_names) - OWN


def first_names(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def declared(project: Mapping[str, Any], *extras: str) -> set[str]:
    lines = [*project["dependencies"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return {normalized(found[0]) for line in lines if (found := NAME.match(line))}


def project(path: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = tomllib.loads((ROOT / path).read_text())["project"]
    return found


def providers(module: str) -> set[str]:
    return {normalized(name) for name in PROVIDERS.get(module, ())}


DISTRIBUTIONS = [
    ("pyproject.toml", ("services", "shared"), ("embedded",)),
    ("simcluster/pyproject.toml", ("simcluster",), ()),
]


@pytest.mark.parametrize(("path", "folders", "extras"), DISTRIBUTIONS)
def test_each_import_is_of_a_declared_package(
    path: str, folders: tuple[str, ...], extras: tuple[str, ...]
) -> None:
    names = declared(project(path), *extras)

    missing = {module for module in imported(*folders) if not providers(module) & names}

    assert missing == set()


@pytest.mark.parametrize(("path", "folders", "extras"), DISTRIBUTIONS)
def test_each_declared_package_is_imported(
    path: str, folders: tuple[str, ...], extras: tuple[str, ...]
) -> None:
    found = project(path)
    used = {name for module in imported(*folders) for name in providers(module)}

    unused = declared(found) - used - NEVER_IMPORTED[found["name"]] - {"leasehold"}

    assert unused == set()

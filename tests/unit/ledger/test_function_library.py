"""The library of functions that Redis loads: what is in it, and what its functions may call."""

import re
from collections.abc import Iterable
from functools import cache
from importlib import resources

import pytest

from shared.ledger.function_library import FUNCTIONS, bundled, library, modules

COMMAND = re.compile(r"\b(?:call|call_all|pcall)\((?:call, )?'([A-Z]+)'")
REQUIRED = re.compile(r"\brequire\('(\w+)'\)")
DISPATCH = "dispatch"
TEXTS = modules()


@cache
def required_by(module: str) -> frozenset[str]:
    """Return a module with all that it requires, and all that these require."""
    reached = set[str]()
    left = {module}
    while left:
        name = left.pop()
        reached.add(name)
        left |= set(REQUIRED.findall(TEXTS[name])) - reached
    return frozenset(reached)


def commands_in(names: Iterable[str]) -> set[str]:
    return {command.lower() for name in names for command in COMMAND.findall(TEXTS[name])}


def test_each_file_of_a_function_is_the_module_of_one_and_no_other_is() -> None:
    files = (resources.files("shared.ledger") / "functions").iterdir()
    names = {file.name.removesuffix(".lua") for file in files if file.name.endswith(".lua")}

    assert {function.module for function in FUNCTIONS.values()} == names


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_may_call_only_commands_of_its_modules(name: str) -> None:
    function = FUNCTIONS[name]

    assert function.commands <= commands_in(required_by(function.module) | required_by(DISPATCH))


@pytest.mark.parametrize("module", TEXTS)
def test_each_command_of_a_module_is_declared_by_a_function_that_uses_it(module: str) -> None:
    users = [each for each in FUNCTIONS.values() if module in required_by(each.module)]
    users = users or list(FUNCTIONS.values())  # what reads the ledger is used by all

    declared = frozenset[str]().union(*(function.commands for function in users))
    assert commands_in([module]) <= declared


def test_each_module_is_required() -> None:
    roots = {function.module for function in FUNCTIONS.values()} | {DISPATCH}

    assert frozenset[str]().union(*map(required_by, roots)) == set(TEXTS)


def test_a_message_about_a_line_of_the_library_names_file_and_line() -> None:
    lines = library().text.splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if "local function take_slot" in line)
    in_file = TEXTS["reserve"].splitlines()

    located = library().located(f"user_function:{number}: boom, on @user_function:{number}.")

    place = f"reserve.lua:{in_file.index('local function take_slot(device)') + 1}"
    assert located == f"{place}: boom, on @{place}."


def test_a_library_with_another_text_has_another_name_and_its_functions_too() -> None:
    other = bundled({**TEXTS, "status": "return function() end\n"})

    assert other.name != library().name
    assert other.full_name("status") != library().full_name("status")
    assert library().name not in other.text

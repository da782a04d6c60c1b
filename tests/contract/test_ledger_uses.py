"""Which functions of the ledger each service calls, by its code, and which it may call."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from services.auth.redis_users import USERS, RedisUser
from shared.ledger.function_library import FUNCTIONS

LEDGER = Path("shared/ledger")
FOLDERS = {
    "placer": ("services/placer", "shared/runtime/ledger_mirror.py"),
    "planner": ("services/planner", "shared/runtime/leadership.py"),
    "binder": ("services/binder", "services/claims", "shared/runtime/leadership.py"),
    "timekeeper": ("services/timekeeper",),
    "extender": ("services/extender", "shared/runtime/ledger_mirror.py"),
    "api": ("services/api",),
    "operator": ("services/cli",),
}
CLASSES = {
    "ledger": ("RedisLeases", "LedgerInventory"),
    "waiting_pods": ("WaitingPods",),
    "resizes": ("LeaseResizes",),
    "claims": ("ClaimLeases",),
    "totals": ("LedgerTotals",),
    "quotas": ("LedgerQuotas",),
    "ledger_quotas": ("LedgerQuotas",),
    "checks": ("RecordChecks",),
    "run_times": ("LearnedRunTimes",),
    "libraries": ("FunctionLibraries",),
    "budgets": ("Budgets",),
    "accounts": ("Budgets",),
    "preemptions": ("Preemptions",),
    "gated_pods": ("GatedPods",),
    "store": ("Budgets", "Preemptions", "GatedPods"),
}
"""Classes of objects by the names that services have for them; of `store`, those they import."""
OWNER_OF = {"Budgets": "budgets", "Preemptions": "preemptions", "GatedPods": "gated_pods"}
OF_CONNECTIONS = frozenset({"try_write"})
"""Functions that any connection calls; without permission to write, it learns that it has none."""


class Use(NamedTuple):
    """A method that is called, or a function, by the name of its object, or empty."""

    owner: str
    name: str


class Method(NamedTuple):
    """What a method of the ledger runs and calls."""

    functions: frozenset[str]
    uses: frozenset[Use]


def uses_in(tree: ast.AST) -> Iterator[Use]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = getattr(owner, "attr", getattr(owner, "id", ""))
            yield Use(name, node.attr)
        elif isinstance(node, ast.Name):
            yield Use("", node.id)


def functions_in(tree: ast.AST) -> Iterator[str]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    for call in calls:
        named = call.args[0]
        is_run = isinstance(call.func, ast.Attribute) and call.func.attr in {"run", "run_raw"}
        if is_run and isinstance(named, ast.Constant) and named.value in FUNCTIONS:
            yield str(named.value)


def ledger_methods() -> dict[tuple[str, str], Method]:
    """Return the methods by class and name; functions have the class ""."""
    found: dict[tuple[str, str], Method] = {}
    for path in LEDGER.glob("*.py"):
        tree = ast.parse(path.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for name, body in [("", tree.body), *((each.name, each.body) for each in classes)]:
            for each in body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    method = Method(frozenset(functions_in(each)), frozenset(uses_in(each)))
                    found[name, each.name] = method
    return found


BASES = {"RedisLeases": "LedgerInventory"}


def resolved(use: Use, of_class: str, methods: Mapping[tuple[str, str], Method]) -> set[str]:
    """Return the classes whose method this may be, for code of a class."""
    if use.owner in {"self", ""}:
        owners: tuple[str, ...] = (of_class, BASES.get(of_class, ""), "")
    else:
        owners = CLASSES.get(use.owner, ())
    return {owner for owner in owners if (owner, use.name) in methods}


def functions_of(uses: Iterable[tuple[str, Use]]) -> set[str]:
    """Return the functions that code calls, of which these are the uses, each with its class."""
    methods = ledger_methods()
    found = set[str]()
    left = list(uses)
    seen = set[tuple[str, str]]()
    while left:
        of_class, use = left.pop()
        for owner in resolved(use, of_class, methods):
            if (owner, use.name) not in seen:
                seen.add((owner, use.name))
                method = methods[owner, use.name]
                found |= method.functions
                left += ((owner, each) for each in method.uses)
    return found


def files_of(user: str) -> Iterator[Path]:
    for name in FOLDERS[user]:
        yield from (Path(name).rglob("*.py") if Path(name).is_dir() else [Path(name)])


def uses_of(user: str) -> Iterator[tuple[str, Use]]:
    """Yield what the files of a service use of objects that are not its own."""
    uses = [use for path in files_of(user) for use in uses_in(ast.parse(path.read_text()))]
    named = {use.name for use in uses}
    for owner, name in uses:
        if owner == "store":
            for kind in named.intersection(CLASSES["store"]):
                yield "", Use(OWNER_OF[kind], name)
        elif owner not in {"", "self"}:
            yield "", Use(owner, name)


@pytest.mark.parametrize("user", USERS, ids=lambda user: user.name)
def test_each_user_may_call_the_functions_that_its_service_calls_and_no_others(
    user: RedisUser,
) -> None:
    assert set(user.functions) == functions_of(uses_of(user.name)) | OF_CONNECTIONS

"""The checks and figures of the code, and how many repetitions of tests a run may have."""

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tools.packed_assignments import assignments
from tools.size import ROOT, Size, room_of, size_of, sizes, table


@pytest.mark.parametrize(
    "line",
    [
        "names, found = [], {}",
        "first_row, last_column = 0, 9",
        "self.pods, self.most = pods, 3",
        "used = taken = 0",
        "self.names = self.found = []",
    ],
)
def test_assignments_of_what_is_no_pair_are_packed(line: str) -> None:
    assert [found for _, found in assignments(ast.parse(line))] == [ast.unparse(ast.parse(line))]


@pytest.mark.parametrize(
    "line",
    [
        "one, other = other, one",
        "before, now = now, clock()",
        "first_row, last_row = 0, 9",
        "low = high = 0",
        "task = self.task = start()",
        "name, value = line.split()",
        "first, *rest = 1, 2, 3",
        "count = 1",
    ],
)
def test_a_pair_a_swap_and_a_value_that_is_kept_are_not(line: str) -> None:
    assert list(assignments(ast.parse(line))) == []


SOURCE = '"""Two words."""\n\n# a comment\n\ndef double(x):\n    """Twice."""\n    return 2 * x\n'


def test_the_size_of_a_file_is_that_of_what_is_read() -> None:
    source = (
        '"""Two words."""\n\n# a comment\n\ndef double(x):\n    """Twice."""\n    return 2 * x\n'
    )

    assert size_of(source) == Size(files=1, statements=2, tokens=10, docstring_words=3)


def test_rooms_are_the_folders_below_those_of_the_repository() -> None:
    path = next(ROOT.glob("services/binder/bind/pod_binder.py")).relative_to(ROOT)

    of = sizes([path, path])

    assert room_of(path) == "services/binder"
    assert of["services/binder"].files == 2
    assert f"| **services** | 2 | {of['services/binder'].statements} |" in table(of)


@pytest.mark.parametrize(("number", "status"), [(3, 0), (4, 1)])
def test_a_run_with_more_than_three_repetitions_fails(number: int, status: int) -> None:
    reporter = SimpleNamespace(stats={"rerun": [None] * number})
    plugins = SimpleNamespace(get_plugin=lambda _: reporter)
    config = SimpleNamespace(pluginmanager=plugins)
    session: Any = SimpleNamespace(config=config, exitstatus=pytest.ExitCode.OK)

    conftest.pytest_sessionfinish(session)

    assert session.exitstatus == status

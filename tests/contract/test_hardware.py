"""The page of what was seen on which hardware: all of it, and with commands that there are."""

import ast
import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from services.node_agent.settings import AgentSettings
from tools.generate.compatibility import NOT_SHOWN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hardware.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_lists_exactly_the_statements_without_a_test() -> None:
    table = PAGE.partition("<!-- not shown -->")[2].partition("<!-- end -->")[0]

    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]

    assert rows == sorted(NOT_SHOWN["hami_core"])


def test_the_table_of_results_has_a_row_for_each_procedure() -> None:
    table = PAGE.partition("<!-- procedures -->")[2].partition("<!-- end -->")[0]

    rows = re.findall(r"^\| \[([^\]]+)\]\(#[^)]+\) \|", table, re.MULTILINE)

    assert rows
    assert rows == re.findall(r"^### (.+)$", PAGE.partition("## Procedures")[2], re.MULTILINE)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_the_pages_programs_use_existing_code(program: str) -> None:
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("services."):
            module = importlib.import_module(str(node.module))
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_the_pages_programs_without_a_gpu_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeding, changing = (p for p in PROGRAMS if "NvmlProcesses" not in p)

    for program in (seeding, changing):
        exec(program.replace("/tmp/region", str(tmp_path)), {})  # noqa: S102

    assert (tmp_path / "r.cache").stat().st_size == 2008953


def test_the_agents_flags_on_the_page_exist() -> None:
    known = {f"--{field.name.replace('_', '-')}" for field in fields(AgentSettings)}
    lines = re.findall(r"services\.node_agent (.*)", PAGE)

    used = {flag for line in lines for flag in re.findall(r"--[a-z-]+", line)}

    assert used
    assert used <= known


def test_other_pages_link_to_the_hardware_page() -> None:
    for page in ("README.md", "docs/operations.md", "docs/compatibility.md"):
        assert "hardware.md" in (ROOT / page).read_text(), page

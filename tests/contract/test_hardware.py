"""The page of what was seen on which hardware: all of it, and with commands that there are."""

import re
from dataclasses import fields
from pathlib import Path

from services.node_agent.isolation.region import RegionPath
from services.node_agent.settings import AgentSettings
from tests.benchmarks.hardware import STEPS, raise_limits, seed
from tools.generate.compatibility import NOT_SHOWN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hardware.md").read_text()


def test_the_page_lists_exactly_the_statements_without_a_test() -> None:
    table = PAGE.partition("<!-- not shown -->")[2].partition("<!-- end -->")[0]

    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]

    assert rows == sorted(NOT_SHOWN["hami_core"])


def test_the_table_of_results_has_a_row_for_each_procedure() -> None:
    table = PAGE.partition("<!-- procedures -->")[2].partition("<!-- end -->")[0]

    rows = re.findall(r"^\| \[([^\]]+)\]\(#[^)]+\) \|", table, re.MULTILINE)

    assert rows
    assert rows == re.findall(r"^### (.+)$", PAGE.partition("## Procedures")[2], re.MULTILINE)


def test_the_steps_of_the_page_exist() -> None:
    used = re.findall(r"tests\.benchmarks\.hardware (\w+)", PAGE)

    assert sorted(used) == sorted(STEPS)


def test_the_steps_without_a_gpu_run(tmp_path: Path) -> None:
    place = RegionPath(directory=str(tmp_path), name="r.cache")

    seed(place)
    raise_limits(place)

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
